"""Slots of a service: a working cache for each running call.

The first exists from the start; another is allocated when all are busy. The cache of an idle slot
keeps its last text, for the next call of the same root that shares its prefix.
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
class Slot:
    """A context of the model for one call at a time, and the answer that is generated there.

    `used` is the number of its last call.
    """

    active: Context
    working: WorkingSet
    answer: Generation | None = None
    busy: bool = False
    used: int = 0


class SlotPool:
    """Up to `max_slots` slots. `more` allocates one.

    Where it raises `UserError`, because memory is short, the pool stops growing.
    """

    def __init__(self, first: Slot, more: Callable[[], Slot], max_slots: int) -> None:
        self.max_slots = max_slots
        self._slots, self._more = [first], more
        self._calls = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def room(self) -> bool:
        """Return whether another call can begin; allocate a slot for it if none is idle."""
        idle = any(not slot.busy for slot in self._slots)
        if not idle and len(self._slots) < self.max_slots:
            try:
                self._slots.append(self._more())
            except UserError:
                self.max_slots = len(self._slots)
        return any(not slot.busy for slot in self._slots)

    @contextmanager
    def taken(self, root: bytes, tokens: Sequence[int]) -> Iterator[Slot]:
        """Lend a slot for a call on a text of this root.

        It is the idle one whose cache shares the longest prefix with it, else the least recently
        used; without a root an empty one before others. Raises `UserError` if all are busy.
        """
        if not self.room():
            raise UserError(
                f"{len(self._slots)} calls of this service are unfinished, which is all that "
                "`parallel` allows: read a stream to its end or close() it before the next call"
            )
        idle = [slot for slot in self._slots if not slot.busy]
        empty = {id(x) for x in idle if not root and x.working.holds(root)}
        slot = max(idle, key=lambda x: (x.working.shared(root, tokens), id(x) in empty, -x.used))
        self._calls += 1
        slot.busy, slot.used = True, self._calls
        try:
            yield slot
        finally:
            slot.busy, slot.answer = False, None

    def forget(self, root: bytes) -> None:
        """Drop texts of this root from idle caches."""
        for slot in self._slots:
            if not slot.busy and slot.working.holds(root):
                slot.working.forget()

    def answers(self) -> list[Generation]:
        """Return the answers that are being generated."""
        return [slot.answer for slot in self._slots if slot.answer is not None]

    def close(self) -> None:
        """Close all slots but the first, which its owner closes, and free their caches."""
        for slot in self._slots[1:]:
            slot.working.close()
            slot.active.close()
        del self._slots[1:]
