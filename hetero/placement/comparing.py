"""Compares devices for `--device auto` by predicted seconds of prompts with their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Final, NamedTuple

from hetero.backends.protocol import DeviceKind
from hetero.backends.registry import EVERY_CORE
from hetero.placement.device_times import DeviceTimes
from hetero.placement.phase_choice import TENSOR_LEVEL, PhaseChoice, kind_of
from hetero.solver.handmade import single_device
from hetero.solver.options import INF
from hetero.solver.plan import PHASES, Phase
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver
from hetero.solver.prompts import prompt_alone
from hetero.solver.solution import Scenario

PROMPTS: Final = (64, 256, 1024)  # tokens, where the lengths of prompts are not known
ANSWER_TOKENS: Final = 64
MARGIN: Final = 0.03
OPENING_S: Final = 0.02  # of each request: half a second of a start, for 25 of them
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


class PhaseSeconds(NamedTuple):
    """Predicted seconds of all prompts of a `PromptMix`, and of all answers."""

    prompts_s: float
    answers_s: float

    @property
    def total_s(self) -> float:
        """Return both phases together."""
        return self.prompts_s + self.answers_s

    def of(self, phase: Phase) -> float:
        """Return the seconds of one phase."""
        return self.prompts_s if phase == "prefill" else self.answers_s


class DeviceSets(NamedTuple):
    """The names of what computes prompts, and of what computes answers."""

    prompts: str
    answers: str

    def of(self, phase: Phase) -> str:
        """Return the name in one phase."""
        return self.prompts if phase == "prefill" else self.answers

    @property
    def same(self) -> bool:
        """Return whether one set of devices computes everything."""
        return self.prompts == self.answers

    @property
    def kinds(self) -> dict[Phase, DeviceKind]:
        """Return the device of each phase that one computes alone."""
        kinds: dict[Phase, DeviceKind] = {}
        for phase in PHASES:
            if (name := self.of(phase)) != TENSOR_LEVEL:
                kinds[phase] = kind_of(name)
        return kinds

    def phases(self, seconds: Mapping[str, PhaseSeconds]) -> tuple[PhaseChoice, ...]:
        """Return each phase with its seconds, and the best of the others."""
        return tuple(_compared(phase, self.of(phase), seconds) for phase in PHASES)

    def __str__(self) -> str:
        return self.prompts if self.same else f"{self.prompts} then {self.answers}"


class Price(NamedTuple):
    """The price of device sets that differ between the phases.

    By `least_gain`, a fraction, they must be faster than a single device: infinity where one engine
    cannot have both. `handover_s` are the seconds of handing over keys and values.
    """

    least_gain: float
    handover_s: float = 0.0


def _compared(phase: Phase, name: str, seconds: Mapping[str, PhaseSeconds]) -> PhaseChoice:
    times = {x: s.of(phase) for x, s in seconds.items()}
    own_s = times.pop(name)
    other = min(times, key=times.__getitem__, default="")
    return PhaseChoice(phase, name, own_s, other, times.get(other))


def compare(
    planner: Planner,
    solver: PreparedSolver,
    work: PromptMix,
    *,
    kinds: Sequence[str],
    cores: int = 0,
) -> dict[str, PhaseSeconds]:
    """Return the predicted seconds of the work on each device alone, and on both devices.

    The devices are those of `kinds` that can do it (`gpu`, `npu`, `EVERY_CORE` with so many
    `cores`).
    """
    seconds: dict[str, PhaseSeconds] = {}
    for name in (*kinds, TENSOR_LEVEL):
        parts = [predicted(planner, solver, name, tokens, cores) for tokens in work.prompts]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            answers_s = sum(ANSWER_TOKENS * part.decode_s for part in known)
            seconds[name] = PhaseSeconds(sum(part.prompt_s for part in known), answers_s)
    return seconds


def fastest(
    seconds: Mapping[str, PhaseSeconds],
    *,
    derived: bool = False,
    price_of: Callable[[DeviceSets], Price] = lambda _: Price(INF),
    opening_s: float = 0.0,
) -> DeviceSets:
    """Return what computes prompts and what computes answers fastest.

    A single device is simpler, so two must be faster by a margin, as a cut must be; by a larger one
    where times are `derived` from another format's. In each phase that both share they must be so
    as well. `price_of` returns the price of sets that differ between the phases. Two must also save
    `opening_s` a request, the time that opening and planning for the second takes.
    """
    margin = DERIVED_MARGIN if derived else MARGIN

    def careful_s(sets: DeviceSets) -> float:
        """Return the seconds with the margin of phases that both devices share."""
        names = [(phase, sets.of(phase)) for phase in PHASES]
        handover_s = 0.0 if sets.same else price_of(sets).handover_s
        return handover_s + sum(
            seconds[x].of(phase) / (1 - margin if x == TENSOR_LEVEL else 1.0) for phase, x in names
        )

    def is_worth(sets: DeviceSets) -> bool:
        spent_s = total_s(sets, seconds) + opening_s
        if sets.same or spent_s >= limit_s * (1 - margin):
            return spent_s < limit_s * (1 - margin)
        price = price_of(sets)
        return spent_s + price.handover_s < limit_s * (1 - max(margin, price.least_gain))

    alone = [DeviceSets(name, name) for name in seconds if name != TENSOR_LEVEL]
    simple = DeviceSets(TENSOR_LEVEL, TENSOR_LEVEL)
    best = min(alone, key=lambda x: total_s(x, seconds), default=simple)
    limit_s = total_s(best, seconds) if alone else INF
    pairs = [x for x in starmap(DeviceSets, product(seconds, seconds)) if x not in alone]
    return min(filter(is_worth, pairs), key=careful_s, default=best)


def total_s(sets: DeviceSets, seconds: Mapping[str, PhaseSeconds]) -> float:
    """Return the seconds of both phases, each on its own set."""
    return sum(seconds[sets.of(phase)].of(phase) for phase in PHASES)


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


def times_alone(
    planner: Planner,
    solver: PreparedSolver,
    name: str,
    compared: PhaseSeconds,
    lengths: Sequence[int],
    *,
    cores: int,
    error: float,
) -> DeviceTimes:
    """Return the seconds of one device on prompts of these lengths, and of steps after them.

    `compared` are those of the work that devices were compared by.
    """
    parts = ((m, predicted(planner, solver, name, m, cores)) for m in sorted(set(lengths)))
    known = [(m, part) for m, part in parts if part is not None]
    return DeviceTimes(
        name,
        *compared,
        prompts=tuple((m, part.prompt_s) for m, part in known),
        steps=tuple((m + ANSWER_TOKENS // 2, part.decode_s) for m, part in known),
        error=error,
    )


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
