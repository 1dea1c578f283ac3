"""The host's processor and memory, as the system reports them."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
WINDOWS_PROCESSOR = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return instruction set flags of the first core; empty where the file does not exist."""
    return frozenset((_first("flags", cpuinfo) or _first("Features", cpuinfo) or "").split())


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return processor name for people.

    Of Arm's, its architecture with the makers and parts of its cores, by which the processors of
    two machines differ.
    """
    named = _first("model name", cpuinfo)
    if named is not None:
        return named
    machine = platform.processor() or platform.machine()
    makers, parts = (_all(f"CPU {key}", cpuinfo) for key in ("implementer", "part"))
    kinds = dict.fromkeys(f"{maker}:{part}" for maker, part in zip(makers, parts, strict=False))
    return f"{machine} ({' '.join(kinds)})" if kinds else machine


def registered_processor() -> str:
    """Return the processor's name in Windows' registry; empty elsewhere."""
    if sys.platform == "win32":
        import winreg

        with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, WINDOWS_PROCESSOR) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    return ""


def is_arm64() -> bool:
    """Return whether this is a 64-bit Arm processor, as Linux, Windows or macOS name it."""
    return platform.machine().lower() in ("aarch64", "arm64")


def memory_bytes() -> int | None:
    """Return the memory of this machine, None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _first(key: str, cpuinfo: Path) -> str | None:
    return next(iter(_all(key, cpuinfo)), None)


def _all(key: str, cpuinfo: Path) -> list[str]:
    """Return the values of a key, in the order of the cores."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = (line.partition(":") for line in text.splitlines() if line.startswith(key))
    return [value.strip() for _, _, value in lines]
