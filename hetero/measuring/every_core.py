"""Measures the gain of OpenCL on every core of a PC over one core (`every_core` of a profile).

The number of PoCL's cores is fixed in a process, so each way has a process of its own. They compute
in turns of about a second, since the speed of a shared machine's core changes in seconds: whole
steps of a small model, which launches dominate, and of a large one, which memory and arithmetic
dominate.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Self, TypeAlias

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import allowed_cores, core_count, run_on
from hetero.backends.host.json_child import ChildDiedError, JsonChild, serving
from hetero.backends.host.time_limits import time_limit
from hetero.backends.protocol import Device
from hetero.backends.registry import EVERY_CORE
from hetero.errors import UserError
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
STEPS: Final = 16  # of decoding in a round
LIMIT_S: Final = 120.0  # of an answer of a process
ROUNDS: Final = 9
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

    A file's format has those of a substitute. `checkpoint` is called before each round of a process
    and may end the measurement by an exception. Raises `DeviceError` if a process failed.
    """
    kinds = [FILE_SUBSTITUTES[x][0] if x.of_file else x for x in formats]
    named, cores = tuple(dict.fromkeys(kinds)), allowed_cores()
    times: dict[str, dict[str, Times]] = {ONE_CORE: {}, EVERY_CORE: {}}
    try:
        with ExitStack() as stack:
            steppers = {}
            for backend in times:
                checkpoint()
                steppers[backend] = stack.enter_context(Stepper(backend, named, cores))
            for _, (backend, stepper) in itertools.product(range(rounds), steppers.items()):
                checkpoint()
                for name, steps in stepper.round().items():
                    for step, seconds in steps.items():
                        known = times[backend].setdefault(name, {})
                        known.setdefault(step, []).append(seconds)
    except ProfileError:  # the checkpoint's
        raise
    except (OSError, ChildDiedError, ValueError) as error:
        raise DeviceError(
            EVERY_CORE,
            "measuring it in a process of its own",
            str(error),
            "try the backend with `hetero bench`",
        ) from error
    return [
        _fit(name, phase, core_count(), times[ONE_CORE][name], times[EVERY_CORE][name])
        for name in named
        for phase in PHASES
    ]


class Stepper:
    """A process that times both models on a backend: a context manager that ends it.

    Raises `ChildDiedError` if the process ends by itself, takes too long or says that it failed.
    """

    def __init__(self, backend: str, formats: Sequence[WeightFormat], cores: Sequence[int]) -> None:
        self._child = JsonChild("hetero.measuring.every_core")
        self._request = {"backend": backend, "cores": list(cores), "weights": list(formats)}

    def __enter__(self) -> Self:
        try:
            self._ask(self._request)
        except BaseException:
            self._child.close(now=True)
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._child.__exit__(*error)

    def round(self) -> dict[WeightFormat, dict[str, float]]:
        """Return the seconds of a prompt and of a decoding step of both models, by format."""
        times = self._ask({})
        return {WeightFormat(name): steps for name, steps in times.items()}

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._child.say(request)
        answer = self._child.hear(time_limit(LIMIT_S))
        if "failed" in answer:
            raise ChildDiedError(answer["failed"])
        return answer


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


class _Model:
    """An engine on a backend, and the prompt's tokens that it is timed with."""

    def __init__(self, backend: str, weights: ModelWeights, tokens: int) -> None:
        opened = open_devices("gpu", gpu=backend)
        self._engine = Engine(
            weights,
            single_device(model_graph(weights.config, weights.weight_format), "gpu"),
            opened.devices,
            max_seq_len=tokens + STEPS,
            control_core=opened.control_core,
        )
        self._context, self._tokens = self._engine.new_context(), tokens

    def seconds(self) -> dict[Phase, float]:
        """Return the seconds of a prompt, and the median of decoding steps behind it."""
        engine, context = self._engine, self._context
        context.truncate(0)
        start_s = time.perf_counter()
        engine.prefill(context, [5] * self._tokens)
        prompt_s, steps_s = time.perf_counter() - start_s, []
        for _ in range(STEPS):
            start_s = time.perf_counter()
            engine.decode(context, 5)
            steps_s.append(time.perf_counter() - start_s)
        return {"prefill": prompt_s, "decode": statistics.median(steps_s)}


def _models(backend: str, weight_format: WeightFormat) -> dict[str, _Model]:
    weights = {"small": _small(weight_format), "large": _large(weight_format)}
    models = {size: _Model(backend, own, TOKENS[size]) for size, own in weights.items()}
    for model in models.values():
        model.seconds()  # the first prompt prepares kernels
    return models


def main() -> None:
    """Open both models in each format, then time them at every message, until the input closes."""
    with serving() as (messages, write):
        try:
            _serve(messages, write)
        except (UserError, DeviceError, MemoryError) as error:
            write({"failed": str(error) or "out of memory"})


def _serve(messages: Iterator[dict[str, Any]], write: Callable[[dict[str, Any]], None]) -> None:
    request = next(messages)
    run_on(request["cores"])
    models = {name: _models(request["backend"], WeightFormat(name)) for name in request["weights"]}
    write({})
    for _ in messages:
        times = {
            name: {
                f"{size} {phase}": seconds
                for size, model in sizes.items()
                for phase, seconds in model.seconds().items()
            }
            for name, sizes in models.items()
        }
        write(times)


if __name__ == "__main__":
    main()
