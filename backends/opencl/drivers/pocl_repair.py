"""Give PoCL's compiler the CPU name that a level means.

PoCL before 5.0 passes the name that LLVM recognises by family and model to its compiler
(`-target-cpu`), whatever the processor's flags are: LLVM 14 takes Zen 4 for `znver3` (no AVX-512),
Meteor Lake for `goldmont` (no AVX), virtual processors for `nocona` or `k8-sse3`, and does not know
Zen 5 at all (`generic`, which its own Clang refuses). Kernels and built-in library go by the flags,
and code that was built for less than they use crashes the compiler or the process. No option or
environment variable sets the name there.

The name is a field of the device's struct (`char *llvm_cpu` in `struct _cl_device_id`, right after
`char *llvm_target_triplet`), read at every build. So before the first context is made, this module
points it to the level's name, whatever it says.

Guards: only versions whose struct is known to be so (3.x); pointers are followed by reading
/proc/self/mem, which answers an error instead of crashing; the pointer before must be the target
triple that the device reports, and the field itself a plausible name. Where a guard fails nothing
is written. All of this happens first in the process of a self-test (`self_test`).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import struct

STRUCT_BYTES = 2048
LONGEST_NAME = 40
REPORTED = re.compile(r"HSTR: \w+-(?P<triple>\w+-\w+-\w+-\w+)-(?P<cpu>[\w.+-]+)")
NAME = re.compile(rb"[a-z0-9][a-z0-9_.+-]{1,38}\0")

_strings: list[ctypes.Array[ctypes.c_char]] = []  # PoCL keeps the pointers as long as it is loaded


def applies(platform_version: str) -> bool:
    """Return whether a PoCL takes its compiler's target from the struct alone (before 5.0)."""
    return re.search(r"PoCL 3\.", platform_version) is not None


def target_triple(device_version: str) -> str:
    """Return the compiler's target that a device reports, `x86_64-unknown-linux-gnu`.

    Empty if none.
    """
    match = REPORTED.search(device_version)
    return match["triple"] if match else ""


def repair(device_struct: int, triple: str, cpu_name: str) -> str | None:
    """Point the struct's `llvm_cpu` at `cpu_name`.

    Returns the name that was there, None if the field is not there.
    """
    offset = find_field(device_struct, triple.encode() + b"\0")
    if offset is None:
        return None
    field = ctypes.c_uint64.from_address(device_struct + offset)
    before = ctypes.string_at(field.value).decode()
    if before != cpu_name:
        text = ctypes.create_string_buffer(cpu_name.encode())
        _strings.append(text)
        field.value = ctypes.addressof(text)
    return before


def find_field(device_struct: int, triple: bytes) -> int | None:
    """Return the offset of the pointer to a CPU name right after the first pointer to `triple`."""
    try:
        memory = open("/proc/self/mem", "rb", buffering=0)  # noqa: SIM115
    except OSError:  # hardened containers
        return None
    with memory:
        handle = memory.fileno()
        data = _read(handle, device_struct, STRUCT_BYTES)
        pointers = struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])
        for i, (one, following) in enumerate(itertools.pairwise(pointers)):
            if _read(handle, one, len(triple)) == triple:
                name = _read(handle, following, LONGEST_NAME)
                return 8 * (i + 1) if NAME.match(name) else None
    return None


def _read(handle: int, address: int, nbytes: int) -> bytes:
    """Return the bytes of this process, fewer where pages are missing; never faults."""
    if not 4096 <= address < 2**63 - nbytes:
        return b""
    try:
        return os.pread(handle, nbytes, address)
    except OSError:
        return b""
