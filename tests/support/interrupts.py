"""Signals that arrive at a chosen instruction, whose Python handler raises.

Python runs a signal handler between two instructions of the main thread, at calls and backward
jumps. A trace function sees each instruction; `_thread.interrupt_main`, called without the `CALL`
instruction after which the trace function itself would run the handler, marks the signal as
arrived. So the handler runs exactly where it would for a signal that came from outside.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

NUMBER: Final = signal.SIGUSR1
Place: TypeAlias = tuple[CodeType, int]


class Interrupt(BaseException):
    """Raised by the handler, as `KeyboardInterrupt` is by that of SIGINT."""


class _Arrival(int):
    now = property(_thread.interrupt_main)


_arrival: Final = _Arrival(NUMBER)


def _raise(*_: object) -> None:
    raise Interrupt


@contextmanager
def handler() -> Iterator[None]:
    """A handler that raises `Interrupt`."""
    before = signal.signal(NUMBER, _raise)
    try:
        yield
    finally:
        signal.signal(NUMBER, before)


def places(call: Callable[[], object]) -> list[Place]:
    """Every instruction of Python that a call runs in this thread, in order of its first time."""
    seen: dict[Place, None] = {}

    def look(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen.setdefault((frame.f_code, frame.f_lasti))
        return look

    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(None)
    return [place for place in seen if place[0].co_filename != __file__]


def interrupted(call: Callable[[], object], place: Place) -> Interrupt | None:
    """Run a call while a signal arrives at this instruction; what its handler has raised, whose
    traceback keeps every frame that it passed, as a notebook does.
    """
    code, at = place

    def look(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return look if event == "call" else None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == at:
            sys.settrace(None)
            _arrival.now  # noqa: B018  (an attribute: see the module)
        return look

    try:
        try:
            sys.settrace(look)
            call()
        finally:  # where the signal of a call's last instructions is met
            sys.settrace(None)
    except Interrupt as error:
        return error
    return None


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise `AssertionError` in the block if it takes longer: a hang fails."""

    def late(*_: object) -> None:
        raise AssertionError(f"hangs: no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_thread(call: Callable[[], Any], seconds: float) -> Any:
    """Return the result of a call in another thread; fail where it hangs."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"hangs: no end after {seconds} s"
    assert results, "it raised"
    return results[0]
