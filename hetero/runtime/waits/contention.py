"""Whether other programs use the control core: who polls there loses his turn at every wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hetero.backends.host.timers import waited_for_core_s
from hetero.runtime.waits.policy import DEFAULT, WaitPolicy


class Contention:
    """Counts the waits to be slept through, and the steps to be run without gates. Control thread.

    `queued_s` tells how long this thread has waited for a core that other programs had, as
    `waited_for_core_s` does; None where the system does not say.
    """

    def __init__(
        self,
        policy: WaitPolicy = DEFAULT,
        queued_s: Callable[[], float | None] = waited_for_core_s,
    ) -> None:
        self.policy = policy
        self.crowded = 0  # waits that are still to be slept through
        self._gateless = 0  # steps that are still to run without gates
        self._queued_s = queued_s
        self._gaps: deque[float] = deque(maxlen=policy.crowded_gaps)  # when the core was lost
        self._before_s: dict[int, float] = {}  # `queued_s` by thread, at the last loss

    def polls(self) -> bool:
        """Whether the wait that begins now may keep the core busy; counts those that may not."""
        if self.crowded:
            self.crowded -= 1
            return False
        return True

    def gates_now(self) -> bool:
        """Whether the step that begins now is to have gates; counts the steps."""
        self._gateless = max(0, self._gateless - 1)
        return self._gateless == 0

    def preempted(self, at_s: float, lost_s: float) -> None:
        """Something else had the control core for so long, until this moment. Where that was
        another program for long, or is one often, sleep more and poll less for a while. A
        hypervisor gives the core back to who sleeps no sooner than to who polls.
        """
        policy = self.policy
        thread, queued_s = threading.get_native_id(), self._queued_s()
        if queued_s is not None:
            before_s = self._before_s.get(thread, 0.0)
            self._before_s[thread] = queued_s
            if queued_s - before_s < policy.others * lost_s:
                return
        self._gaps.append(at_s)
        often = len(self._gaps) == policy.crowded_gaps and at_s - self._gaps[0] < policy.crowded_s
        if often or lost_s > policy.slice_s:
            self.crowd()

    def crowd(self) -> None:
        """Others use the control core."""
        self.crowded = self.policy.crowded_waits
        self._gateless = self.policy.gateless_steps
