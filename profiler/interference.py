"""Detects whether other programs took our cores while we measured (Linux; unknown elsewhere)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hetero.backends.host.timers import run_delay_s

TASKS = Path("/proc/self/task")


class Interference(Protocol):
    """Counters of the seconds that each of our threads has waited for a core."""

    def waits_s(self) -> Mapping[int, float]:
        """Return the seconds by thread since it began; only differences matter."""


class NoInterference:
    """Used where the system cannot say, or time is virtual."""

    def waits_s(self) -> Mapping[int, float]:
        """Return no waits."""
        return {}


class SchedulerWaits:
    """`run_delay` of `/proc/<pid>/task/*/schedstat`."""

    def waits_s(self) -> Mapping[int, float]:
        """Return the seconds by thread id."""
        delays = {}
        for task in TASKS.iterdir():
            try:
                delays[int(task.name)] = run_delay_s(task)
            except OSError:  # the thread ended between listing and reading
                continue
        return delays


def longest_wait_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the longest wait of any one thread between two readings.

    Waits of several threads overlap, so their sum would be more than was lost.
    """
    return max((after[thread] - before.get(thread, 0.0) for thread in after), default=0.0)


def find_interference() -> Interference:
    """Return the scheduler's counters where they exist."""
    return SchedulerWaits() if (TASKS.parent / "schedstat").exists() else NoInterference()
