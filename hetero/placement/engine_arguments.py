"""Arguments with which another engine runs a model where that engine is fastest.

Known by rates of the engine itself, which fitted profiles have (`DeviceProfile.units`). These
engines compute a layer on one device: with layers on several, devices work one after the other, and
no share of layers is faster than the fastest device alone. So there is one device for prompt and
answer, and no `-ts`.

Names of devices and of options: llama.cpp's docs/backend/snapdragon and its scripts/snapdragon;
GenieX's notes/run.md, whose `--compute` names the unit of either of its two runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from hetero.errors import UserError
from hetero.profiler.fitted_units import ModelWork, stack_of, unit_s
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile, FittedUnit
from hetero.solver.request import PlanRequest

OtherEngine: TypeAlias = Literal["llama.cpp", "geniex"]
RUNTIMES: Final[dict[OtherEngine, tuple[str, ...]]] = {
    "llama.cpp": ("llama.cpp",),
    "geniex": ("llama.cpp", "qairt"),
}
THREADS: Final = 6  # of llama.cpp's scripts for Snapdragons
SESSION_BYTES: Final = 3 << 30  # of weights: a session of the Hexagon has 32-bit addresses
NAMES: Final = {"cpu": "none", "gpu": "GPUOpenCL"}  # of llama.cpp's `--device`


class EngineArguments(NamedTuple):
    """Arguments, what must be in the environment, and why, in a sentence."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    reason: str
    seconds: Mapping[str, float]

    def document(self, engine: OtherEngine) -> dict[str, Any]:
        """Return the JSON document."""
        return {"engine": engine, **self._asdict(), "arguments": list(self.arguments)}


def engine_arguments(
    engine: OtherEngine, spec: ModelGraph, profile: DeviceProfile, request: PlanRequest
) -> EngineArguments:
    """Return the arguments for the prompts of a request, each with its answer.

    Raises `UserError` for a profile without rates of the engine.
    """
    units = [x for x in profile.units if x.engine in RUNTIMES[engine]]
    if not units:
        raise UserError(
            f"profile {profile.name} has no rates of {engine}: name a fitted chip with --profile "
            "(docs/reference/fitted-chips.md), or make one with `hetero profile --from`"
        )
    work = ModelWork(spec)
    seconds = sorted(((_mix_s(x, work, request), x) for x in units), key=lambda pair: pair[0])
    best = seconds[0][1]
    arguments, environment = _written(engine, best, work, profile)
    return EngineArguments(
        arguments, environment, _reason(seconds, request), {_name(x): s for s, x in seconds}
    )


def _mix_s(unit: FittedUnit, work: ModelWork, request: PlanRequest) -> float:
    """Return the seconds of the request's prompts and answers, weighted."""
    answer = request.decode_tokens_per_prompt
    return sum(
        weight
        * (
            unit_s(unit, work, "prefill", tokens)
            + answer * unit_s(unit, work, "decode", 1, tokens + answer // 2)
        )
        for tokens, weight in request.distribution.items()
    )


def _written(
    engine: OtherEngine, unit: FittedUnit, work: ModelWork, profile: DeviceProfile
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return arguments and environment for a unit."""
    if engine == "geniex":
        return ("--compute", unit.device), {}
    threads = min(THREADS, profile.environment.cores or THREADS)
    layers = "0" if unit.device == "cpu" else "99"
    device, environment = NAMES.get(unit.device, ""), {}
    if unit.device == "npu":
        sessions = _sessions(work)
        device = ",".join(f"HTP{i}" for i in range(sessions))
        environment = {"GGML_HEXAGON_NDEV": str(sessions)} if sessions > 1 else {}
    return ("--device", device, "-ngl", layers, "-t", str(threads)), environment


def _sessions(work: ModelWork) -> int:
    """Return how many sessions of the Hexagon hold the weights."""
    (_, n, k, count), _ = work.step(1, 0)
    nbytes = float((n * k * count).sum()) * stack_of("llama.cpp").bytes_per_weight
    return max(1, -(-int(nbytes) // SESSION_BYTES))


def _name(unit: FittedUnit) -> str:
    return f"{unit.device.upper()} ({unit.engine})"


def _reason(seconds: list[tuple[float, FittedUnit]], request: PlanRequest) -> str:
    lengths = ", ".join(map(str, sorted(request.distribution)))
    (best_s, best), *others = seconds
    over = f", {others[0][0] / best_s:.2f} × the {_name(others[0][1])}" if others else ""
    return (
        f"{_name(best)}{over}, for prompts of {lengths} tokens with "
        f"{request.decode_tokens_per_prompt} tokens after each (fitted)"
    )
