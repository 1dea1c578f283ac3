"""The lock of a service: one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

from hetero.backends.host import forks
from hetero.backends.host.signals import let_handlers_run
from hetero.errors import UserError

WAIT_S: Final = 600.0  # for the calls of other threads
_POLL_S: Final = 0.1  # how often signals are polled meanwhile


class IdleWork(Protocol):
    """Work of another thread between calls."""

    def paused(self) -> AbstractContextManager[None]:
        """Stop it inside the block."""


class ServiceLock:
    """The lock that every call takes.

    Other threads wait, for `wait_s` at most; the same thread is refused, or with `joins` its
    overlapping calls share the lock. `idle_work` is paused while it is taken.

    Raises `UserError` there, when the service is closed, and in a child that was forked from its
    process, whose threads are not in the child.
    """

    def __init__(self, wait_s: float = WAIT_S, *, joins: bool = False) -> None:
        self.wait_s = wait_s
        self._joins, self._calls = joins, 0
        self.lost = False
        self.idle_work: IdleWork | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._owner: int | None = None
        forks.in_child(self._forked)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock inside the block."""
        self.check()
        mine = self._owner == threading.get_ident()
        if mine and not self._joins:
            raise UserError(
                "a stream of this service is unfinished: read it to its end or close() it before "
                "the next call"
            )
        if not mine:
            self._acquire()
        self._calls += 1
        try:
            self.check()
            self._owner = threading.get_ident()
            with nullcontext() if self.idle_work is None else self.idle_work.paused():
                yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._owner = None
                self._lock.release()

    def check(self) -> None:
        """Raise `UserError` where no call can begin."""
        if self.lost:
            raise UserError(f"this service cannot be used here: {forks.REASON}; {forks.REMEDY}")
        if self._closed:
            raise UserError("this service was closed: open another one on its directory")

    def end(self) -> None:
        """Refuse further calls, and wait for those of other threads."""
        self._closed = True
        if not self.lost and self._owner != threading.get_ident():
            self._acquire()
            self._lock.release()

    def _acquire(self) -> None:
        give_up_s = time.monotonic() + self.wait_s
        while not self._lock.acquire(timeout=min(_POLL_S, self.wait_s)):
            let_handlers_run()
            if time.monotonic() > give_up_s:
                raise UserError(
                    f"another call of this service has not ended within {self.wait_s:g} s: read "
                    "its stream to the end or close() it"
                )

    def _forked(self) -> None:
        self.lost = True
