"""The core that drives each device, on hosts where both devices are cores of one processor."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hetero.backends.host.cgroup import cpu_quota


@dataclass(frozen=True)
class CoreAssignment:
    """Core of the OpenCL worker and of the control thread; None leaves placement to the system."""

    gpu: int | None
    control: int | None


_before: dict[int, set[int]] = {}  # of threads that `pinned` holds: their cores without it
_pinned: dict[int, int] = {}  # the core of each


def allowed_cores() -> list[int]:
    """Return the cores of the calling thread, ascending.

    All of the process where that is pinned to one, and of the machine where the system has no
    affinity.

    Two devices need a core each: a GPU's worker on the core of the thread that happened to open it
    would share it with what that thread drives. A process that is pinned to one core has one.
    """
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    own = _cores_of(threading.get_native_id())
    return sorted(own if len(own) > 1 else own | _cores_of(os.getpid()))


def core_count() -> int:
    """Return how many threads of this process can compute at once.

    One on each allowed core, fewer under a CPU quota. Quotas are rounded to the nearest, halves
    down: of two threads under a quota of 1.5 each would stand still for a quarter of the time, and
    what waits for the other with it.
    """
    cores, quota = len(allowed_cores()), cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota - 0.5)))


def _cores_of(thread: int) -> set[int]:
    return _before.get(thread) or set(os.sched_getaffinity(thread))


def assign_cores() -> CoreAssignment:
    """Return the GPU's worker on the first allowed core, the control thread (the NPU) on the last.

    With one core, or where the system has no affinity, nothing is pinned.
    """
    if not hasattr(os, "sched_getaffinity") or core_count() < 2:
        return CoreAssignment(None, None)
    cores = allowed_cores()
    return CoreAssignment(cores[0], cores[-1])


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Hold the calling thread to one core, and give its old set back.

    Inside of such a hold another one of the same core asks the system nothing.
    """
    thread = threading.get_native_id()
    outer = _pinned.get(thread)
    if core is None or outer == core:
        yield
        return
    before, outermost = os.sched_getaffinity(thread), thread not in _before
    try:  # around the calls too: Ctrl-C may come right after one
        _before.setdefault(thread, before)
        os.sched_setaffinity(thread, {core})
        _pinned[thread] = core
        yield
    finally:  # the system's call first: Ctrl-C may come right after any
        os.sched_setaffinity(thread, before)
        if outer is None:
            _pinned.pop(thread, None)
        else:
            _pinned[thread] = outer
        if outermost:
            _before.pop(thread, None)


def unpinned() -> None:
    """Let the calling thread run on every core of the process.

    One that a thread inside `pinned` began would stay on its core.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(threading.get_native_id(), allowed_cores())


def run_on(cores: Iterable[int]) -> None:
    """Let the calling thread, and the threads that it starts, run on these cores.

    Nothing where the system has no affinity. A process inherits the affinity of the thread that
    started it, which may be pinned.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
