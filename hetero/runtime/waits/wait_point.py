"""One wait: sleep through most of it, poll the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hetero.backends.host.time_limits import time_limit
from hetero.backends.optional import SupportsQueueControl
from hetero.backends.protocol import Completion, DeviceKind
from hetero.runtime.waits.prediction import Prediction
from hetero.runtime.waits.shared import SharedWaits

# The phase, its chunks' tokens, the waiting and the awaited operation.
WaitKey: TypeAlias = tuple[str, tuple[int, ...], str, str]


class WaitPoint:
    """A point in the steps of one token count that waits for a device; all layers share it.

    `prediction` learns from every wait. `wait` returns the seconds that the control thread slept.
    """

    def __init__(self, owner: SharedWaits, key: WaitKey, kind: DeviceKind, name: str) -> None:
        self.owner, self.key, self.kind, self.name = owner, key, kind, name
        self.prediction = Prediction(owner.policy)
        self.deadline_s = owner.deadline_s + sum(key[1]) * owner.token_s

    def at_least_s(self, tokens: int) -> float:
        """Return what the same wait takes at least in a step of another number of tokens.

        Kernels take a time, and longer for more tokens, but no more than in proportion.
        """
        return self.prediction.expected_s * min(tokens / sum(self.key[1]), 1.0)

    @property
    def wait(self) -> Callable[[Completion], float]:
        """Return the wait by the owner's method (not stored: that would be a reference cycle)."""
        return {
            "fast": self._fast,
            "event": self._event,
            "finish": self._finish,
            "copy": self._finish,
        }[self.owner.method]

    def _fast(self, completion: Completion) -> float:
        if completion.done():
            self.prediction.learn(0.0)
            return 0.0
        owner, policy, now = self.owner, self.owner.policy, self.owner.clock.now
        start_s = now()
        polls = owner.polls(self.kind)
        expected_s, late_s = self.prediction.expected_s, owner.sleep.late_s
        sleep_s, slept_s = expected_s - late_s, 0.0
        sleep_s -= min(policy.early * expected_s, policy.earliest_s)
        # A third of all sleeps returns later than expected, to a cold core: in a short wait that
        # costs more time than polling would.
        worth = not polls or expected_s > min(policy.worth * late_s, policy.long_s)
        if worth and sleep_s > policy.min_sleep_s:
            polled_s, slept_s = self._sleep(completion, start_s, sleep_s)
            if completion.done():
                self.prediction.learn(polled_s + policy.overslept * (slept_s - polled_s))
                owner.totals.add(slept_s, 0.0)
                return slept_s
        elif expected_s > policy.long_s:
            owner.sleep.decay()
        (self._poll if polls else self._sleep_poll)(completion, start_s)
        waited_s = now() - start_s
        if not polls:
            slept_s = waited_s
        self.prediction.learn(waited_s)
        owner.totals.add(slept_s, waited_s - slept_s)
        return slept_s

    def _sleep(self, completion: Completion, start_s: float, sleep_s: float) -> tuple[float, float]:
        """Sleep for `sleep_s`, or less if the launch completes; return two times since `start_s`.

        They are that of the last poll before the end of the sleep, and that of this end.
        """
        clock, policy, sleep = self.owner.clock, self.owner.policy, self.owner.sleep
        end_s, longest_s = start_s + sleep_s, max(policy.max_sleep_s, policy.sleep_slice * sleep_s)
        polled_s, left_s = start_s, sleep_s
        while True:
            last = left_s < longest_s + sleep.late_s + policy.min_sleep_s
            request_s = left_s if last else longest_s
            clock.sleep(request_s)
            woke_s = clock.now()
            sleep.observe(woke_s - polled_s - request_s)
            left_s = end_s - woke_s  # negative where this slice returned very late
            if last or left_s < policy.min_sleep_s or completion.done():
                return polled_s - start_s, woke_s - start_s
            polled_s = woke_s

    def _poll(self, completion: Completion, start_s: float) -> None:
        owner, policy, clock = self.owner, self.owner.policy, self.owner.clock
        done, now, preempted_s = completion.done, clock.now, policy.preempted_s
        late_s = start_s + self.prediction.expected_s + policy.late_s
        give_up_s = start_s + self.deadline_s
        polled_s = now()
        while not done():
            at_s = now()
            if at_s - polled_s > preempted_s:
                owner.contention.preempted(at_s, at_s - polled_s)
                give_up_s += policy.stopped(at_s - polled_s)
            polled_s = at_s
            if at_s > late_s:
                if at_s > give_up_s:
                    raise owner.timeout(self.name, self.kind, self.deadline_s)
                clock.sleep(policy.late_sleep_s)
                polled_s = now()
                give_up_s += policy.stopped(polled_s - at_s)

    def _sleep_poll(self, completion: Completion, start_s: float) -> None:
        """Poll between short sleeps, which become longer: each takes a core from the device.

        A thread that polls on a contended core loses it for milliseconds, or takes it from the
        device that it waits for.
        """
        owner, policy, clock = self.owner, self.owner.policy, self.owner.clock
        first_s = polled_s = clock.now()
        give_up_s = start_s + self.deadline_s
        while not completion.done():
            longer_s = min(policy.sleep_slice * (polled_s - first_s), policy.max_sleep_s)
            clock.sleep(max(policy.min_sleep_s, longer_s))
            at_s = clock.now()
            give_up_s += policy.stopped(at_s - polled_s)
            polled_s = at_s
            if at_s > give_up_s:
                raise owner.timeout(self.name, self.kind, self.deadline_s)

    def _event(self, completion: Completion) -> float:
        start_s = self.owner.clock.now()
        completion.block()
        self.owner.totals.add(0.0, self.owner.clock.now() - start_s)
        return 0.0

    def _finish(self, completion: Completion) -> float:
        start_s = self.owner.clock.now()
        device = self.owner.devices[self.kind]
        if isinstance(device, SupportsQueueControl):
            device.finish()
        completion.wait(self.deadline_s / time_limit(1.0))  # which scales its limit itself
        self.owner.totals.add(0.0, self.owner.clock.now() - start_s)
        return 0.0
