"""What is learned from every wait: how long the next one takes, and how late sleeps return."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.backends.host.clock import Clock
from hetero.backends.host.timers import lateness
from hetero.runtime.waits.policy import DEFAULT, WaitPolicy


@dataclass(slots=True)
class Prediction:
    """The length of one place's next wait, from the moment that the control thread arrives."""

    policy: WaitPolicy = DEFAULT
    expected_s: float = 0.0
    samples: int = 0

    def learn(self, waited_s: float) -> None:
        """A wait took so long."""
        policy = self.policy
        self.samples += 1
        if self.samples == 1:
            self.expected_s = waited_s
            return
        seen_s = min(waited_s, policy.outlier * self.expected_s + policy.shortest_nap_s)
        rate = policy.rise if seen_s > self.expected_s else policy.fall
        self.expected_s += rate * (seen_s - self.expected_s)


@dataclass(slots=True)
class SleepTimes:
    """How late a sleep returns here: it is asked for so much less.

    Learned from every sleep, as it changes with what else the machine does: steps of one size up
    and down, whose odds settle at a quantile.
    """

    late_s: float
    policy: WaitPolicy = DEFAULT

    def saw(self, late_s: float) -> None:
        """A sleep was so late."""
        policy = self.policy
        share = policy.lateness if late_s > self.late_s else policy.lateness - 1
        self.late_s = max(0.0, self.late_s + share * policy.lateness_step_s)
        if late_s < self.late_s / policy.far:
            self.doubt()

    def doubt(self) -> None:
        """Sleeps are not so late, or so late that a long wait was not slept through: that may be
        left from a disturbance, and only another sleep can tell.
        """
        self.late_s *= 1 - self.policy.doubt

    @classmethod
    def measure(cls, clock: Clock, policy: WaitPolicy = DEFAULT) -> SleepTimes:
        """The same quantile of a few sleeps; some milliseconds."""
        late = lateness(clock, policy.calibration_s, policy.calibration_sleeps)
        return cls(late[int(policy.lateness * len(late))], policy)
