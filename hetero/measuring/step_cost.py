"""The cost of a step of the runtime on its thread, without launches (`step_s` of a profile)."""

from __future__ import annotations

import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from hetero.backends.formats import DEFAULT_CACHE
from hetero.backends.host.affinity import assign_cores
from hetero.backends.memory import HostBuffer
from hetero.models import open_model
from hetero.placement.device_set import open_devices
from hetero.profiler.timing import cold_bytes
from hetero.runtime.engine import Engine
from hetero.solver.handmade import single_device

MODEL: Final = "demo"  # launches cost the same in every model; what is around them too
CONTEXT: Final = 8  # tokens behind which a step decodes


def measure_step_s(
    gpu: str = "auto", *, model_bytes: int | None = None, steps: int = 30, warm: int = 5
) -> float:
    """Return the median seconds of a decoding step before its first launch and after its last.

    They are those of `steps` steps, after `warm` others, on a GPU that is opened for it.

    As in a model of `model_bytes` (None: more than all caches hold), another core reads its weights
    between two steps while this thread sleeps: only this thread's own caches then hold some of what
    it needs, and the same Python code takes three times as long.
    """
    loaded = open_model(MODEL)
    weights = HostBuffer(min(model_bytes or cold_bytes(), cold_bytes()))
    weights.bytes[:] = 1
    opened = open_devices("gpu", gpu=gpu)
    try:
        engine = Engine(
            loaded.weights,
            single_device(loaded.spec(), "gpu"),
            opened.devices,
            max_seq_len=2 * CONTEXT,
            control_core=opened.control_core,
            kv=DEFAULT_CACHE,
        )
        return _measure(engine, weights, steps, warm)
    finally:
        opened.close()


def _measure(engine: Engine, weights: HostBuffer, steps: int, warm: int) -> float:
    seconds: list[float] = []
    context = engine.new_context()
    engine.prefill(context, [5] * CONTEXT)
    with ThreadPoolExecutor(1, initializer=_pin) as other:
        for _ in range(warm + steps):
            other.submit(weights.bytes.view(np.uint8).max).result()
            start_s = time.perf_counter()
            engine.decode(context, 5)
            whole_s = time.perf_counter() - start_s
            seconds.append(whole_s - engine.runner.last_run.wall_s)
            context.truncate(CONTEXT)
    return statistics.median(seconds[warm:])


def _pin() -> None:
    """Pin this thread to the core that plays the GPU, if one does."""
    core = assign_cores().gpu
    if core is not None:
        os.sched_setaffinity(threading.get_native_id(), {core})
