"""Who may use a model's devices: one thread at a time, for one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hetero.backends.errors import DeviceLostError
from hetero.backends.host import forks

IN_USE: Final = "another thread was using it when this process was forked"


def lost_error() -> DeviceLostError:
    """What a forked child gets where it would wait for a thread that is not in it."""
    return DeviceLostError("engine", "running the model", IN_USE, forks.REMEDY)


class StepLock:
    """Held while a step runs, or while memory is taken for another context; never between steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost = False
        forks.in_child(self._forked)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the step that runs. Raises `DeviceLostError` in a child forked meanwhile."""
        if self._lost:
            raise lost_error()
        with self._lock:
            yield

    @contextmanager
    def closing(self) -> Iterator[None]:
        """As `held`, and never raises: for who releases the devices."""
        with self._lock:
            yield

    def _forked(self) -> None:
        if self._lock.locked():
            self._lost, self._lock = True, threading.Lock()
