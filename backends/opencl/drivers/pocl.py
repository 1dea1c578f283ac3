"""PoCL: OpenCL on this host's cores. The one of the package index is 3.0 with LLVM 14.

Its compiler's target is a name in the device's record (`pocl_repair`); its built-in library is the
file that its own look at the processor picks from the folder next to it, so the library is loaded
through a folder of links in which every pick is the level's file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.opencl.drivers import pocl_headers
from hetero.backends.opencl.drivers.driver import Driver
from hetero.backends.opencl.drivers.levels import GENERIC, Level
from hetero.backends.opencl.drivers.pocl_repair import applies, repair, target_triple
from hetero.backends.opencl.kernel_files import sources_digest
from hetero.backends.opencl.self_test.kernel_store import KernelStore

WORKERS: Final = "POCL_MAX_PTHREAD_COUNT"
CACHE: Final = "POCL_CACHE_DIR"
DATA: Final = Path("../../pocl_binary_distribution/.libs")  # from the library's folder, in wheels
FAMILIES: Final = {
    "avx512-vnni": "pocl-avx512-vnni",
    "avx512": "pocl-avx512",
    "avx2": "pocl",
    "x86-64": "pocl-x86-64",  # vectors of 8 crash PoCL's compiler here; work-group kernels do not
}


class Pocl(Driver):
    """`libpocl.so`, the bundled one or a system's."""

    name = "pocl"
    computes_on_cpu = True
    caches_kernels = True

    def owns_library(self, library: str) -> bool:
        """See `Driver.owns_library`."""
        return Path(library).name.startswith(("libpocl", "pocl"))

    def owns_platform(self, platform_name: str) -> bool:
        """See `Driver.owns_platform`."""
        return platform_name == "Portable Computing Language"

    def environment(self, *, workers: int, level: Level, folder: Path) -> Mapping[str, str]:
        """See `Driver.environment`.

        POCL_AFFINITY is left alone: it pins worker i to core i, which a container may not allow.
        From 5.0 on the compiler's target is a variable.
        """
        target = {} if level is GENERIC else {"POCL_LLVM_CPU_NAME": level.llvm_cpu}
        return {WORKERS: str(workers), CACHE: str(folder / "pocl"), **target}

    def library(self, path: str, level: Level, folder: Path, store: KernelStore) -> str:
        """See `Driver.library`.

        For a wheel's PoCL it is a folder of links (a driver of a system finds its files where it
        was installed), in which the compiler's headers are shorter.
        """
        real = Path(path)
        data = real.parent / DATA
        share = data / "share" / "pocl"
        wanted = next(share.glob(f"kernel-*-{level.library}.bc"), None) if level.library else None
        if wanted is None:
            return path
        linked = folder / f"pocl-{level.name}" / "pyopencl" / ".libs" / real.name
        links = linked.parent / DATA / "share" / "pocl"
        links.mkdir(parents=True, exist_ok=True)
        linked.parent.mkdir(parents=True, exist_ok=True)
        _link(linked, real)
        for entry in data.iterdir():
            if entry.name != "share":
                _link(linked.parent / DATA / entry.name, entry)
        for entry in share.iterdir():
            if (entry / pocl_headers.HEADER).is_file():
                pocl_headers.make_headers(entry, links / entry.name, store)
            else:
                _link(links / entry.name, wanted if entry.suffix == ".bc" else entry)
        return str(linked)

    def revision(self) -> str:
        """See `Driver.revision`.

        The short header is part of every program, and follows from the kernels.
        """
        return f"{pocl_headers.REVISION} {sources_digest()}"

    def prepare(self, device: Any, level: Level) -> None:
        """See `Driver.prepare`: write the level's name where the version has no variable for it."""
        if level is GENERIC or not applies(device.platform.version):
            return
        if repair(device.int_ptr, target_triple(device.version), level.llvm_cpu) is None:
            raise DeviceUnavailableError(
                "opencl",
                f"making {device.platform.version.strip()} compile for {level.llvm_cpu}",
                f"its record does not have the expected fields ({device.version.strip()})",
                "install a newer PoCL or another driver",
            )

    def family(self, level: Level, device_name: str) -> str:
        """See `Driver.family`."""
        del device_name
        return FAMILIES.get(level.name, "other")


def _link(link: Path, target: Path) -> None:
    if not link.is_symlink():
        os.symlink(target.resolve(), link)
