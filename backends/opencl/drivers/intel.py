"""Intel's OpenCL runtime for CPUs (`pip install 'hetero[intel-opencl]'`), on any maker's.

It computes in TBB's threads and, while a thread of ours blocks in a wait, in that one too. Waits
here poll (`calls`), so one more worker than cores is requested: the one that never computes.
It has no macros or intrinsics of the processor in OpenCL C: kernels of a level are compiled without
them, at the level's vector width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetero.backends.opencl.drivers.driver import Driver
from hetero.backends.opencl.drivers.levels import Level

ARCHITECTURES = {"avx512-vnni": "skx", "avx512": "skx", "avx2": "core-avx2", "x86-64": "corei7"}
FAMILIES = {
    "avx512-vnni": "pocl-avx512",
    "avx512": "pocl-avx512",
    "avx2": "pocl",
    "x86-64": "pocl-x86-64",
}


class IntelCpu(Driver):
    """`libintelocl.so`."""

    name = "intel"
    computes_on_cpu = True
    starts_threads_late = True

    def owns_library(self, library: str) -> bool:
        """See `Driver.owns_library`."""
        name = Path(library).name.lower()
        return name.startswith(("libintelocl.", "intelocl64"))

    def owns_platform(self, platform_name: str) -> bool:
        """See `Driver.owns_platform`."""
        return platform_name == "Intel(R) OpenCL"

    def environment(self, *, workers: int, level: Level, folder: Path) -> Mapping[str, str]:
        """See `Driver.environment`."""
        del folder
        return {
            "CL_CONFIG_CPU_TBB_NUM_WORKERS": str(workers + 1),
            "CL_CONFIG_CPU_TARGET_ARCH": ARCHITECTURES.get(level.name, ""),
        }

    def family(self, level: Level, device_name: str) -> str:
        """See `Driver.family`."""
        del device_name
        return FAMILIES.get(level.name, "other")
