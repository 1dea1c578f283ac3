"""One wait: how much of it is slept, and what watches the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hetero.backends.protocol import Completion, DeviceKind
from hetero.runtime.waits.prediction import Prediction
from hetero.runtime.waits.shared import SharedWaits

# The phase, its chunks' tokens, who waits and who is waited for.
SiteKey: TypeAlias = tuple[str, tuple[int, ...], str, str]


class Site:
    """A place in the steps of one token count where a device is waited for; all layers share it.

    `prediction` is learned from every run. `wait` returns the seconds that the control thread
    slept.
    """

    def __init__(self, owner: SharedWaits, key: SiteKey, kind: DeviceKind, name: str) -> None:
        self.owner, self.key, self.kind, self.name = owner, key, kind, name
        self.prediction = Prediction(owner.policy)
        self.deadline_s = owner.deadline_s + sum(key[1]) * owner.token_s

    @property
    def wait(self) -> Callable[[Completion], float]:
        """See the class. Not kept: an object that keeps a method of its own is a circle."""
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
        nap_s, napped_s = expected_s - late_s, 0.0
        nap_s -= min(policy.early * expected_s, policy.earliest_s)
        # A third of all sleeps is later than expected, and what runs next finds the core cold: in
        # a short wait that costs more time than is slept.
        worth = not polls or expected_s > min(policy.worth * late_s, policy.long_s)
        if worth and nap_s > policy.shortest_nap_s:
            looked_s, napped_s = self._nap(completion, start_s, nap_s)
            if completion.done():
                self.prediction.learn(looked_s + policy.overslept * (napped_s - looked_s))
                owner.totals.add(napped_s, 0.0)
                return napped_s
        elif expected_s > policy.long_s:
            owner.sleep.doubt()
        (self._poll if polls else self._doze)(completion, start_s)
        waited_s = now() - start_s
        if not polls:
            napped_s = waited_s
        self.prediction.learn(waited_s)
        owner.totals.add(napped_s, waited_s - napped_s)
        return napped_s

    def _nap(self, completion: Completion, start_s: float, nap_s: float) -> tuple[float, float]:
        """Sleep for so long, or less if the launch is done before; seconds from `start_s` to the
        last look at it before the end of the sleep, and to that.
        """
        clock, policy, sleep = self.owner.clock, self.owner.policy, self.owner.sleep
        end_s, longest_s = start_s + nap_s, max(policy.longest_nap_s, policy.nap * nap_s)
        looked_s, left_s = start_s, nap_s
        while True:
            last = left_s < longest_s + sleep.late_s + policy.shortest_nap_s
            asked_s = left_s if last else longest_s
            clock.sleep(asked_s)
            woke_s = clock.now()
            sleep.saw(woke_s - looked_s - asked_s)
            left_s = end_s - woke_s  # none is left where this piece was very late
            if last or left_s < policy.shortest_nap_s or completion.done():
                return looked_s - start_s, woke_s - start_s
            looked_s = woke_s

    def _poll(self, completion: Completion, start_s: float) -> None:
        owner, policy, clock = self.owner, self.owner.policy, self.owner.clock
        done, now, preempted_s = completion.done, clock.now, policy.preempted_s
        late_s = start_s + self.prediction.expected_s + policy.late_s
        give_up_s = start_s + self.deadline_s
        looked_s = now()
        while not done():
            at_s = now()
            if at_s - looked_s > preempted_s:
                owner.contention.preempted(at_s, at_s - looked_s)
                give_up_s += policy.stopped(at_s - looked_s)
            looked_s = at_s
            if at_s > late_s:
                if at_s > give_up_s:
                    raise owner.timeout(self.name, self.kind, self.deadline_s)
                clock.sleep(policy.late_nap_s)
                looked_s = now()
                give_up_s += policy.stopped(looked_s - at_s)

    def _doze(self, completion: Completion, start_s: float) -> None:
        """Wait in naps: who polls on a core that others use as well loses it for milliseconds, or
        takes it from the device that is waited for.
        """
        owner, policy, clock = self.owner, self.owner.policy, self.owner.clock
        looked_s = clock.now()
        give_up_s = start_s + self.deadline_s
        while not completion.done():
            clock.sleep(policy.shortest_nap_s)
            at_s = clock.now()
            give_up_s += policy.stopped(at_s - looked_s)
            looked_s = at_s
            if at_s > give_up_s:
                raise owner.timeout(self.name, self.kind, self.deadline_s)

    def _event(self, completion: Completion) -> float:
        start_s = self.owner.clock.now()
        completion.block()
        self.owner.totals.add(0.0, self.owner.clock.now() - start_s)
        return 0.0

    def _finish(self, completion: Completion) -> float:
        start_s = self.owner.clock.now()
        self.owner.devices[self.kind].finish()
        completion.wait(self.deadline_s)
        self.owner.totals.add(0.0, self.owner.clock.now() - start_s)
        return 0.0
