"""Whether other programs took our cores while we measured (Linux tells; elsewhere unknown)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

TASKS = Path("/proc/self/task")
THREAD = Path("/proc/thread-self")


class Interference(Protocol):
    """Counters of the seconds that each of our threads has waited for a core."""

    def waits_s(self) -> Mapping[int, float]:
        """Seconds by thread since it began; only differences matter."""


class NoInterference:
    """Where the system does not tell, or time is virtual."""

    def waits_s(self) -> Mapping[int, float]:
        """Nobody waited."""
        return {}


class SchedulerWaits:
    """`run_delay` of `/proc/<pid>/task/*/schedstat`."""

    def waits_s(self) -> Mapping[int, float]:
        """Seconds by thread id."""
        found = {}
        for task in TASKS.iterdir():
            try:
                found[int(task.name)] = _run_delay_s(task)
            except OSError:  # the thread ended between listing and reading
                continue
        return found


def waited_for_core_s() -> float | None:
    """Seconds that this thread has waited for a core because other programs of this system had it
    (Linux; None elsewhere). What a hypervisor takes is not in it.
    """
    try:
        return _run_delay_s(THREAD)
    except (OSError, IndexError, ValueError):
        return None


def _run_delay_s(task: Path) -> float:
    fields = (task / "schedstat").read_text(encoding="ascii").split()
    return int(fields[1]) * 1e-9


def longest_wait_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Longest wait of any one thread between two readings.

    Waits of several threads overlap, so their sum would be more than was lost.
    """
    return max((after[thread] - before.get(thread, 0.0) for thread in after), default=0.0)


def find_interference() -> Interference:
    """The scheduler's counters where they exist."""
    return SchedulerWaits() if (TASKS.parent / "schedstat").exists() else NoInterference()
