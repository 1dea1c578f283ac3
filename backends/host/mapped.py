"""Pages of a mapped file, prefetched before they are used (Linux 5.14).

A first step stops at every run of 16 pages of its weights that are not mapped yet, though the file
is in memory; if it is not, it waits for the disk part by part. A thread does both during the last
preparations.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

MADV_POPULATE_READ: Final = 22  # Python has no name for it
CHUNK_BYTES: Final = 64 << 20  # other threads that change mappings wait for no longer
MEMINFO: Final = Path("/proc/meminfo")


def prefetch(memory: npt.NDArray[np.uint8]) -> threading.Thread | None:
    """Map the pages of an array by a thread, which keeps the array alive and ends with the process.

    None where the system cannot, or memory is short.
    """
    if not sys.platform.startswith("linux") or 2 * memory.nbytes > available_bytes():
        return None
    thread = threading.Thread(target=_prefetch, args=(memory,), name="hetero-pages", daemon=True)
    thread.start()
    return thread


def available_bytes() -> int:
    """Return the memory that programs could have without others being swapped out.

    0 if the system does not report it.
    """
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(words[1]) << 10 for words in fields), 0)


def _prefetch(memory: npt.NDArray[np.uint8]) -> None:
    madvise = ctypes.CDLL(None).madvise  # Python's own holds the interpreter meanwhile
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    last = memory.ctypes.data + memory.nbytes
    for start in range(first, last, CHUNK_BYTES):
        if madvise(start, min(CHUNK_BYTES, last - start), MADV_POPULATE_READ):
            return  # an older kernel, or a file that became shorter
