"""Kernel levels: what the compiler may assume of a processor, derived from its flags alone.

A level names three things that must agree: the instructions that the compiler targets, the built-in
library that it links, and the kernels that are built. A driver that decides one of them by the
processor's name and another by its flags crashes on the processors where the two differ, so all
three follow from the level (docs/explanation/opencl.md has the table).
"""

from __future__ import annotations

import difflib
import os
import platform
from dataclasses import dataclass
from typing import Final

from hetero.backends.errors import DeviceOptionError
from hetero.backends.host.processor import cpu_flags

LEVEL_VARIABLE: Final = "HETERO_OPENCL_LEVEL"
X86: Final = frozenset({"x86_64", "AMD64"})


@dataclass(frozen=True)
class Level:
    """One level.

    `flags` are the names of /proc/cpuinfo that it needs: every instruction that LLVM's code
    generator may emit for `llvm_cpu`, so that a masked flag means the next level down. `library` is
    the suffix of PoCL's built-in library for it.
    """

    name: str
    flags: frozenset[str] = frozenset()
    llvm_cpu: str = ""
    library: str = ""


_V2 = frozenset({"ssse3", "sse4_1", "sse4_2", "cx16", "popcnt", "lahf_lm"})
_AVX2 = _V2 | {"xsave", "movbe", "abm", "bmi1", "bmi2", "avx", "avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}

X86_LEVELS: Final = (
    Level("avx512-vnni", _AVX512 | {"avx512_vnni"}, "cascadelake", "avx512"),
    Level("avx512", _AVX512, "skylake-avx512", "avx512"),
    Level("avx2", _AVX2, "haswell", "avx2"),
    Level("x86-64", frozenset(), "x86-64", "sse2"),
)
GENERIC: Final = Level("generic")
LEVELS: Final = {level.name: level for level in (*X86_LEVELS, GENERIC)}


def find_level(name: str) -> Level:
    """Return the level of that name. Raises `DeviceOptionError` with the known ones."""
    if name in LEVELS:
        return LEVELS[name]
    near = difflib.get_close_matches(name, LEVELS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DeviceOptionError(
        "opencl", f"reading {LEVEL_VARIABLE}={name}", "unknown level",
        f"{hint}known are {', '.join(LEVELS)}",
    )  # fmt: skip


def processor_levels(flags: frozenset[str] | None = None) -> tuple[Level, ...]:
    """Return the levels of a driver that computes on this host's processor, the best first."""
    if platform.machine() not in X86:
        return (GENERIC,)
    known = cpu_flags() if flags is None else flags
    return tuple(level for level in X86_LEVELS if level.flags <= known)


def chosen_level() -> Level | None:
    """Return what HETERO_OPENCL_LEVEL asks for, None where it is not set.

    Raises `DeviceOptionError` for an unknown level and one above the machine's own.
    """
    name = os.environ.get(LEVEL_VARIABLE, "").strip()
    if not name:
        return None
    level, own = find_level(name), processor_levels()
    if level in X86_LEVELS and level not in own:
        missing = sorted(level.flags - cpu_flags()) or [platform.machine()]
        raise DeviceOptionError(
            "opencl", f"reading {LEVEL_VARIABLE}={name}",
            f"this processor is without {', '.join(missing)}",
            f"choose one of {', '.join(x.name for x in own)}, or unset it",
        )  # fmt: skip
    return level
