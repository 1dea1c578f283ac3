"""Turns on a conversation: a call reads its text only after the call before has stored its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager


class Turns:
    """One first-come, first-served lock for each key in use. Used in one event loop."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}  # and how many use it
        self._closed = Counter[Hashable]()

    @asynccontextmanager
    async def of(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for the calls that came before with this key, then keep others out."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = lock, users - 1

    @contextmanager
    def closing(self, key: Hashable) -> Iterator[None]:
        """Mark a key inside the block as one that no further answer may begin with."""
        self._closed[key] += 1
        try:
            yield
        finally:
            self._closed[key] -= 1
            if not self._closed[key]:
                del self._closed[key]

    def is_closing(self, key: Hashable) -> bool:
        """Return whether a block of `closing` runs for this key."""
        return key in self._closed

    def __len__(self) -> int:
        return len(self._locks)
