"""A fair queue: first come first served inside an app, round robin between apps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue for each app. An app that has just been served is the last to be served again."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, app: str, item: T) -> None:
        """Append an item to its app's queue."""
        self._queues.setdefault(app, deque()).append(item)

    def next(self, allowed: Callable[[T], bool] = lambda _: True) -> T | None:
        """Remove and return the next item; None if there is none.

        An app whose first item is not `allowed` to begin is passed over, and keeps its place.
        """
        app = next((app for app, queue in self._queues.items() if allowed(queue[0])), None)
        if app is None:
            return None
        queue = self._queues.pop(app)
        item = queue.popleft()
        if queue:
            self._queues[app] = queue  # behind the other apps
        return item

    def remove(self, matches: Callable[[T], bool]) -> list[T]:
        """Remove and return the matching items."""
        removed = []
        for app, queue in list(self._queues.items()):
            removed += [item for item in queue if matches(item)]
            left = deque(item for item in queue if not matches(item))
            if left:
                self._queues[app] = left
            else:
                del self._queues[app]
        return removed
