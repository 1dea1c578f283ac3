"""Detects that other programs use the control core, where polling loses the core at every wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hetero.backends.host.timers import waited_for_core_s
from hetero.runtime.waits.policy import DEFAULT, WaitPolicy


class CoreContention:
    """Counts the waits to sleep through and the steps to run without wait values.

    Control thread only.

    `queued_s` returns how long this thread was runnable while other programs had the core, as
    `waited_for_core_s` does; None where the system does not say.
    """

    def __init__(
        self,
        policy: WaitPolicy = DEFAULT,
        queued_s: Callable[[], float | None] = waited_for_core_s,
    ) -> None:
        self.policy = policy
        self.contended_left = 0  # waits still to sleep through
        self._without_wait_values = 0  # steps still to run without wait values
        self._queued_s = queued_s
        self._gaps: deque[float] = deque(maxlen=policy.contended_gaps)  # when the core was lost
        self._before_s: dict[int, float] = {}  # `queued_s` by thread, at the last loss

    def polls(self) -> bool:
        """Return whether the wait that begins now may poll; count those that may not."""
        if self.contended_left:
            self.contended_left -= 1
            return False
        return True

    def wait_values_now(self) -> bool:
        """Return whether the step that begins now should have wait values; count the steps."""
        self._without_wait_values = max(0, self._without_wait_values - 1)
        return self._without_wait_values == 0

    def preempted(self, at_s: float, lost_s: float) -> None:
        """Record that something else had the control core for `lost_s` until `at_s`.

        Where another program had it for long or often, sleep more and poll less for a while. (A
        hypervisor gives the core back to a sleeping thread no sooner than to a polling one.)
        """
        policy = self.policy
        thread, queued_s = threading.get_native_id(), self._queued_s()
        if queued_s is not None:
            before_s = self._before_s.get(thread, 0.0)
            self._before_s[thread] = queued_s
            if queued_s - before_s < policy.others * lost_s:
                return
        self._gaps.append(at_s)
        often = (
            len(self._gaps) == policy.contended_gaps and at_s - self._gaps[0] < policy.contended_s
        )
        if often or lost_s > policy.slice_s:
            self.mark_contended()

    def mark_contended(self) -> None:
        """Sleep through the next waits: other programs use the control core."""
        self.contended_left = self.policy.contended_waits
        self._without_wait_values = self.policy.no_wait_value_steps
