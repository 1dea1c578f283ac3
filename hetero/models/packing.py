"""Packing float tensors into page-aligned weights, a few rows at a time.

The rows of a packed weight may come from several tensors (q, k and v). Packing a piece needs about
ten times the piece's bytes for a moment, so pieces are small.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.memory import HostBuffer
from hetero.backends.ops import StorageFormat
from hetero.backends.weights import (
    ROW_BLOCK,
    PackedWeight,
    data_dtype,
    data_shape,
    pack,
    scales_shape,
)
from hetero.errors import ModelError
from hetero.models.layout import has_scales

PIECE_ELEMENTS = 1 << 16  # stays in a core's cache
_BATCH_PIECES = 128
_MAX_THREADS = 4  # each holds the memory of one piece

# Largest magnitude whose scale (or value) is still a finite fp16 number.
_LIMITS = {"q4": 65504.0 * 8, "q8": 65504.0 * 127, "f16": 65504.0, "f32": math.inf}


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """A named [rows, k] tensor in a file, of any floating-point type."""

    name: str
    values: npt.NDArray[Any]


def empty_packed(storage: StorageFormat, n: int, k: int) -> PackedWeight:
    """A zero-filled weight in page-aligned memory (q4: its scales are zero), to be filled once."""
    data = _pages(data_dtype(storage), data_shape(storage, n, k))
    scales = _pages(np.dtype(np.float16), scales_shape(n, k)) if has_scales(storage) else None
    return PackedWeight(storage, n, k, data, scales)


def pack_rows(
    sources: Sequence[SourceTensor],
    storage: StorageFormat,
    after_batch: Callable[[], None] = lambda: None,
) -> PackedWeight:
    """Pack the rows of `sources`, one tensor after the other, on all cores.

    `after_batch` is called now and then, so that pages of a mapped source can be given back.
    Raises `ModelError` for a value that is not finite or beyond the storage format's range.
    """
    k = sources[0].values.shape[1]
    n = sum(source.values.shape[0] for source in sources)
    packed = empty_packed(storage, n, k)
    step = max(ROW_BLOCK, PIECE_ELEMENTS // k // ROW_BLOCK * ROW_BLOCK)

    def pack_piece(start: int) -> None:
        piece = pack(_gather(sources, start, min(start + step, n), storage), storage)
        first, last = start // ROW_BLOCK, start // ROW_BLOCK + piece.data.shape[0]
        packed.data[first:last] = piece.data
        if packed.scales is not None:
            packed.scales[first:last] = piece.scales

    starts = range(0, n, step)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1, _MAX_THREADS)) as pool:
        for batch in range(0, len(starts), _BATCH_PIECES):
            list(pool.map(pack_piece, starts[batch : batch + _BATCH_PIECES]))
            after_batch()
    return packed


def check_finite(name: str, values: npt.NDArray[np.float32], limit: float = math.inf) -> None:
    """Raise `ModelError` unless every value is finite and at most `limit` in magnitude."""
    largest = max(float(values.max()), -float(values.min()))
    if not math.isfinite(largest):
        raise ModelError(
            f"tensor {name} holds a value that is not finite; download the model again"
        )
    if largest > limit:
        raise ModelError(
            f"tensor {name} holds the magnitude {largest:.6g}, beyond what this weight format "
            f"stores ({limit:.6g}); load it with --weights f32"
        )


def _gather(
    sources: Sequence[SourceTensor], start: int, stop: int, storage: StorageFormat
) -> npt.NDArray[np.float32]:
    """Rows [start, stop) of the concatenation as float32, checked."""
    pieces, offset = [], 0
    for source in sources:
        rows = source.values.shape[0]
        low, high = max(start - offset, 0), min(stop - offset, rows)
        if low < high:
            piece = source.values[low:high].astype(np.float32)
            check_finite(source.name, piece, _LIMITS[storage.value])
            pieces.append(piece)
        offset += rows
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _pages(dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return HostBuffer(nbytes).array(dtype, shape)
