"""Huge pages for weights and activations (Linux): small ones slow streams of gigabytes.

Prefetchers stop at the end of a page, so a core reads weights 10 to 30 % faster from pages of 2 MiB
than of 4 KiB (`bench/RESULTS.md`). Most distributions give them to memory for which they are asked
(`madvise`); weights too small to fill one share it with others (`memory.Arena`). Memory that is not
ours to allocate, as the packs that ONNX Runtime makes, is moved into huge pages afterwards. Other
systems have nothing of this.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

HUGE_BYTES: Final = 1 << 21
SMALLEST_BYTES: Final = 2 * HUGE_BYTES  # mappings that are looked at
STEP_BYTES: Final = 16 * HUGE_BYTES  # moved at once: some 30 to 100 ms
MADV_HUGEPAGE: Final = getattr(mmap, "MADV_HUGEPAGE", None)
MADV_NOHUGEPAGE: Final = getattr(mmap, "MADV_NOHUGEPAGE", None)
MADV_COLLAPSE: Final = 25  # Linux 6.1; Python has no name for it
MAPS: Final = Path("/proc/self/maps")


def advise(memory: mmap.mmap, nbytes: int) -> None:
    """Ask for huge pages before private memory is touched."""
    if MADV_HUGEPAGE is None or nbytes < HUGE_BYTES:
        return
    try:
        memory.madvise(MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return


def advise_against(memory: mmap.mmap) -> None:
    """Ask for small pages, where the system would make private memory huge unasked."""
    if MADV_NOHUGEPAGE is None:
        return
    try:
        memory.madvise(MADV_NOHUGEPAGE)
    except OSError:  # a kernel without huge pages
        return


def collapse(budget_s: float) -> int:
    """Move what this process has in large private mappings into huge pages; bytes moved.

    The largest mappings first, until about `budget_s` seconds have passed. Contents and addresses
    stay. Only where every small page is in memory already, so that no more is used than before.
    """
    if not sys.platform.startswith("linux") or MADV_HUGEPAGE is None:
        return 0
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    end_s = time.perf_counter() + budget_s
    moved = 0
    for start, stop in sorted(private_mappings(), key=lambda span: span[0] - span[1]):
        for low, high in _resident(library, start, stop):
            if time.perf_counter() > end_s:
                return moved
            if library.madvise(low, high - low, MADV_COLLAPSE) == 0:
                moved += high - low
    return moved


def private_mappings() -> Iterator[tuple[int, int]]:
    """Yield the addresses of large writable anonymous mappings in whole huge pages.

    The heap is among them.
    """
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, access, _, _, inode, *name = line.split()
        if access != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
            continue
        start, stop = (int(part, 16) for part in addresses.split("-"))
        start, stop = -(-start // HUGE_BYTES) * HUGE_BYTES, stop // HUGE_BYTES * HUGE_BYTES
        if stop - start >= SMALLEST_BYTES:
            yield start, stop


def _resident(library: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield runs of huge pages whose small pages are all in memory, up to `STEP_BYTES` long."""
    seen: npt.NDArray[np.uint8] = np.zeros((stop - start) // mmap.PAGESIZE, dtype=np.uint8)
    if library.mincore(start, stop - start, seen.ctypes.data) != 0:
        return
    pages = (seen & 1).reshape(-1, HUGE_BYTES // mmap.PAGESIZE)
    whole: list[bool] = pages.min(axis=1).astype(bool).tolist()
    at = 0
    while at < len(whole):
        end = at
        while end < len(whole) and whole[end] and HUGE_BYTES * (end - at) < STEP_BYTES:
            end += 1
        if end > at:
            yield start + HUGE_BYTES * at, start + HUGE_BYTES * end
        at = max(end, at + 1)
