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


ARM = """processor\t: 0
BogoMIPS\t: 38.40
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: {little}
CPU revision\t: 1

processor\t: 1
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimddp
CPU implementer\t: 0x51
CPU part\t: 0x001
"""


def test_processors_of_arm_differ_by_their_cores(tmp_path: Path) -> None:
    names = set()
    for little in ("0xd46", "0xd80"):
        info = tmp_path / little
        info.write_text(ARM.format(little=little))
        assert cpu_flags(info) >= {"asimd", "asimddp"}
        assert f"(0x41:{little} 0x51:0x001)" in cpu_name(info)
        names.add(cpu_name(info))
    assert len(names) == 2


def test_equal_cores_are_named_once(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(ARM.format(little="0xd46") * 4)
    assert cpu_name(info).count("0x51:0x001") == 1
