"""Devices in a child that `os.fork` made: threads of a driver do not come along.

A driver with threads of its own (OpenCL) waits for ever in such a child. What was opened before is
lost there, and the driver cannot be used again: both are errors that say so. What has no threads
works on, on its own copy of the memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Final

from hetero.backends.errors import DeviceUnavailableError

REASON: Final = "it was opened before this process was forked, and its threads are not in the child"
REMEDY: Final = "start processes by spawn: multiprocessing.get_context('spawn')"

_started: set[str] = set()  # backends that have threads in this process
_lost: set[str] = set()  # backends that had some in the process that this one was forked from
_watching: dict[int, weakref.WeakMethod[Callable[[], None]]] = {}


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
    _lost.update(_started)
    for reference in list(_watching.values()):
        method = reference()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)
