"""The GPU backend: OpenCL through pyopencl (a CPU driver on one core plays the GPU on a PC)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.host import forks
from hetero.backends.registry import PYOPENCL

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice
    from hetero.backends.opencl.reports import DriverReport


def open(
    *,
    cpu: int | None = None,
    every_core: bool = False,
    platform: str | None = None,
    family: str | None = None,
    unified_memory: bool | None = None,
    coherent: bool | None = None,
    cache_dir: Path | None = None,
) -> OpenCLDevice:
    """Open an OpenCL device. Raises `DeviceUnavailableError` with the remedy.

    `cpu` is the core that a CPU driver's worker runs on (default: the first one allowed to this
    process); with `every_core` it has a worker for each of them (the backend `opencl-cores`).
    `platform` is a driver's name (`pocl`, `intel`, `vendor`) or a part of the wanted platform's or
    device's name. `cache_dir` holds results and compiled kernels (default: the user's cache
    directory). The first time on a machine, a driver's kernels are tried in a child process.

    For tests, `family` forces a tuning record. `unified_memory=False` copies tensors as on a
    discrete GPU, and `coherent=False` maps and unmaps them as on a GPU with caches of its own:
    default HETERO_OPENCL_MEMORY (`copied`, `mapped`, or `svm` for fine-grained shared virtual
    memory), else what the device says and a probe.
    """
    forks.start("opencl")
    _spare_pyopencl_cache()
    try:
        from hetero.backends.opencl.coherence import chosen_memory
        from hetero.backends.opencl.device import OpenCLDevice
        from hetero.backends.opencl.drivers.threads import tasks
        from hetero.backends.opencl.gpu_capabilities import WEIGHT_FORMATS
        from hetero.backends.opencl.platform import find_device, place_workers
        from hetero.backends.opencl.table import TABLE
    except ImportError as error:
        raise DeviceUnavailableError(
            "opencl", "importing pyopencl", str(error), PYOPENCL
        ) from error
    try:
        selected = find_device(wanted=platform, cpu=cpu, every_core=every_core, cache_dir=cache_dir)
    except OSError as error:
        raise DeviceUnavailableError(
            "opencl", "writing the files of its driver", str(error),
            "make room, or name another folder in XDG_CACHE_HOME",
        ) from error  # fmt: skip
    memory = chosen_memory()
    before = tasks()
    device = OpenCLDevice(
        TABLE,
        WEIGHT_FORMATS,
        selected,
        every_core=every_core,
        family=family,
        unified_memory=memory.unified_memory if unified_memory is None else unified_memory,
        coherent=memory.coherent if coherent is None else coherent,
        svm=memory.svm,
    )
    place_workers(selected, device, before)
    return device


def driver_reports() -> list[DriverReport]:
    """Return reports on every installed OpenCL driver, testing it now if it never was.

    Raises `DeviceOptionError`.
    """
    _spare_pyopencl_cache()
    try:
        from hetero.backends.opencl.platform import survey
    except ImportError:  # `open` says so
        return []
    return list(survey())


def driver_here(wanted: str | None = None) -> str | None:
    """Name of the driver that `open` would use (`pocl`, `intel`, `vendor`), None if there is none.

    Tries drivers that never were tried. Raises `DeviceOptionError` for one that is not there.
    """
    _spare_pyopencl_cache()
    try:
        from hetero.backends.opencl.platform import choose_driver
    except ImportError:
        return None
    return choose_driver(wanted)


def computes_on_processor(wanted: str | None = None) -> bool:
    """Return whether the driver of `driver_here` computes on this host's cores. Raises as that."""
    name = driver_here(wanted)
    if name is None:
        return False
    from hetero.backends.opencl.drivers import DRIVERS

    return any(driver.computes_on_cpu for driver in DRIVERS if driver.name == name)


def driver_of(platform_version: str) -> str:
    """Name of the driver that reports this platform version, as profiles have it."""
    if "PoCL" in platform_version:
        return "pocl"
    return "intel" if platform_version.endswith(" LINUX") else "vendor"


def every_core_count() -> int:
    """Return the workers that a device opened with `every_core` would have.

    0 if it cannot be opened, because OpenCL runs in this process with another number.
    """
    if forks.is_lost("opencl"):
        return 0
    _spare_pyopencl_cache()
    try:
        from hetero.backends.opencl.drivers.loader import wanted_workers
        from hetero.backends.opencl.platform import started_workers
    except ImportError:
        return 0
    wanted = wanted_workers(every_core=True)
    return wanted if started_workers() in (None, wanted) else 0


def _spare_pyopencl_cache() -> None:
    """Keep pyopencl from a cache of its own.

    It fails on one that cannot be written, or in which a byte is damaged, and what it keeps
    (launchers in Python) is made as fast as it is read.

    pyopencl reads the variable when it is imported; the user's own value wins.
    """
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
