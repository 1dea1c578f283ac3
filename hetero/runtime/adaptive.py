"""New cuts for devices that are not as fast as the plan thought (throttled, or used by others).

Now and then a step's matmuls are timed on each device and compared with the plan's predictions. The
median of measured over predicted is a device's *factor* in a phase. When factors have moved, the
solver is asked for the best of its prepared cuts at those speeds; it is taken if the matmuls are
predicted to gain enough by it, and not more often than every so many steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self, TypeAlias

from hetero.backends.host.clock import SystemClock
from hetero.backends.protocol import EVERY_KIND, DeviceKind
from hetero.runtime.program import RUN
from hetero.runtime.step import Step
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.matmul_entries import PlanSource
from hetero.solver.placement import Placement
from hetero.solver.plan import PHASES, OpPlan, Phase

if TYPE_CHECKING:
    from hetero.solver.drift import Factors

Key: TypeAlias = tuple[DeviceKind, Phase]
MOVED: Final = 0.1  # factors that changed by less are the same


class Solver(PlanSource, Protocol):
    """An interface to `PreparedSolver`, and to `PreparedThree` for three devices.

    Every entry of its plans has predicted seconds of each device.
    """

    plan: ExecutionPlan

    def drifted(self, factors: Factors) -> Self:
        """Return the same solver for devices that take these factors longer than predicted."""


@dataclass(frozen=True, kw_only=True)
class AdaptPolicy:
    """Parameters that decide when to look for new cuts.

    decode   decode steps for each that is timed, at least
    prefill  calls with a prompt for each that is timed, at least
    price    part of the time that timing may take: a queue that keeps times is another one, which
             takes as long as some steps of a small model
    samples  timed steps that a factor is the median of
    every    steps between two changes, at least
    gain     part of the matmuls' predicted seconds that a change must save
    forget   steps after which a device that got no more work is thought as fast as at first, so
             that it is tried again
    """

    decode: int = 16
    prefill: int = 4
    price: float = 0.005
    samples: int = 5
    every: int = 128
    gain: float = 0.1
    forget: int = 2048


class Adaptation(NamedTuple):
    """A change: what is to run from here on, and a sentence on why."""

    placement: Placement
    reason: str


@dataclass
class Adapter:
    """Watches one engine's steps.

    `placement` is what runs, by the plans of `solver` at first; it changes with each proposal.
    Control thread only.
    """

    solver: Solver
    placement: Placement
    policy: AdaptPolicy = field(default_factory=AdaptPolicy)
    clock: Callable[[], float] = SystemClock.now

    def __post_init__(self) -> None:
        self._first, graph = self.placement, self.placement.graph
        after = frozenset(x.name for x in graph.nodes if x.layer is None)
        self._left_out = {"prefill": graph.sampled_nodes, "decode": after}
        self._kinds = tuple(x for x in EVERY_KIND if x != "cpu" or x in self._first.plan.devices())
        self._applied: dict[Key, float] = {}
        self._asked: dict[Key, float] = {}  # factors that the solver was last asked with
        self._ratios: dict[Key, deque[float]] = {}
        self._steps = self._changed = 0
        self._calls: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self._timed_at: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self._apart: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}  # by what timing costs
        self._asked_s, self._step_s = -math.inf, math.inf  # when, and the shortest decode step

    def due(self, phase: Phase, m: int) -> bool:
        """Return whether to time the next step."""
        self._steps += 1
        if phase == "decode" and m > 1:  # verification: the plan predicts one token
            return False
        self._calls[phase] += 1
        before_s, self._asked_s = self._asked_s, self.clock()
        if phase == "decode":
            self._step_s = min(self._step_s, self._asked_s - before_s)
        every = self.policy.prefill if phase == "prefill" else self.policy.decode
        if self._calls[phase] - self._timed_at[phase] < max(every, self._apart[phase]):
            return False
        self._timed_at[phase] = self._calls[phase]
        return True

    def _note_price(self, phase: Phase, run_s: float) -> None:
        """Update the interval between timed steps from the duration of one."""
        spent_s = self.clock() - self._asked_s
        usual_s = self._step_s if phase == "decode" else run_s
        if 0 < usual_s < math.inf:
            self._apart[phase] = (spent_s - usual_s) / (self.policy.price * usual_s)
        self._asked_s = -math.inf  # what comes now is no usual step

    def observe(self, step: Step, stamps: Sequence[float]) -> None:
        """Learn from a step that was timed."""
        self._note_price(step.phase, stamps[-1] - stamps[0] if stamps else 0.0)
        measured = matmul_seconds(step, stamps, self._left_out[step.phase])
        predicted = self._predicted(step.phase, step.tokens)
        for kind, seconds in measured.items():
            if seconds > 0 and predicted[kind] > 0:
                key = (kind, step.phase)
                ratio = self._applied.get(key, 1.0) * seconds / predicted[kind]
                self._ratios.setdefault(key, deque(maxlen=self.policy.samples)).append(ratio)

    def factors(self) -> dict[Key, float]:
        """Return measured over first predicted seconds of each device and phase.

        Those with too few samples are left out.
        """
        known = {
            key: statistics.median(ratios)
            for key, ratios in self._ratios.items()
            if len(ratios) == self.policy.samples
        }
        if self._steps - self._changed > self.policy.forget:
            return known
        return self._applied | known

    def proposal(self) -> Adaptation | None:
        """Return new cuts if the interval has passed and they gain enough."""
        if self._steps - self._changed < self.policy.every:
            return None
        factors = self.factors()
        if not _moved(self._asked, factors, self._kinds):
            return None
        self._asked, self._changed = factors, self._steps
        # Of a phase that one device computes, the other's speed is that of the other phase.
        tried = [factors] * (not self.placement.plan.apart) + [_in_every_phase(factors)]
        placement = next(filter(None, map(self._placed, tried)), None)
        if placement is None:
            return None
        if self.placement.plan.apart:
            self._asked = factors = dict(tried[-1])
        gains = {phase: self._gain(placement, phase, factors) for phase in PHASES}
        phase = max(PHASES, key=lambda p: gains[p])
        if gains[phase] < self.policy.gain:
            return None
        self.placement, self._applied = placement, factors
        self._ratios.clear()
        moved = placement.plan.devices_of(phase) if placement.plan.apart else frozenset()
        return Adaptation(placement, _reason(factors, phase, gains[phase], self._steps, moved))

    def _placed(self, factors: Factors) -> Placement | None:
        """Return the best cuts at these speeds; None if they need kernels that are not prepared."""
        solver = self.solver.drifted(factors)
        placement = self._first.with_plan(solver.plan, solver)
        if not all(band.is_prepared("decode", 1) for band in placement.bands):
            placement = self._first.with_plan(solver.plan.model_copy(update={"bands": ()}), solver)
        lengths = {phase: _a_length(solver.plan, phase) for phase in PHASES}
        prepared = all(placement.is_prepared(phase, m) for phase, m in lengths.items())
        return placement if prepared else None

    def _gain(self, placement: Placement, phase: Phase, factors: Mapping[Key, float]) -> float:
        """Return the part of a step's matmul seconds that the new cuts save at these speeds."""
        if not any(key[1] == phase for key in factors):
            return 0.0
        m = _a_length(self._first.plan, phase)
        before = sum(self._at(op, factors) for op in self.placement.block_entries(phase, m))
        after = sum(max(_times(op).values()) for op in placement.block_entries(phase, m))
        return 1 - after / before if before else 0.0

    def _at(self, op: OpPlan, factors: Mapping[Key, float]) -> float:
        """Return the seconds of a matmul's current cut at other speeds than it was planned with."""
        times = _times(op)
        keys: dict[DeviceKind, Key] = {kind: (kind, op.phase) for kind in times}
        return max(
            seconds * factors.get(keys[kind], 1.0) / self._applied.get(keys[kind], 1.0)
            for kind, seconds in times.items()
        )

    def _predicted(self, phase: Phase, m: int) -> dict[DeviceKind, float]:
        counts = self.placement.graph.counts
        totals = dict.fromkeys(EVERY_KIND, 0.0)
        for op in self.placement.block_entries(phase, m):
            for kind, seconds in _times(op).items():
                totals[kind] += counts[op.op] * seconds
        return totals


