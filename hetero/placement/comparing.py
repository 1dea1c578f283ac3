"""Compares devices for `--device auto` by predicted seconds of prompts with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from hetero.backends.protocol import DeviceKind
from hetero.backends.registry import EVERY_CORE
from hetero.solver.handmade import single_device
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver
from hetero.solver.prompts import prompt_alone
from hetero.solver.solution import Scenario

PROMPTS: Final = (64, 256, 1024)  # tokens, where the lengths of prompts are not known
ANSWER_TOKENS: Final = 64
TENSOR_LEVEL: Final = "tensor level"
MARGIN: Final = 0.03
DERIVED_MARGIN: Final = 0.1  # where a file's format was not measured: kernels differ by as much


@dataclass(frozen=True)
class PromptMix:
    """Prompts of these token counts, each once, with an answer of `ANSWER_TOKENS`."""

    prompts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], context: int | None = None) -> PromptMix:
        """Return the lengths that are asked for, else those of `PROMPTS` that a context holds."""
        room = max(context - ANSWER_TOKENS, 1) if context is not None else max(PROMPTS)
        return cls(tuple(lengths) or tuple(m for m in PROMPTS if m <= room) or (room,))

    def __str__(self) -> str:
        *most, last = map(str, self.prompts)
        if not most:
            return f"a prompt of {last} token{'' if last == '1' else 's'} and {ANSWER_TOKENS} more"
        return f"prompts of {', '.join(most)} and {last} tokens and {ANSWER_TOKENS} more each"


class Seconds(NamedTuple):
    """Seconds of a prompt, its number of calls, and seconds of a decode step.

    The step is in the middle of the answer, and attends to the prompt too.
    """

    prompt_s: float
    calls: int
    decode_s: float

    @property
    def work_s(self) -> float:
        """Return the prompt and the answer."""
        return self.prompt_s + ANSWER_TOKENS * self.decode_s


def compare(
    planner: Planner,
    solver: PreparedSolver,
    work: PromptMix,
    *,
    kinds: Sequence[str],
    cores: int = 0,
) -> dict[str, float]:
    """Return the predicted seconds of the work on each device alone, and on both devices.

    The devices are those of `kinds` that can do it (`gpu`, `npu`, `EVERY_CORE` with so many
    `cores`).
    """
    seconds: dict[str, float] = {}
    for name in (*kinds, TENSOR_LEVEL):
        parts = [predicted(planner, solver, name, tokens, cores) for tokens in work.prompts]
        known = [part.work_s for part in parts if part is not None]
        if len(known) == len(parts):
            seconds[name] = sum(known)
    return seconds


def fastest(seconds: dict[str, float], *, derived: bool = False) -> str:
    """Return the name of the fastest.

    A single device is simpler, so both must be faster by a margin, as a cut must be; by a larger
    one where times are `derived` from another format's.
    """
    margin = DERIVED_MARGIN if derived else MARGIN
    return min(seconds, key=lambda x: seconds[x] / (1 - margin if x == TENSOR_LEVEL else 1.0))


def predicted(
    planner: Planner, solver: PreparedSolver, name: str, tokens: int, cores: int
) -> Seconds | None:
    """Return the seconds of one prompt on `gpu`, `npu`, `EVERY_CORE` or both devices.

    None where one alone cannot do it, or was not measured.
    """
    match name:
        case "gpu" | "npu":
            return _alone(planner, "gpu" if name == "gpu" else "npu", tokens)
        case _ if name == EVERY_CORE:
            return _on_every_core(planner, tokens, cores)
    prompt, decode = solver.prompt(tokens), solver.solution_for(answering(tokens))
    return Seconds(prompt.seconds, len(prompt.calls), decode.seconds)


def answering(tokens: int) -> Scenario:
    """Return a decode step in the middle of the answer to a prompt."""
    return Scenario("decode", 1, tokens + ANSWER_TOKENS // 2)


def _alone(planner: Planner, kind: DeviceKind, tokens: int) -> Seconds | None:
    """Return the seconds on one device, in the calls of its plan by rule.

    None if the device cannot do all.
    """
    plan = single_device(planner.spec, kind)
    steps = plan.for_graphs({kind: planner.sizes if kind == "npu" else ()}).steps(tokens)
    prompt = prompt_alone(planner, steps, kind)
    decode = planner.single(answering(tokens), kind)
    if prompt is None or decode is None:
        return None
    if {call.non_matmul.device for call in (*prompt.calls, decode)} != {kind}:
        return None
    return Seconds(prompt.seconds, len(steps), decode.seconds)


def _on_every_core(planner: Planner, tokens: int, cores: int) -> Seconds | None:
    """Return the seconds of the OpenCL device on every core, from its seconds on one.

    None where that was not measured, or on more cores than there are here.
    """
    spec = planner.spec
    measured = {
        x.phase: x
        for x in planner.cost.profile.every_core
        if x.weight_format == spec.weight_format and x.cores <= cores
    }
    one = _alone(planner, "gpu", tokens) if len(measured) == 2 else None
    if one is None:
        return None
    return Seconds(
        measured["prefill"].seconds(one.prompt_s, one.calls * spec.layers),
        one.calls,
        measured["decode"].seconds(one.decode_s, spec.layers),
    )
