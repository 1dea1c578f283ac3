"""The host's processor and memory, as the system tells them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Instruction set flags of the first core; empty where the file does not exist."""
    return frozenset((_first("flags", cpuinfo) or "").split())


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Processor name for people."""
    return _first("model name", cpuinfo) or platform.processor() or platform.machine()


def is_arm64() -> bool:
    """Whether this is a 64-bit Arm processor, as Linux, Windows or macOS name it."""
    return platform.machine().lower() in ("aarch64", "arm64")


def memory_bytes() -> int | None:
    """Memory of this machine, None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _first(key: str, cpuinfo: Path) -> str | None:
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return None
