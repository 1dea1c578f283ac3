"""Working caches of a service, one for each call that is at work.

The first is there from the start; another is made when calls are at work in all there are. A cache
that is idle keeps its last text, for the next call of the same root that begins like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hetero.contexts.working_set import WorkingSet
from hetero.errors import UserError
from hetero.generation.loop import Generation
from hetero.runtime.kv.context import Context


@dataclass(eq=False)
class Lane:
    """A context of the model that a call's text is put into, and the answer that is made there.
    `used` is the number of its last call.
    """

    active: Context
    working: WorkingSet
    answer: Generation | None = None
    busy: bool = False
    used: int = 0


class Lanes:
    """Up to `most` of them. `more` makes one; it raises `UserError` where there is no memory for
    it: there are no more than those that are, then.
    """

    def __init__(self, first: Lane, more: Callable[[], Lane], most: int) -> None:
        self.most = most
        self._lanes, self._more = [first], more
        self._calls = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def room(self) -> bool:
        """Whether another call can begin."""
        idle = any(not lane.busy for lane in self._lanes)
        if not idle and len(self._lanes) < self.most:
            try:
                self._lanes.append(self._more())
            except UserError:
                self.most = len(self._lanes)
        return any(not lane.busy for lane in self._lanes)

    @contextmanager
    def taken(self, root: bytes, tokens: Sequence[int]) -> Iterator[Lane]:
        """A lane for a call on a text of this root: of the idle ones that whose cache holds most of
        its beginning, else that which was used longest ago. Raises `UserError` if all are at work.
        """
        if not self.room():
            raise UserError(
                f"{len(self._lanes)} calls of this service are unfinished, which is all that "
                "`parallel` allows: read a stream to its end or close() it before the next call"
            )
        idle = [lane for lane in self._lanes if not lane.busy]
        lane = max(idle, key=lambda x: (x.working.shared(root, tokens), -x.used))
        self._calls += 1
        lane.busy, lane.used = True, self._calls
        try:
            yield lane
        finally:
            lane.busy, lane.answer = False, None

    def forget(self, root: bytes) -> None:
        """No idle cache holds a text of this root."""
        for lane in self._lanes:
            if not lane.busy and lane.working.holds(root):
                lane.working.forget()

    def answers(self) -> list[Generation]:
        """Those that are being made."""
        return [lane.answer for lane in self._lanes if lane.answer is not None]

    def close(self) -> None:
        """End the threads of all but the first, whose owner does that, and free their caches."""
        for lane in self._lanes[1:]:
            lane.working.close()
            lane.active.close()
        del self._lanes[1:]
