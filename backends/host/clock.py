"""The clock as a parameter: real time, or time that a test moves by hand."""

from __future__ import annotations

import math
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time in seconds and a way to let it pass."""

    def now(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""

    def sleep(self, duration_s: float) -> None:
        """Return after at least `duration_s` of this clock (at once if it is not positive)."""


class SystemClock:
    """Real time: `now` is `time.perf_counter` itself, for callers that poll it."""

    now = staticmethod(time.perf_counter)

    def sleep(self, duration_s: float) -> None:
        """Block the thread."""
        if duration_s > 0:
            time.sleep(duration_s)


class ManualClock:
    """Virtual time: `sleep` returns at once and moves the clock forward by exactly that much."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return current virtual time."""
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """Move time forward. A sleep without end is a bug of the caller and is refused."""
        if math.isinf(duration_s):
            raise ValueError("a manual clock cannot sleep forever")
        self._now_s += max(duration_s, 0.0)

    def advance_to(self, at_s: float) -> None:
        """Move time forward to exactly `at_s`; nothing where that is past."""
        self._now_s = max(self._now_s, at_s)
