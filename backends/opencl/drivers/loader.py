"""Loads OpenCL drivers into this process, once, with a level and a number of threads.

The loader reads its vendor folder and the drivers their environment when platforms are first asked
for, and never again. So everything is decided before: a vendor folder with the absolute paths of
the wanted drivers, and every variable that they read. The variables are taken back afterwards, for
processes that are started from here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import pyopencl as cl

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.host.affinity import core_count
from hetero.backends.opencl.drivers import driver_of_platform
from hetero.backends.opencl.drivers.icd import DriverCandidate
from hetero.backends.opencl.drivers.levels import Level
from hetero.backends.opencl.drivers.pocl import CACHE, WORKERS
from hetero.backends.opencl.drivers.threads import hold, tasks
from hetero.backends.opencl.failures import BACKEND, code_name
from hetero.backends.opencl.self_test.kernel_store import KernelStore

BUNDLED_HOME: Final = "PYOPENCL_HOME"  # where pyopencl's loader looks for the wheel's PoCL
VENDORS: Final = "OCL_ICD_VENDORS"
OURS: Final = frozenset({BUNDLED_HOME, VENDORS, CACHE})


@dataclass(frozen=True)
class Wanted:
    """A driver to load, the level that its kernels will have, and where these are kept."""

    candidate: DriverCandidate
    level: Level
    store: KernelStore


@dataclass
class Loaded:
    """The drivers that this process has loaded.

    `workers` are threads by driver, as far as they are known; `asked` is how many were asked for.
    `users` are open devices with the cores that each wants the threads of its driver on.
    """

    platforms: list[cl.Platform]
    wanted: tuple[Wanted, ...]
    folder: Path
    asked: int
    workers: dict[str, list[int]] = field(default_factory=dict)
    users: WeakKeyDictionary[Any, tuple[str, tuple[int, ...]]] = field(
        default_factory=WeakKeyDictionary
    )

    def hold_workers(self, driver: str) -> list[int]:
        """Hold a driver's threads to the cores of all devices that use them, and return those."""
        cores = sorted({x for name, own in self.users.values() if name == driver for x in own})
        if cores:
            hold(self.workers[driver], cores)
        return cores

    def devices(self, candidate: DriverCandidate) -> list[cl.Device]:
        """Return the devices of a candidate's driver; of all where the system's loader decides."""
        devices = []
        for platform in self.platforms:
            if candidate.library and driver_of_platform(platform.name) is not candidate.driver:
                continue
            try:
                devices += platform.get_devices()
            except cl.Error:  # a platform without devices answers with an error
                continue
        return devices


_process: list[Loaded] = []  # at most one: drivers are loaded for as long as the process lives
_lock = threading.Lock()


def loaded() -> Loaded | None:
    """Return what was loaded into this process, None if nothing was yet."""
    return _process[0] if _process else None


def load(wanted: Sequence[Wanted], *, workers: int, folder: Path) -> Loaded:
    """Load drivers, the first call of a process; later calls return what the first one loaded.

    `folder` is this process's own: links, and the cache that PoCL itself reads. Raises
    `DeviceUnavailableError` if no platform appears.
    """
    with _lock:
        if not _process:
            with environment(_variables(wanted, workers, folder)):
                before = tasks()
                loaded_now = Loaded(_platforms(), tuple(wanted), folder, workers)
                for one in wanted:
                    loaded_now.devices(one.candidate)
                    started = tasks() - before
                    loaded_now.workers.setdefault(one.candidate.driver.name, []).extend(
                        sorted(started)
                    )
                    before |= started
            _process.append(loaded_now)
        return _process[0]


def wanted_workers(*, every_core: bool) -> int:
    """Return the threads that a CPU driver is to have, by default or the environment."""
    said = os.environ.get(WORKERS, "").strip()
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return core_count() if every_core else 1


def _variables(wanted: Sequence[Wanted], workers: int, folder: Path) -> dict[str, str]:
    """Return every variable that the loader and the drivers are to find."""
    variables: dict[str, str] = {}
    vendors = folder / "vendors"
    libraries = []
    for i, one in enumerate(wanted):
        driver = one.candidate.driver
        variables |= driver.environment(workers=workers, level=one.level, folder=folder)
        if one.candidate.library:
            path = one.candidate.path or one.candidate.library
            libraries.append((i, driver.library(str(path), one.level, folder, one.store)))
    if libraries:
        vendors.mkdir(exist_ok=True)
        for i, library in libraries:
            (vendors / f"{i}.icd").write_text(library + "\n", encoding="utf-8")
        variables |= {VENDORS: str(vendors), BUNDLED_HOME: str(vendors)}
    return variables


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside.

    The user's own values win, but for what is this process's own: the kernel cache (its files are
    verified by `store`) and which drivers are loaded.
    """
    ours = {k: v for k, v in variables.items() if k not in os.environ or k in OURS}
    before = {name: os.environ.get(name) for name in ours}
    try:  # around the update too: a signal handler may raise in it
        os.environ.update(ours)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _platforms() -> list[cl.Platform]:
    """Return every platform once: a driver that two vendor files name appears twice."""
    try:
        by_pointer = {platform.int_ptr: platform for platform in cl.get_platforms()}
    except cl.Error as error:
        raise DeviceUnavailableError(
            BACKEND, "looking for OpenCL platforms", code_name(error.code)
        ) from error
    return list(by_pointer.values())
