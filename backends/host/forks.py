"""Devices in a child that `os.fork` made: threads of a driver do not come along.

A driver with threads of its own (OpenCL) waits for ever in such a child. What was opened before is
lost there, and the driver cannot be used again: both are errors that say so. What has no threads
works on, on its own copy of the memory.

A driver's lock that a thread of the parent has would stay locked in the child, whose end waits for
it. So a fork waits for what such threads do (`forbidden`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.host.time_limits import time_limit

REASON: Final = "it was opened before this process was forked, and its threads are not in the child"
REMEDY: Final = "start processes by spawn: multiprocessing.get_context('spawn')"

COMPILING_S: Final = 60.0  # of a fork's wait for a program

_started: set[str] = set()  # backends that have threads in this process
_lost: set[str] = set()  # backends that had some in the process that this one was forked from
_watching: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}


class _ForkLock:
    """A lock that threads that call a driver take, and a fork; a child has a new one."""

    def __init__(self) -> None:
        self._lock, self._forks = threading.Lock(), False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let forks of other threads wait for the end of what is inside: calls of a driver."""
        with self._lock:
            yield

    def before(self) -> None:
        """Wait for what is inside, but not for ever."""
        self._forks = self._lock.acquire(timeout=time_limit(COMPILING_S))

    def in_parent(self) -> None:
        """Let the threads go on."""
        if self._forks:
            self._forks = False
            self._lock.release()

    def in_child(self) -> None:
        """Forget the threads, which are not here."""
        self._lock, self._forks = threading.Lock(), False


forbidden = _ForkLock()


def start(backend: str) -> None:
    """Say that a driver is used, which may start threads.

    Raises `DeviceUnavailableError` in the child of a process that did so.
    """
    if backend in _lost:
        raise DeviceUnavailableError(backend, "opening it", REASON, REMEDY)
    _started.add(backend)


def is_lost(backend: str) -> bool:
    """Return whether `start` would raise."""
    return backend in _lost


def in_child(method: Callable[[], None]) -> None:
    """Call a bound method in every child that is forked, as long as its object lives."""
    reference = weakref.WeakMethod(method, lambda died: _watching.pop(id(died), None))
    _watching[id(reference)] = reference


def _after_fork() -> None:
    forbidden.in_child()
    _lost.update(_started)
    for reference in list(_watching.values()):
        method = reference()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(
        before=forbidden.before, after_in_parent=forbidden.in_parent, after_in_child=_after_fork
    )
