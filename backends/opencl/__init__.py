"""The GPU backend: OpenCL through pyopencl (PoCL on one CPU core plays the GPU on a PC)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from hetero.backends import forks
from hetero.backends.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice


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

    `cpu` is the core that PoCL's worker runs on (default: the first one allowed to this process);
    with `every_core` it has a worker for each of them (the backend `opencl-cores`).
    `platform` a part of the wanted platform's or device's name. `cache_dir` holds compiled kernels
    (default: the user's cache directory). For tests, `family` forces a tuning record,
    `unified_memory=False` makes every call copy its tensors as on a discrete GPU, and
    `coherent=False` maps and unmaps them around every call as on a GPU with caches of its own.
    """
    forks.start("opencl")
    _spare_pyopencl_cache()
    try:
        from hetero.backends.opencl.device import OpenCLDevice
        from hetero.backends.opencl.matmul import WEIGHT_FORMATS
        from hetero.backends.opencl.table import TABLE
    except ImportError as error:
        raise DeviceUnavailableError(
            "opencl", "importing pyopencl", str(error), "pip install 'pyopencl[pocl]'"
        ) from error
    return OpenCLDevice(
        TABLE,
        WEIGHT_FORMATS,
        cpu=cpu,
        every_core=every_core,
        platform=platform,
        family=family,
        unified_memory=unified_memory,
        coherent=coherent,
        cache_dir=cache_dir,
    )


def every_core_count() -> int:
    """Workers that a device opened with `every_core` would have; 0 if it cannot be opened, because
    OpenCL runs in this process with another number.
    """
    if forks.is_lost("opencl"):
        return 0
    _spare_pyopencl_cache()
    try:
        from hetero.backends.opencl.platform import started_workers, wanted_workers
    except ImportError:
        return 0
    wanted = wanted_workers(every_core=True)
    return wanted if started_workers() in (None, wanted) else 0


def _spare_pyopencl_cache() -> None:
    """Keep pyopencl from a cache that it cannot write: its first kernel would end in `OSError`.

    pyopencl reads the variable when it is imported; the user's own value wins.
    """
    for name in ("pytools", "pyopencl"):
        directory = Path(platformdirs.user_cache_dir(name, name))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError:
            os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
