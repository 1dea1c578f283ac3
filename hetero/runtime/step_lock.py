"""Who may use a model's devices: one thread at a time, for one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from hetero.backends.errors import DeviceLostError
from hetero.backends.host import forks

IN_USE: Final = "another thread was using it when this process was forked"


def lost_error() -> DeviceLostError:
    """What a forked child gets where it would wait for a thread that is not in it."""
    return DeviceLostError("engine", "running the model", IN_USE, forks.REMEDY)


class StepLock:
    """Held while a step runs, or while memory is taken for another context; never between steps.

    Entering waits for the step that runs. Raises `DeviceLostError` in a child that was forked from
    inside it by another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = self._lock  # by whoever is inside
        self._lost = False
        forks.in_child(self._forked)

    def __enter__(self) -> None:
        if self._lost:
            raise lost_error()
        lock = self._lock
        lock.acquire()
        self._entered = lock

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.release()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """As entering, and never raises: for who releases the devices."""
        with self._lock:
            yield

    def _forked(self) -> None:
        if self._lock.locked():
            self._lost, self._lock = True, threading.Lock()
