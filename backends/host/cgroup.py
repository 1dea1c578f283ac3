"""The CPU quota of this process's control groups (Linux): `docker --cpus`, a pod's limit.

Version 2 has `cpu.max` ("150000 100000": microseconds of each period, or "max"), version 1
`cpu.cfs_quota_us` (-1: none) and `cpu.cfs_period_us`. A group is limited by those around it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

GROUPS: Final = Path("/proc/self/cgroup")
ROOT: Final = Path("/sys/fs/cgroup")


def cpu_quota(groups: Path = GROUPS, root: Path = ROOT) -> float | None:
    """Return how many CPUs' time the process may use; None where there is no limit."""
    limits = (_limit(folder) for folder in _folders(groups, root))
    return min((limit for limit in limits if limit is not None), default=None)


def _folders(groups: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of the process's CPU groups, and of the groups around them.

    In a container a path may be the host's, of which only the mount's root exists.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for mount in (controllers, "cpu") if controllers else ("", "unified"):
            for group in (inner, *inner.parents):
                yield root / mount / group


def _limit(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        if (limits := folder / "cpu.max").exists():
            quota, period = limits.read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        cpus = int(quota) / int(period)
        return cpus if cpus > 0 else None
    return None
