"""Calls on another thread, and a wait for their results that a signal cannot break.

`concurrent.futures` and `threading.Event` wait on a `Condition`, whose lock is taken in Python: an
exception that a signal handler raises in between leaves it taken, and the next wait hangs. Here all
waits are those of C's own locks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from hetero.backends.errors import DeviceLostError
from hetero.backends.host import forks

T = TypeVar("T")
_POLL_S: Final = 0.1


class Latch:
    """Closed until `open`, then open for good. Any thread."""

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()
        self._open = False

    def open(self) -> None:
        """Let every thread that waits go on; idempotent."""
        if not self._open:
            self._open = True
            self._closed.release()

    def wait(self, limit_s: float = math.inf) -> bool:
        """Return whether it is open, at the latest after `limit_s`."""
        give_up_s = time.monotonic() + limit_s
        while not self._open:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                break
            # For a while only: one that was interrupted in between has not let the others through.
            if self._closed.acquire(timeout=min(left_s, _POLL_S)):
                self._closed.release()
        return self._open


class Background(Generic[T]):
    """A call that a thread makes. `result` returns what it returned, or raises what it raised.

    In a child that is forked before its end, it has ended with `DeviceLostError`.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._done = Latch()
        self._value: list[T] = []
        self._error: BaseException | None = None
        forks.in_child(self._lose)

    def _lose(self) -> None:
        if not self._done.wait(0):
            self._call = None
            self._error = DeviceLostError("host", "a call on a thread", forks.REASON, forks.REMEDY)
            self._done.open()

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

    def wait(self, limit_s: float = math.inf) -> bool:
        """Return whether it has ended, at the latest after `limit_s`."""
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
