"""Predicts the length of waits and the lateness of sleeps from those before."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.backends.host.clock import Clock
from hetero.backends.host.timers import lateness
from hetero.runtime.waits.policy import DEFAULT, WaitPolicy


@dataclass(slots=True)
class Prediction:
    """Predicts the next wait at one point, from when the control thread arrives there."""

    policy: WaitPolicy = DEFAULT
    expected_s: float = 0.0
    samples: int = 0

    def learn(self, waited_s: float) -> None:
        """Record the length of a wait."""
        policy = self.policy
        self.samples += 1
        if self.samples == 1:
            self.expected_s = waited_s
            return
        seen_s = min(waited_s, policy.outlier * self.expected_s + policy.min_sleep_s)
        rate = policy.rise if seen_s > self.expected_s else policy.fall
        self.expected_s += rate * (seen_s - self.expected_s)


@dataclass(slots=True)
class SleepTimes:
    """Tracks how late sleeps return, so that shorter ones can be requested.

    It changes with the machine's load, so every sleep moves the estimate by a fixed step up or down
    (a stochastic quantile estimate).
    """

    late_s: float
    policy: WaitPolicy = DEFAULT

    def observe(self, late_s: float) -> None:
        """Record how late a sleep returned."""
        policy = self.policy
        share = policy.lateness if late_s > self.late_s else policy.lateness - 1
        self.late_s = max(0.0, self.late_s + share * policy.lateness_step_s)
        if late_s < self.late_s / policy.far:
            self.decay()

    def decay(self) -> None:
        """Reduce the estimate: sleeps return earlier, or it is too large to sleep at all.

        The latter may follow a disturbance, and only another sleep can correct it.
        """
        self.late_s *= 1 - self.policy.decay

    @classmethod
    def measure(cls, clock: Clock, policy: WaitPolicy = DEFAULT) -> SleepTimes:
        """Measure that quantile of a few sleeps (some milliseconds)."""
        late = lateness(clock, policy.calibration_s, policy.calibration_sleeps)
        return cls(late[int(policy.lateness * len(late))], policy)
