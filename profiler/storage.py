"""The rate of reading a mapped file whose pages are not in memory, as experts in a file are read.

A file of random bytes is written among the caches, where packed models are, and pushed out of
memory. Its pieces are then read through a map in random order, as the experts of tokens are: what
the system reads ahead within a piece helps, what it reads beyond does not.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from hetero.backends.host.clock import Clock
from hetero.profiler.records import Record, Storage

PIECE_BYTES: Final = 1 << 20  # about a matrix of an expert
PIECES: Final = 48
READ_S: Final = 3.0  # at most, on a slow disk
LEAST_PIECES: Final = 4
COLD: Final = 0.1  # most of the file that may still be in memory


class MaybeStorage(Record):
    """The rate, or why it was not measured."""

    storage: Storage | None = None
    note: str = ""


def measure_storage(
    folder: Path, clock: Clock, *, resident: Callable[[mmap.mmap], float] | None = None
) -> MaybeStorage:
    """Return the rate of the disk that a folder is on.

    `resident` returns the share of a map that is in memory (by default as the system says).
    """
    share = resident or resident_share
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            piece = np.random.default_rng(0).bytes(PIECE_BYTES)
            for _ in range(PIECES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                if share(mapped) > COLD:
                    return _unknown(f"the files of {folder} stay in memory")
                return MaybeStorage(storage=_rate(mapped, clock))
    except (OSError, AttributeError) as error:  # no room, or no such calls on this system
        return _unknown(getattr(error, "strerror", None) or str(error))


def _rate(mapped: mmap.mmap, clock: Clock) -> Storage:
    """Return the rate of pieces in random order, each read page by page."""
    order = np.random.default_rng(1).permutation(PIECES).tolist()
    start_s, count = clock.now(), 0
    for place in order:
        with memoryview(mapped)[place * PIECE_BYTES : (place + 1) * PIECE_BYTES] as piece:
            np.frombuffer(piece, np.uint8)[:: mmap.PAGESIZE].max()
        count += 1
        if count >= LEAST_PIECES and clock.now() - start_s > READ_S:
            break
    spent_s = max(clock.now() - start_s, 1e-9)
    return Storage(read_bytes_per_s=count * PIECE_BYTES / spent_s, piece_bytes=PIECE_BYTES)


def resident_share(mapped: mmap.mmap) -> float:
    """Return the share of a map's pages that are in memory. Raises `OSError`."""
    pages = -(-len(mapped) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    view = np.frombuffer(mapped, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(view.ctypes.data)
    failed = libc.mincore(address, ctypes.c_size_t(len(mapped)), flags)
    del view  # or the map could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(x & 1 for x in flags) / pages


def _unknown(why: str) -> MaybeStorage:
    return MaybeStorage(note=f"the rate of the disk was not measured: {why}")
