"""Tries the next best device where the one that `auto` chose alone is slower than predicted."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from hetero.generation.late_plan import FAILURES, stay_alone
from hetero.placement.device_times import DeviceTimes
from hetero.runtime.engine import Engine
from hetero.runtime.executor import nothing
from hetero.solver.plan import PHASES, Phase

CHECKED: Final = 4  # steps from one look at the measured times to the next
NAMES: Final[Mapping[Phase, str]] = {"prefill": "prompts", "decode": "answers"}


@dataclass(frozen=True, kw_only=True)
class TrialPolicy:
    """Parameters that decide when another device is tried, and when it is kept.

    prefill, decode   measured steps that the factor of a phase is the median of
    gain              part of the time that a device must save to be tried, and to be kept; the
                      other one's mean error of prediction, where that is more
    """

    prefill: int = 3
    decode: int = 16
    gain: float = 0.1

    def samples(self, phase: Phase) -> int:
        """Return how many steps are measured."""
        return self.prefill if phase == "prefill" else self.decode


class Preparation(Protocol):
    """A process that prepares a device, and then has the engine moved: `LatePlan`."""

    def close(self) -> None:
        """End it; idempotent."""


@dataclass
class MeasuredSteps:
    """The measured over the predicted seconds of one device's last steps."""

    times: DeviceTimes
    policy: TrialPolicy
    ratios: dict[Phase, deque[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.ratios = {phase: deque(maxlen=self.policy.samples(phase)) for phase in PHASES}

    def note(self, phase: Phase, tokens: int, before: int, seconds: float) -> None:
        """Add a step, where something is predicted of it."""
        if predicted_s := self.times.step_s(phase, tokens, before):
            self.ratios[phase].append(seconds / predicted_s)

    @property
    def known(self) -> dict[Phase, float]:
        """Return the factors of the phases with enough steps."""
        return {
            phase: statistics.median(ratios)
            for phase, ratios in self.ratios.items()
            if len(ratios) == ratios.maxlen
        }

    def factor(self, phase: Phase, unknown: float | None = None) -> float:
        """Return how many times as long as predicted a phase takes.

        One that was not measured takes `unknown` times as long, by default as the other.
        """
        known = self.known
        return known.get(phase, max(known.values(), default=1.0) if unknown is None else unknown)

    def total_s(self, unknown: float | None = None) -> float:
        """Return the seconds of what `auto` compared, as measured (`factor`)."""
        return self.times.total_s({phase: self.factor(phase, unknown) for phase in PHASES})


class SecondDevice:
    """Watches the steps of an engine on the device that was chosen alone, `first`.

    Where that is so slow that `second`, as predicted, would save enough time, `prepare` is called,
    which moves the engine there between two steps, and calls `moved` in it. Its steps are measured
    as well: it is kept where it is faster than `first` was, and else `back` moves the engine back.
    That is tried once, so a model never swings between two devices; each move is a sentence in
    `Deployment.adaptations`. All of it happens in the thread that has the engine's lock.
    """

    def __init__(
        self,
        engine: Engine,
        first: DeviceTimes,
        second: DeviceTimes,
        *,
        prepare: Callable[[], Preparation],
        back: Callable[[], object],
        policy: TrialPolicy | None = None,
    ) -> None:
        self._engine, self._prepare, self._back = engine, prepare, back
        self._policy = policy or TrialPolicy()
        self.first, self.second = (MeasuredSteps(x, self._policy) for x in (first, second))
        self._now, self._steps = self.first, 0
        self._preparation: Preparation | None = None
        self._closed = False
        engine.before_step, engine.runner.watch = self.before_step, self._note

    def _note(self, phase: Phase, tokens: int, before: int, seconds: float) -> None:
        self._steps += 1
        self._now.note(phase, tokens, before, seconds)

    def before_step(self) -> bool:
        """Prepare the second device, keep it, or move back; return whether the engine has moved."""
        if self._steps % CHECKED:
            return False
        if self._now is self.first:
            if self._preparation is None and self._is_slow():
                self._preparation = self._prepare()
                if self._closed:  # by another thread
                    self._preparation.close()
            return False
        return self._decide()

    def _is_slow(self) -> bool:
        """Return whether the second device is predicted to save more time than it may be off."""
        least = max(self._policy.gain, self.second.times.error)
        first_s, second_s = self.first.total_s(), self.second.total_s()
        return bool(self.first.known) and second_s < first_s * (1 - least)

    @property
    def why(self) -> str:
        """Return what was measured of the first device."""
        name = self.first.times.device_set
        factors = self.first.known.items()
        times = " and ".join(f"{NAMES[phase]} {factor:.1f} x" for phase, factor in factors)
        return f"{name} alone took {times} as long as predicted"

    def moved(self) -> None:
        """Go on with what the second device takes; for the move that `prepare` has asked for."""
        name = self.second.times.device_set
        self._say(f"{name} alone is tried because {self.why}")
        self._now = self.second
        self._engine.before_step = self.before_step

    def _decide(self) -> bool:
        """Keep the second device or move back; return whether the engine has moved.

        It is kept when all phases are measured that were on the first one, and left as soon as it
        cannot be faster.
        """
        if not (known := self.second.known):
            return False
        complete = self.first.known.keys() <= known.keys()
        first_s = self.first.total_s()
        second_s = self.second.total_s(None if complete else 1.0)
        keeps = second_s < first_s * (1 - self._policy.gain)
        if keeps and not complete:
            return False
        ratio, names = first_s / second_s, [x.times.device_set for x in (self.first, self.second)]
        self._engine.before_step = nothing
        if not keeps:
            try:
                self._back()
            except FAILURES as error:
                self._engine.runner.watch = None
                stay_alone(self._engine, self.second.times.device_set, error)
                return False
            except BaseException:
                self._engine.before_step = self.before_step
                raise
        self._engine.runner.watch = None
        name = names[1] if keeps else names[0]
        what = "is kept" if keeps else "computes again"
        self._say(f"{name} alone {what} because {names[1]} is measured {ratio:.2f} x {names[0]}")
        return not keeps

    def _say(self, sentence: str) -> None:
        self._engine.deployment.adaptations.append(f"after {self._steps} steps: {sentence}")

    def close(self) -> None:
        """End the watch, and what it prepares; idempotent."""
        self._closed = True
        self._engine.before_step, self._engine.runner.watch = nothing, None
        if self._preparation is not None:
            self._preparation.close()
