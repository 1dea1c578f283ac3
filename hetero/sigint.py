"""Ctrl-C while modules are imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130  # exit code


@contextmanager
def exit_quietly_on_sigint() -> Iterator[None]:
    """End the process at once on a Ctrl-C inside the block, which imports modules.

    An exception could make an interrupted import fail in another way (an `ImportError` of an
    extension module), so none is raised.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield  # ignored, as under nohup, or handled by the caller
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(_number: int, _frame: FrameType | None) -> None:
    print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
