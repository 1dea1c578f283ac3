"""Real devices that are late at random: every launch, every completion flag, every NPU call.

    python -m tests.runtime.stress --steps 5000

Between two steps all activations are overwritten, so that a stale read shows; the logits must be
those of undisturbed devices, bit for bit, because the kernels are the same. `late` is also what
`test_stress` runs for a moment.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl

from hetero.backends.protocol import Completion
from hetero.backends.registry import open_device
from hetero.models import open_model
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.pool import ActivationPool
from hetero.runtime.program import PREQUEUE, RUN, SUBMIT
from hetero.runtime.step import Step
from hetero.runtime.waits import SyncMethod
from tests.runtime.models import context_of, emptied, tiny_model
from tests.runtime.plans import random_plan

GRAPHS = (1, 2, 4, 8, 32, 64)
PROMPT = 23
CONTEXT = 80
POISON = 7e7
WORK = """
__kernel void work(__global float *x, int rounds) {
  float v = x[0];
  for (int r = 0; r < rounds; ++r) v = v * 0.999f + 0.5f;
  x[0] = v;
}
"""


def open_engine(folder: Path, seed: int, sync: SyncMethod = "fast") -> Engine:
    """OpenCL and ONNX Runtime on a plan that cuts every matmul in a way of its own."""
    loaded = open_model(str(folder), weights="f32")
    plan = random_plan(loaded.spec(), PROMPT, GRAPHS, random.Random(seed))
    devices: Any = {"gpu": open_device("opencl"), "npu": open_device("ort-cpu", graph_sizes=GRAPHS)}
    kept = {kind: devices[kind] for kind in plan.devices()}
    return Engine(loaded.weights, plan, kept, max_seq_len=CONTEXT, sync=sync)


@contextmanager
def late(engine: Engine, rng: random.Random, contexts: Sequence[Context] = ()) -> Iterator[None]:
    """The engine's steps on `contexts` (default: `context_of`) as `delay` makes them."""
    engine.deployment.lower()
    steps = {
        id(step): step
        for context in contexts or (context_of(engine),)
        for step in (
            engine.steps.step(context, "prefill", PROMPT),
            *(
                engine.steps.step(context, "decode", 1, wait_values=wait_values)
                for wait_values in (False, True)
            ),
        )
    }
    for step in steps.values():
        delay(step, engine.devices["gpu"], rng)
    try:
        yield
    finally:
        engine.deployment.lower()


def delay(step: Step, gpu: Any, rng: random.Random) -> None:
    """Every launch and flag of the GPU waits for some work first, every NPU call sleeps around."""
    kernel = cl.Kernel(cl.Program(gpu.context, WORK).build(), "work")
    data = cl.Buffer(gpu.context, cl.mem_flags.READ_WRITE, 4)

    def busy() -> None:
        rounds = rng.choice((0, 0, 0, 2_000, 20_000, 200_000))
        if rounds:
            kernel(gpu.queue, (1,), (1,), data, np.int32(rounds))

    def submit_late(submit: Callable[[], Completion]) -> Callable[[], Completion]:
        def call() -> Completion:
            busy()
            return submit()

        return call

    def run_late(run: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            time.sleep(rng.choice((0.0, 0.0, 5e-5, 3e-4)))
            run()
            time.sleep(rng.choice((0.0, 0.0, 5e-5, 3e-4)))

        return call

    program = []
    for action in step.program:
        wrapped = {SUBMIT: submit_late, PREQUEUE: submit_late, RUN: run_late}.get(action.code)
        program.append(action._replace(target=wrapped(action.target)) if wrapped else action)
    step.program = tuple(program)


def logits(engine: Engine, tokens: list[int]) -> list[Any]:
    """After a prompt and after every further token, activations spoiled in between."""
    context = emptied(engine)
    spoil(engine)
    found = [engine.prefill(context, tokens[:PROMPT]).copy()]
    for token in tokens[PROMPT:]:
        spoil(engine)
        found.append(engine.decode(context, token).copy())
    return found


def spoil(engine: Engine) -> None:
    """Overwrite everything that a step has to write before it reads."""
    spoil_pool(engine.deployment.pool)


def spoil_pool(pool: ActivationPool) -> None:
    """As `spoil`."""
    for slot in pool.slots():
        if slot.name not in ("tokens", "position"):
            pool[slot].array[:] = POISON


def stress(folder: Path, steps: int, seed: int, sync: SyncMethod = "fast") -> int:
    """Run at least so many steps on late devices; how many. Raises `AssertionError`."""
    done = 0
    rng = random.Random(seed)
    while done < steps:
        count = min(CONTEXT - 1, PROMPT + max(1, min(40, steps - done)))
        tokens = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 263, count).tolist()
        with open_engine(folder, seed, sync) as engine:
            wanted = logits(engine, tokens)
            with late(engine, rng):
                for _ in range(1 + (steps > 500) * 9):
                    found = logits(engine, tokens)
                    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
                    done += len(found)
        seed += 1
    return done


def stress_contexts(folder: Path, steps: int, seed: int, threads: int = 2) -> int:
    """Threads that read answers on contexts of their own, at once, on late devices; how many steps
    ran. Raises `AssertionError` unless every bit is that of one after the other.
    """
    rng = random.Random(seed)
    count = PROMPT + max(1, steps // threads)
    prompts = [
        np.random.default_rng(rng.randrange(1 << 30)).integers(0, 263, count).tolist()
        for _ in range(threads)
    ]
    with open_engine(folder, seed) as engine:
        contexts = [engine.new_context() for _ in prompts]
        wanted = [feed(engine, *each) for each in zip(contexts, prompts, strict=True)]
        with late(engine, rng, contexts), ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(partial(feed, engine), contexts, prompts))
    for got, want in zip(found, wanted, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    return sum(len(got) for got in found)


def feed(engine: Engine, context: Context, tokens: list[int]) -> list[Any]:
    """As `logits`, on a context, holding the devices for a step at a time."""
    context.truncate(0)
    found: list[Any] = []
    for part in (tokens[:PROMPT], *tokens[PROMPT:]):
        with engine.lock:
            spoil(engine)
            if isinstance(part, list):
                found.append(engine.prefill(context, part).copy())
            else:
                found.append(engine.decode(context, part).copy())
    return found


def main() -> None:
    """Parse, stress, say how many steps were right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        done = stress(model, options.steps, options.seed)
        for seed in range(options.steps // 500):
            done += stress_contexts(model, 100, seed, threads=3)
    print(f"{done} steps right in {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
