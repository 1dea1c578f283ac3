"""Which core drives which device, on hosts where both devices are cores of one processor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class CoreAssignment:
    """Core of the OpenCL worker and of the control thread; None leaves placement to the system."""

    gpu: int | None
    control: int | None


def assign_cores() -> CoreAssignment:
    """The GPU's worker on the first allowed core, the control thread (the NPU) on the last.

    With one allowed core, or where the system has no affinity, nothing is pinned.
    """
    if not hasattr(os, "sched_getaffinity"):
        return CoreAssignment(None, None)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return CoreAssignment(None, None)
    return CoreAssignment(cores[0], cores[-1])


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Hold the calling thread to one core, and give its old set back."""
    if core is None:
        yield
        return
    thread = threading.get_native_id()
    before = os.sched_getaffinity(thread)
    os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(thread, before)