def _times(op: OpPlan) -> dict[DeviceKind, float]:
    """Return the predicted seconds of each device's part of a matmul."""
    return {"gpu": op.gpu_s or 0.0, "npu": op.npu_s or 0.0, "cpu": op.cpu_s or 0.0}


def matmul_seconds(
    step: Step, stamps: Sequence[float], left_out: frozenset[str]
) -> dict[DeviceKind, float]:
    """Return the seconds of a step's matmuls by device, without those of some nodes.

    They are the host's for blocking devices, the device's own clock's for others; one without a
    clock is left out.
    """
    seconds: dict[DeviceKind, float] = {}
    for at, (code, index, kind, _) in enumerate(step.program):
        launch = step.launches[index]
        if launch.rows is not None and code == RUN and launch.node not in left_out:
            name = step.kinds[kind]
            seconds[name] = seconds.get(name, 0.0) + stamps[at + 1] - stamps[at]
    for launch, completion in zip(step.launches, step.completions, strict=True):
        if completion is None or launch.rows is None or launch.node in left_out:
            continue
        if (span := completion.span()) is not None:
            seconds[launch.kind] = seconds.get(launch.kind, 0.0) + span[1] - span[0]
    return seconds


def _moved(
    before: Mapping[Key, float], after: Mapping[Key, float], kinds: Collection[DeviceKind]
) -> bool:
    """Return whether the devices' speeds have changed against each other, in any phase."""
    for phase in PHASES:
        changes = [after.get((x, phase), 1.0) / before.get((x, phase), 1.0) for x in kinds]
        if max(changes) / min(changes) - 1 > MOVED:
            return True
    return False


def _in_every_phase(factors: Mapping[Key, float]) -> Factors:
    """Return the factors with those of the other phase where a phase was not timed.

    Else one token in a graph of many would look faster than its own, in another format.
    """
    filled: Factors = {
        (kind, phase): factors[kind, other]
        for kind in EVERY_KIND
        for phase in PHASES
        for other in PHASES
        if (kind, other) in factors
    }
    return {**filled, **factors}


def _a_length(plan: ExecutionPlan, phase: Phase) -> int:
    lengths = plan.listed_tokens if phase == "prefill" else (1,)
    return lengths[len(lengths) // 2]


def _reason(
    factors: Mapping[Key, float],
    phase: Phase,
    gain: float,
    steps: int,
    alone: Collection[DeviceKind],
) -> str:
    """Return why cuts changed, or which device is `alone` in a phase from now on."""
    speeds = ", ".join(
        f"{kind} {factors[kind, phase]:.2f}" for kind in EVERY_KIND if (kind, phase) in factors
    )
    change = f"{phase} on the {' and '.join(alone)} alone" if alone else "new cuts"
    return (
        f"after {steps} steps: {change} because matmuls in {phase} take other times than planned "
        f"(measured / predicted: {speeds}); predicted to save {gain:.0%} of them"
    )
