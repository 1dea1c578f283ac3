"""Calls that another thread makes, and a wait for their results that a signal cannot break.

`concurrent.futures` and `threading.Event` wait on a `Condition`, whose lock is taken in Python: an
exception that a signal handler raises in between leaves it taken, and the next wait hangs. Here all
waits are those of C's own locks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Latch:
    """Closed until `open`, which any thread may call, also twice; then open for good."""

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()
        self._open = False

    def open(self) -> None:
        """Let every thread that waits go on."""
        self._open = True
        try:
            self._closed.release()
        except RuntimeError:  # it was open, or one that waited has yet to let the others through
            return

    def wait(self, limit_s: float = -1) -> bool:
        """Return when it is open (true), or after `limit_s` (-1: wait for ever)."""
        if self._open:
            return True
        if limit_s < 0:
            with self._closed:
                return True
        if self._closed.acquire(timeout=limit_s):
            self._closed.release()
        return self._open


class Background(Generic[T]):
    """A call that a thread makes. `result` returns what it returned, or raises what it raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._done = Latch()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, unless it was cancelled; for the thread."""
        call, self._call = self._call, None
        try:
            if call is not None:
                self._value.append(call())
        except BaseException as error:
            self._error = error
        finally:
            self._done.open()

    def cancel(self) -> None:
        """Do not make the call, unless it has begun."""
        self._call = None

    def wait(self, limit_s: float = -1) -> bool:
        """Whether it has ended, at the latest `limit_s` from now (-1: wait for it)."""
        return self._done.wait(limit_s)

    def result(self) -> T:
        """Wait for its end. Raises what the call raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]


def in_background(name: str, calls: Sequence[Callable[[], T]]) -> list[Background[T]]:
    """Make these calls in a thread, one after the other."""
    jobs = [Background(call) for call in calls]

    def run() -> None:
        for job in jobs:
            job.run()

    if jobs:
        threading.Thread(target=run, name=name).start()
    return jobs
