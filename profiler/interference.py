"""Whether other programs took our cores while we measured (Linux tells; elsewhere unknown)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

TASKS = Path("/proc/self/task")


class Interference(Protocol):
    """A counter of the seconds that our threads have waited for a core."""

    def waited_s(self) -> float:
        """Seconds since the process began; only differences matter."""


class NoInterference:
    """Where the system does not tell, or time is virtual."""

    def waited_s(self) -> float:
        """Always 0."""
        return 0.0


class SchedulerWaits:
    """`run_delay` of `/proc/<pid>/task/*/schedstat`, summed over this process's threads."""

    def waited_s(self) -> float:
        """Seconds; threads that ended meanwhile are not counted."""
        total = 0
        for task in TASKS.iterdir():
            try:
                fields = (task / "schedstat").read_text(encoding="ascii").split()
            except OSError:  # the thread ended between listing and reading
                continue
            total += int(fields[1])
        return total * 1e-9


def find_interference() -> Interference:
    """The scheduler's counters where they exist."""
    return SchedulerWaits() if (TASKS.parent / "schedstat").exists() else NoInterference()
