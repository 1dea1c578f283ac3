"""Give PoCL 3.0 a CPU name that its compiler knows.

PoCL 3.0 (the one on PyPI) carries LLVM 14. On a CPU newer than that LLVM (AMD Zen 5, for example)
LLVM's host detection answers `generic`, PoCL passes `-target-cpu generic` to Clang, Clang refuses
it for x86-64 (`error: unknown target CPU 'generic'`), and no kernel can be built at all. No option
or environment variable of PoCL 3.0 sets the name.

The name is a field of the device's struct (`char *llvm_cpu` in `struct _cl_device_id`) and is read
at every build. So before the first context is made, this module finds the field, a pointer to the
string "generic" within the first 2 KiB of the struct, and points it to the name of the newest CPU
that LLVM 14 knows and whose instructions this machine has.

Guards: only PoCL 3.0 (`CL_PLATFORM_VERSION`), only if the device says that its CPU is `generic`;
pointers are followed by reading /proc/self/mem, which answers an error instead of crashing; and the
caller builds a trivial program afterwards. Where a guard fails nothing is written.
"""

from __future__ import annotations

import ctypes
import os
import struct

STRUCT_BYTES = 2048
GENERIC = b"generic\0"

# Names that LLVM 14 knows, the most capable first, with the flags of /proc/cpuinfo that each needs.
CPU_NAMES: tuple[tuple[str, frozenset[str]], ...] = (
    ("cooperlake", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"})),
    ("cascadelake", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"})),
    ("skylake-avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    ("haswell", frozenset({"avx2", "fma", "bmi2", "f16c"})),
    ("x86-64", frozenset()),
)

_strings: list[ctypes.Array[ctypes.c_char]] = []  # PoCL keeps the pointers as long as it is loaded


def known_cpu_name(flags: frozenset[str]) -> str:
    """The most capable CPU that LLVM 14 knows and whose instructions are all in `flags`."""
    return next(name for name, needed in CPU_NAMES if needed <= flags)


def applies(platform_version: str, device_version: str) -> bool:
    """Whether a device is a PoCL 3.0 that did not recognise its CPU."""
    return "PoCL 3.0" in platform_version and device_version.rstrip().endswith("-generic")


def repair(device_struct: int, cpu_name: str) -> bool:
    """Point the struct's `llvm_cpu` at `cpu_name`; whether the field was found."""
    offset = find_field(device_struct)
    if offset is None:
        return False
    text = ctypes.create_string_buffer(cpu_name.encode())
    _strings.append(text)
    ctypes.c_uint64.from_address(device_struct + offset).value = ctypes.addressof(text)
    return True


def find_field(device_struct: int, text: bytes = GENERIC) -> int | None:
    """Offset of the first pointer to `text` in the struct, None if there is none."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        handle = memory.fileno()
        data = _read(handle, device_struct, STRUCT_BYTES)
        for offset in range(0, len(data) - 7, 8):
            (pointer,) = struct.unpack_from("<Q", data, offset)
            if _read(handle, pointer, len(text)) == text:
                return offset
    return None


def _read(handle: int, address: int, nbytes: int) -> bytes:
    """Bytes of this process, fewer where pages are missing; never faults."""
    if not 4096 <= address < 2**63 - nbytes:
        return b""
    try:
        return os.pread(handle, nbytes, address)
    except OSError:
        return b""
