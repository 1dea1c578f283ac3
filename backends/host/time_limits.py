"""Time limits: longer on a slow machine; a process that works is not one that hangs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

from hetero.backends.errors import UserError

VARIABLE: Final = "HETERO_TIMEOUT_SCALE"
PROC: Final = Path("/proc")
MIN_WORK: Final = 0.01  # of a core, of a process that is at work
MAX_WORK: Final = 0.9  # of the limit, in seconds of a core, of one that works for ever
_CPU_FIELDS: Final = slice(11, 15)  # of /proc/PID/stat after the name: own and children's time


def time_limit(seconds: float) -> float:
    """Return a limit times HETERO_TIMEOUT_SCALE. Raises `UserError` for a wrong one."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return seconds
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0.1 <= scale <= 1000:
        raise UserError(
            f"{VARIABLE}={text}: it multiplies time limits and is a number from 0.1 to 1000, such "
            "as 4 for a slow machine; unset it for 1"
        )
    return seconds * scale


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of a process and of its children that ended (Linux), else None."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()[_CPU_FIELDS]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


class Patience:
    """Patience with a process that says nothing.

    On a busy machine it may have had little of a core: it hangs if it did next to nothing for
    `limit_s`, or worked for about as many seconds of a core.
    """

    def __init__(self, pid: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._pid = pid
        self._begun_s = self._seen_s = cpu_seconds(pid)

    def is_over(self) -> bool:
        """Return whether it hangs; to be called after each `limit_s` of silence."""
        now_s = cpu_seconds(self._pid)
        if now_s is None or self._begun_s is None or self._seen_s is None:
            return True
        worked_s, self._seen_s = now_s - self._seen_s, now_s
        idle = worked_s < MIN_WORK * self.limit_s
        return idle or now_s - self._begun_s >= MAX_WORK * self.limit_s
