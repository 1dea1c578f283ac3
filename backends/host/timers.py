"""The accuracy of time for a thread here: timer slack, late sleeps, waits for a core."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from hetero.backends.host.clock import Clock

THREAD = Path("/proc/thread-self")
PR_SET_TIMERSLACK: Final = 29  # <linux/prctl.h>
PR_GET_TIMERSLACK: Final = 30


@contextmanager
def timer_slack(nanoseconds: int) -> Iterator[bool]:
    """Set the calling thread's timer slack (Linux), then restore it; yields whether it worked."""
    if sys.platform != "linux":
        yield False
        return
    prctl = _prctl()
    before = prctl(PR_GET_TIMERSLACK)
    try:  # around the call too: a signal handler may raise right after it
        yield prctl(PR_SET_TIMERSLACK, nanoseconds) == 0
    finally:
        if before > 0:
            prctl(PR_SET_TIMERSLACK, before)


@cache
def _prctl() -> Callable[..., int]:
    """Return `prctl`, looked up once.

    That takes 0.15 ms in the middle of decoding, when all caches are cold.
    """
    function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    return function


def lateness(clock: Clock, wanted_s: float, repeats: int) -> list[float]:
    """Return the seconds by which sleeps of so many seconds return late, in rising order."""
    late = []
    for _ in range(repeats):
        start_s = clock.now()
        clock.sleep(wanted_s)
        late.append(max(clock.now() - start_s - wanted_s, 0.0))
    return sorted(late)


def waited_for_core_s() -> float | None:
    """Return the seconds that this thread has waited for a core that other programs had.

    Linux; None elsewhere. What a hypervisor takes is not in it.
    """
    try:
        return run_delay_s(THREAD)
    except (OSError, IndexError, ValueError):
        return None


def run_delay_s(task: Path) -> float:
    """Return the seconds that a thread has waited for a core: `run_delay` of a folder of `/proc`.

    Raises `OSError` where the thread or the file is not there.
    """
    fields = (task / "schedstat").read_text(encoding="ascii").split()
    return int(fields[1]) * 1e-9
