"""The threads that a driver computes in on this host's cores: counted, and pinned to cores."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.host.affinity import allowed_cores

TASKS = Path("/proc/self/task")


def tasks() -> set[int]:
    """Return threads of this process; empty where the system does not list them."""
    return {int(task.name) for task in TASKS.iterdir()} if TASKS.exists() else set()


def native_tasks() -> set[int]:
    """Return the threads that Python did not start."""
    return tasks() - {thread.native_id for thread in threading.enumerate() if thread.native_id}


def hold(threads: Iterable[int], cores: list[int]) -> None:
    """Hold threads to cores. Raises `DeviceUnavailableError`."""
    if sys.platform != "linux":
        return
    try:
        for thread in threads:
            os.sched_setaffinity(thread, cores)
    except OSError as error:
        raise DeviceUnavailableError(
            "opencl",
            f"moving the OpenCL worker to core {', '.join(map(str, cores))}",
            str(error.strerror),
            f"cores allowed to this process: {allowed_cores()}",
        ) from error
