"""Measures the gain of OpenCL on every core of a PC over one core (`every_core` of a profile).

The number of PoCL's cores is fixed in a process, so each way is measured in processes of its own,
in turns: whole steps of a small model, which launches dominate, and of a large one, which memory
and arithmetic dominate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import allowed_cores, core_count, run_on
from hetero.backends.host.child import child_command
from hetero.backends.host.time_limits import time_limit
from hetero.backends.protocol import Device
from hetero.backends.registry import EVERY_CORE
from hetero.models import model_spec, open_model
from hetero.models.graph import model_graph
from hetero.models.model_weights import ModelWeights
from hetero.models.random_models import RandomWeights, known_config
from hetero.placement.device_set import open_devices
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import EveryCore, Phase
from hetero.profiler.substitutes import FILE_SUBSTITUTES
from hetero.runtime.engine import Engine
from hetero.solver.handmade import single_device

ONE_CORE: Final = "opencl"
SMALL: Final = "demo"
LARGE: Final = "llama-3.2-1b"
LAYERS: Final = 2  # of it: 68 MB in four bits, more than the caches of a PC
TOKENS: Final = {"small": 64, "large": 256}
PROMPTS: Final = 5
LIMIT_S: Final = 120.0  # of one process
ROUNDS: Final = 3
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
Times: TypeAlias = dict[str, list[float]]  # "small prefill", "large decode", …: one for each round


def can_use_every_core(device: Device) -> bool:
    """Return whether an open OpenCL device is one core of a processor that has more."""
    plain = device.info.backend == ONE_CORE and "cpu" in device.info.details
    return plain and core_count() > 1


def measure_every_core(
    formats: Iterable[WeightFormat],
    *,
    rounds: int = ROUNDS,
    checkpoint: Callable[[], None] = lambda: None,
) -> list[EveryCore]:
    """Return the gains for each format and phase.

    A file's format has those of a substitute. `checkpoint` is called before each process and may
    end the measurement by an exception. Raises `DeviceError` if a process failed.
    """
    kinds = [FILE_SUBSTITUTES[x][0] if x.of_file else x for x in formats]
    named, cores = tuple(dict.fromkeys(kinds)), allowed_cores()
    times: dict[str, dict[str, Times]] = {ONE_CORE: {}, EVERY_CORE: {}}
    try:
        for _ in range(rounds):
            for backend, step_s in times.items():
                checkpoint()
                for name, steps in _in_process(backend, named, cores).items():
                    for step, seconds in steps.items():
                        step_s.setdefault(name, {}).setdefault(step, []).append(seconds)
    except ProfileError:  # the checkpoint's
        raise
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise DeviceError(
            EVERY_CORE,
            "measuring it in a process of its own",
            _reason(error),
            "try the backend with `hetero bench`",
        ) from error
    return [
        _fit(name, phase, core_count(), times[ONE_CORE][name], times[EVERY_CORE][name])
        for name in named
        for phase in PHASES
    ]


def _fit(name: WeightFormat, phase: Phase, cores: int, one: Times, every: Times) -> EveryCore:
    """Return the two numbers of `EveryCore` from the steps of both models."""
    layers = {"small": model_spec(SMALL).layers, "large": LAYERS}
    one_s, every_s = (
        {size: statistics.median(times[f"{size} {phase}"]) for size in layers}
        for times in (one, every)
    )
    # every = one / speedup + layers · layer_s, for both
    steps = [[one_s[size], count] for size, count in layers.items()]
    (inverse, layer_s), *_ = np.linalg.lstsq(steps, [every_s[size] for size in layers])
    if inverse <= 0 or layer_s < 0:
        inverse, layer_s = every_s["large"] / one_s["large"], 0.0
    return EveryCore(
        weight_format=name,
        phase=phase,
        cores=cores,
        speedup=float(1 / inverse),
        layer_s=float(layer_s),
    )


def _in_process(
    backend: str, formats: Sequence[WeightFormat], cores: Sequence[int]
) -> dict[WeightFormat, dict[str, float]]:
    options = ["--backend", backend, "--cores", ",".join(map(str, cores))]
    command = child_command("hetero.measuring.every_core", *options, "--weights", ",".join(formats))
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=time_limit(LIMIT_S)
    )
    times: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return {WeightFormat(name): steps for name, steps in times.items()}


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines: list[str] = error.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit {error.returncode}"
    return str(error)


def _small(weight_format: WeightFormat) -> ModelWeights:
    """Return the demo; with random weights where its own have no static scales."""
    if weight_format.activations.static:
        return RandomWeights(open_model(SMALL).config, weight_format)
    return open_model(SMALL, weights=weight_format).weights


def _large(weight_format: WeightFormat) -> ModelWeights:
    whole = known_config(LARGE)
    config = replace(
        whole,
        num_layers=LAYERS,
        windows=whole.windows[:LAYERS],
        vocab_size=32000,
        max_position=2 * TOKENS["large"],
    )
    return RandomWeights(config, weight_format)


def time_steps(backend: str, weight_format: WeightFormat) -> dict[str, float]:
    """Return the median seconds of prompts and decoding steps of both models, in this process."""
    models = {"small": _small(weight_format)}
    models["large"] = _large(weight_format)
    seconds: dict[str, float] = {}
    for size, weights in models.items():
        prompts, steps = _time_model(backend, weights, TOKENS[size])
        seconds[f"{size} prefill"] = statistics.median(prompts)
        seconds[f"{size} decode"] = statistics.median(steps)
    return seconds


def _time_model(
    backend: str, weights: ModelWeights, tokens: int, steps: int = 48, warm: int = 4
) -> tuple[list[float], list[float]]:
    """Return the seconds of each prompt of some lengths, and of `steps` decoding steps.

    The steps follow `warm` others.
    """
    opened = open_devices("gpu", gpu=backend)
    engine = Engine(
        weights,
        single_device(model_graph(weights.config, weights.weight_format), "gpu"),
        opened.devices,
        max_seq_len=tokens + warm + steps,
        control_core=opened.control_core,
    )
    context = engine.new_context()
    prompts_s, steps_s = [], []
    for _ in range(1 + PROMPTS):
        context.truncate(0)
        start_s = time.perf_counter()
        engine.prefill(context, [5] * tokens)
        prompts_s.append(time.perf_counter() - start_s)
    for _ in range(warm + steps):
        start_s = time.perf_counter()
        engine.decode(context, 5)
        steps_s.append(time.perf_counter() - start_s)
    engine.close()
    return prompts_s[1:], steps_s[warm:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Time both models; print one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", choices=(ONE_CORE, EVERY_CORE), required=True)
    parser.add_argument("--cores", required=True)
    parser.add_argument("--weights", required=True)
    options = parser.parse_args(arguments)
    run_on(map(int, options.cores.split(",")))
    times = {
        name: time_steps(options.backend, WeightFormat(name)) for name in options.weights.split(",")
    }
    print(json.dumps(times))


if __name__ == "__main__":
    main()
