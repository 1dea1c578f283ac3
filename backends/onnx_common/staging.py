"""Weights for ONNX Runtime, from the packed layout of `hetero.backends.weights`.

MatMulNBits takes the codes of a row one after the other, [n, k/32, 16] bytes for 4-bit weights: the
words of the packed layout already hold neighbouring features, so only words are transposed. The
copy is made in slabs of rows into pages of its own, and the pages are given back once ONNX Runtime
has made its own pack of them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import GROUP_SIZE, StorageFormat
from hetero.backends.host import hugepages
from hetero.backends.memory import LINUX, private_pages
from hetero.backends.weights import ROW_BLOCK, PackedWeight, padded

SLAB_BYTES = 1 << 22


class Staging:
    """An array in pages of its own, [rows rounded up to 16, …] of which `array` is the first n."""

    def __init__(self, n: int, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        rows = padded(n, ROW_BLOCK)
        shape = (rows, *row_shape)
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * np.dtype(dtype).itemsize
        self._memory = private_pages(nbytes)
        hugepages.advise(self._memory, nbytes)
        self.padded: npt.NDArray[Any] = np.frombuffer(self._memory, dtype, count).reshape(shape)
        self.array = self.padded[:n]
        self.nbytes = self.padded.nbytes

    def release(self) -> None:
        """Give the pages back to the system (Linux); they read as zeros, addresses stay valid."""
        if LINUX:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self.nbytes = 0


def stage(weight: PackedWeight) -> dict[str, Staging]:
    """Return arrays for the initializers `weight` and `scales` (quantised) of `graphs.matmul`."""
    if not weight.storage.quantised:
        return {"weight": _stage_float(weight)}
    assert weight.scales is not None
    groups = padded(weight.k, GROUP_SIZE) // GROUP_SIZE
    scales = Staging(weight.n, (groups,), np.float32)
    by_row = scales.padded.reshape(-1, ROW_BLOCK, groups)
    for part in slabs(weight):
        by_row[part] = weight.scales[part].transpose(0, 2, 1)
    codes = _stage_q4(weight) if weight.storage is StorageFormat.Q4 else _stage_q8(weight)
    return {"weight": codes, "scales": scales}


def _stage_q4(weight: PackedWeight) -> Staging:
    groups = weight.data.shape[1]
    staging = Staging(weight.n, (groups, 16), np.uint8)
    words = staging.padded.view(np.uint32).reshape(-1, ROW_BLOCK, groups, 4)
    for part in slabs(weight):
        words[part] = weight.data[part].transpose(0, 3, 1, 2)
    return staging


def _stage_q8(weight: PackedWeight) -> Staging:
    """Return 8-bit codes as ONNX Runtime has them: unsigned with zero at 128."""
    groups = weight.data.shape[1]
    staging = Staging(weight.n, (groups, GROUP_SIZE), np.uint8)
    codes = staging.padded.reshape(-1, ROW_BLOCK, groups, 8, 4)
    for part in slabs(weight):
        codes[part] = weight.data[part].transpose(0, 3, 1, 2, 4).view(np.uint8) ^ np.uint8(0x80)
    return staging


def stage_by_feature(weight: PackedWeight, codes: npt.DTypeLike) -> dict[str, Staging]:
    """Return the initializers `weight` [k, n] and `scales` [n] of `static_matmul`.

    It is in `graphs`.
    """
    assert weight.scales is not None
    staging, scales = Staging(weight.k, (weight.n,), codes), Staging(weight.n, (), np.float32)
    scales.padded[:] = weight.scales.reshape(-1)
    zero = np.uint8(0x80 if staging.padded.dtype == np.uint8 else 0)
    columns = staging.array.view(np.uint8)
    for part in slabs(weight):
        by_feature = weight.data[part].transpose(1, 2, 4, 0, 3).view(np.uint8)
        flat = by_feature.reshape(-1, by_feature.shape[3] * ROW_BLOCK)
        start = part.start * ROW_BLOCK
        count = min(flat.shape[1], weight.n - start)
        np.bitwise_xor(flat[: weight.k, :count], zero, out=columns[:, start : start + count])
    return {"weight": staging, "scales": scales}


def _stage_float(weight: PackedWeight) -> Staging:
    staging = Staging(weight.n, (weight.k,), np.float32)
    rows = staging.padded.reshape(-1, ROW_BLOCK, weight.k)
    for part in slabs(weight):
        rows[part] = weight.data[part].transpose(0, 2, 1)
    return staging


def slabs(weight: PackedWeight) -> Iterator[slice]:
    """Yield the ranges of 16-row blocks, a few megabytes each."""
    blocks = weight.data.shape[0]
    step = max(1, SLAB_BYTES * blocks // max(weight.data.nbytes, 1))
    for start in range(0, blocks, step):
        yield slice(start, min(start + step, blocks))
