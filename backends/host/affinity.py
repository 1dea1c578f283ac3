"""The core that drives each device: fast ones compute, a small or middle one polls."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero.backends.host.cgroup import cpu_quota


@dataclass(frozen=True)
class CoreAssignment:
    """Core of the OpenCL worker and of the control thread; None leaves placement to the system."""

    gpu: int | None
    control: int | None


# What says how fast a core is, the better one first: Linux's scheduler's word (arm64 with cores of
# several sizes), then the highest clock.
SPEED_FILES: Final = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
CPUS: Path = Path("/sys/devices/system/cpu")
ALIKE: Final = 0.95  # cores whose speed is at least this part of the next one's are of one size

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
    """Return the cores of two devices that compute on this processor.

    The GPU's worker has the first of the fastest allowed cores, the control thread (the NPU) the
    last of them that is no hardware thread of the same core; of the next size where there is none.
    With one core, or where the system has no affinity, nothing is pinned.
    """
    if not hasattr(os, "sched_getaffinity") or core_count() < 2:
        return CoreAssignment(None, None)
    sizes = core_sizes()
    gpu = sizes[-1][0]
    own = _hardware_threads(gpu)
    others = [core for size in sizes for core in size if core not in own]
    return CoreAssignment(gpu, (others or [core for core in sizes[-1] if core != gpu])[-1])


def spare_cores(taken: Collection[int]) -> tuple[int, ...]:
    """Return the cores of a third device that computes on this processor, besides those taken.

    With none left it shares the first of the taken ones, which works for a GPU. Empty pins nothing.
    """
    if not hasattr(os, "sched_getaffinity") or core_count() < 2:
        return ()
    cores = allowed_cores()
    spare = tuple(core for core in cores if core not in taken)
    return spare[: max(core_count() - len(taken), 1)] or (cores[0],)


def polling_core() -> int | None:
    """Return the core of a control thread that only submits and polls; None to pin nothing.

    The paper's section 4.2: a small or middle core. The last one of the middle size of three or
    more, of the smaller of two, and of all where they are alike.
    """
    if not hasattr(os, "sched_getaffinity") or core_count() < 2:
        return None
    sizes = core_sizes()
    return sizes[(len(sizes) - 1) // 2][-1]


def core_sizes() -> list[list[int]]:
    """Return the allowed cores by size, the smallest first; one size where none is known."""
    cores = allowed_cores()
    speeds = next(filter(None, (_speeds(cores, name) for name in SPEED_FILES)), None)
    if speeds is None:
        return [cores]
    sizes: list[list[int]] = []
    for core in sorted(cores, key=lambda core: (speeds[core], core)):
        if sizes and speeds[sizes[-1][0]] >= ALIKE * speeds[core]:
            sizes[-1].append(core)
        else:
            sizes.append([core])
    return [sorted(size) for size in sizes]


def _hardware_threads(core: int) -> set[int]:
    """Return the logical cores of a core's physical one, itself included."""
    threads = {core}
    with suppress(OSError, ValueError):
        text = (CPUS / f"cpu{core}" / "topology" / "thread_siblings_list").read_text("ascii")
        for span in text.strip().split(","):
            first, _, last = span.partition("-")
            threads |= set(range(int(first), int(last or first) + 1))
    return threads


def _speeds(cores: Iterable[int], name: str) -> dict[int, int] | None:
    """Return what a file says of each core; None where it does not of all."""
    try:
        return {core: int((CPUS / f"cpu{core}" / name).read_text("ascii")) for core in cores}
    except (OSError, ValueError):
        return None


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
        try:
            os.sched_setaffinity(thread, before)
        finally:  # statements, not calls, after which Ctrl-C may come: later holds must pin again
            if outer is not None:
                _pinned[thread] = outer
            elif thread in _pinned:
                del _pinned[thread]
            if outermost and thread in _before:
                del _before[thread]


def move_pin(core: int | None) -> None:
    """Hold the calling thread to another core from now on, if it is inside `pinned`.

    None lets it run on all that it had before.
    """
    thread = threading.get_native_id()
    if thread in _before:
        os.sched_setaffinity(thread, _before[thread] if core is None else {core})
        _pinned.pop(thread, None)
        if core is not None:
            _pinned[thread] = core


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
