"""The state of the machine when a profile was taken; nothing that names its owner."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.backends.host.processor import cpu_name, memory_bytes
from hetero.backends.host.versions import installed_version

if TYPE_CHECKING:
    from hetero.profiler.records import Environment

PACKAGES = ("numpy", "onnxruntime", "onnxruntime-qnn", "pyopencl", "pocl-binary-distribution")
CPUS = Path("/sys/devices/system/cpu")
THERMAL = Path("/sys/class/thermal")


def read_environment(*, gpu_core: int | None, control_core: int | None) -> Environment:
    """Return everything that can be read here."""
    # Every start asks for versions: what a profile's records need is loaded for profiles alone.
    from hetero.profiler.records import Environment
    from hetero.profiler.timing import last_level_cache_bytes

    return Environment(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=cpu_name(),
        cores=os.cpu_count(),
        memory_bytes=memory_bytes(),
        cache_bytes=last_level_cache_bytes(),
        clock_hz=clock_hz(control_core),
        governor=_text(_frequencies(control_core) / "scaling_governor"),
        temperature_c=temperature_c(),
        gpu_core=gpu_core,
        control_core=control_core,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        packages=package_versions(),
    )


def package_versions() -> dict[str, str]:
    """Installed versions of what runs the kernels."""
    versions = {name: installed_version(name) for name in PACKAGES}
    known = {name: version for name, version in versions.items() if version is not None}
    return {"python": platform.python_version(), **known}


def hetero_version() -> str:
    """Return the version of the installed package."""
    return installed_version("hetero") or "unknown"


def clock_hz(core: int | None = None) -> float | None:
    """Return the current clock of a core.

    The default is the core with the highest clock, since the first is a little one on many of Arm's
    processors.
    """
    text = _text(_frequencies(core) / "scaling_cur_freq")
    if text is not None and text.isdigit():
        return float(text) * 1e3
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("cpu MHz"):
            return float(line.partition(":")[2]) * 1e6
    return None


def _frequencies(core: int | None) -> Path:
    if core is not None:
        return CPUS / f"cpu{core}" / "cpufreq"
    folders = sorted(CPUS.glob("cpu[0-9]*/cpufreq"))
    return max(folders, key=_highest_khz, default=CPUS / "cpu0" / "cpufreq")


def _highest_khz(folder: Path) -> int:
    text = _text(folder / "cpuinfo_max_freq") or ""
    return int(text) if text.isdigit() else 0


def temperature_c() -> float | None:
    """Return hottest thermal zone."""
    readings = [_text(path) for path in THERMAL.glob("thermal_zone*/temp")]
    values = [float(text) / 1000 for text in readings if text and text.lstrip("-").isdigit()]
    return max(values, default=None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
