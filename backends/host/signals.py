"""Work that no exception of a Python signal handler cuts short.

Where a lock or one assignment is enough, C's locks and the order of assignments see to that. Books
that several objects keep together (chunks, budgets, files, turns) are kept by `uninterrupted`.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # ten times as fast as signal's
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
Handler: TypeAlias = Callable[[int, FrameType | None], Any]
_NUMBERS: Final = sorted(signal.valid_signals())


class _Deferral:
    """Stands in for the handlers of signals, and notes which have arrived."""

    def __init__(self, handlers: dict[int, Handler]) -> None:
        self.handlers = handlers
        self.arrived: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append((number, frame))

    def begin(self) -> None:
        """Make handlers wait."""
        for number in self.handlers:
            signal.signal(number, self)

    def end(self) -> None:
        """Let handlers run again; one that raises does so when all are back."""
        left, late = list(self.handlers.items()), list[BaseException]()
        while left:
            try:
                while left:
                    signal.signal(*left[-1])
                    left.pop()
            except BaseException as error:
                late.append(error)
        if late:
            raise late[0]

    def deliver(self) -> None:
        """Run the handlers of what has arrived."""
        while self.arrived:
            number, frame = self.arrived.pop(0)
            self.handlers[number](number, frame)


def _handlers() -> dict[int, Any]:
    return {number: x for number in _NUMBERS if callable(x := getsignal(number))}


def uninterrupted(call: Callable[[], T]) -> T:
    """Return what a call returns.

    Signal handlers wait until it has ended: those of Python, which the main thread alone runs. They
    then run before this returns, and what they raise is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    handlers = {n: x for n, x in _handlers().items() if not isinstance(x, _Deferral)}
    if not handlers:
        return call()
    deferral = _Deferral(handlers)
    try:
        deferral.begin()
        return call()
    finally:
        deferral.end()
        deferral.deliver()


def let_handlers_run() -> None:
    """Run the handlers of signals that have arrived, where nothing is half done: in a long wait."""
    if threading.current_thread() is threading.main_thread():
        for handler in set(_handlers().values()):
            if isinstance(handler, _Deferral):
                handler.deliver()


def whole(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs `uninterrupted`."""

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        return uninterrupted(functools.partial(function, *arguments, **options))

    return run


class WholeSteps(Iterator[T], Generic[T]):
    """A generator whose every step runs `uninterrupted`, and so does its end."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps

    def __next__(self) -> T:
        step: T = uninterrupted(self._steps.__next__)
        return step

    def close(self) -> None:
        """Do what a generator's does."""
        uninterrupted(self._steps.close)

    def __del__(self) -> None:
        if hasattr(self, "_steps") and not sys.is_finalizing():
            self.close()
