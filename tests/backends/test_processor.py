"""What the processor's file says, and where there is none."""

from __future__ import annotations

import platform
from pathlib import Path

from hetero.backends.host.processor import cpu_flags, cpu_name

CPUINFO = (
    "processor: 0\nmodel name\t: A Chip: 3\nflags\t\t: fpu avx2 fma\n"
    "processor: 1\nmodel name\t: B\nflags : other\n"
)


def test_the_first_core_counts(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(CPUINFO)
    assert cpu_flags(info) == {"fpu", "avx2", "fma"}
    assert cpu_name(info) == "A Chip: 3"


def test_machines_without_the_file(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "none") == frozenset()
    assert cpu_name(tmp_path / "none") == (platform.processor() or platform.machine())
