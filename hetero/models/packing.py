"""Packing float tensors into page-aligned weights, a few rows at a time.

The rows of a packed weight may come from several tensors (q, k and v). Packing a slice of rows
needs about ten times its bytes for a moment, so chunks are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.blocks import BlockParts
from hetero.backends.formats import StorageFormat
from hetero.backends.host.affinity import core_count
from hetero.backends.memory import Arena
from hetero.backends.weights import (
    ROW_BLOCK,
    PackedWeight,
    data_dtype,
    data_shape,
    pack,
    pack_blocks,
    pack_q4,
    pack_q8,
    scales_dtype,
    scales_shape,
)
from hetero.errors import ModelError

# What a thread takes at once: larger pieces leave a core's cache, smaller ones are more Python
# than arithmetic, which threads do one after the other. Codes are mostly copied.
CHUNK_ELEMENTS = 1 << 17
CODED_ELEMENTS = 1 << 20
_BATCH_ELEMENTS = 1 << 24  # between two calls of `after_batch`
_LARGEST_FREED = 31 << 20  # bytes
_MAX_THREADS = 4  # each holds the memory of one piece
_ARENA = Arena()

# Largest magnitude whose scale (or value) is still a finite fp16 number.
_LIMITS = {"q4": 65504.0 * 8, "q8": 65504.0 * 127, "q8r": math.inf, "f16": 65504.0, "f32": math.inf}


Codes: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[np.float16]] | BlockParts
Watch: TypeAlias = Callable[[npt.NDArray[np.float32], npt.NDArray[np.float32]], None]


class RowSource(Protocol):
    """A named tensor of `shape` (rows, k) in a file.

    `rows` gives rows [start, stop) as float32; `codes` gives them as codes and scales of a storage
    format, None where they are not stored as that. `watch`, if any, is called now and then with
    values that were read and what is stored for them.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def watch(self) -> Watch | None: ...
    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]: ...
    def codes(self, start: int, stop: int, storage: StorageFormat) -> Codes | None: ...


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """A `RowSource` of any floating-point type.

    `order` lists its rows in the order of the packed weight, `columns` its columns, if the file has
    another.
    """

    name: str
    values: npt.NDArray[Any]
    order: npt.NDArray[np.int64] | None = None
    columns: npt.NDArray[np.int64] | None = None
    watch: Watch | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the rows and features."""
        return self.values.shape[0], self.values.shape[1]

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows [start, stop) in order, as float32."""
        chosen = slice(start, stop) if self.order is None else self.order[start:stop]
        values: npt.NDArray[np.float32] = self.values[chosen].astype(np.float32)
        return values if self.columns is None else values[:, self.columns]

    def codes(self, start: int, stop: int, storage: StorageFormat) -> Codes | None:  # noqa: ARG002
        """Return None: floats have no codes."""
        return None


class Destination(Protocol):
    """The place of a packed weight, which is filled a few blocks of rows at a time by any thread.

    `put` writes blocks from number `first` on, and may raise `OSError`; `packed` is the whole
    weight, once all blocks are there.
    """

    def put(self, first: int, chunk: PackedWeight) -> None: ...
    def packed(self) -> PackedWeight: ...


class _Memory:
    """A destination in memory of this process."""

    def __init__(self, storage: StorageFormat, n: int, k: int) -> None:
        self._whole = empty_packed(storage, n, k)

    def put(self, first: int, chunk: PackedWeight) -> None:
        last = first + chunk.data.shape[0]
        self._whole.data[first:last] = chunk.data
        if self._whole.scales is not None:
            self._whole.scales[first:last] = chunk.scales

    def packed(self) -> PackedWeight:
        return self._whole


def empty_packed(storage: StorageFormat, n: int, k: int) -> PackedWeight:
    """Return a zero-filled weight in page-aligned memory, to be filled once.

    The scales of q4 are zero.
    """
    data = _pages(data_dtype(storage), data_shape(storage, n, k))
    scales = None
    if storage.quantised:
        scales = _pages(scales_dtype(storage), scales_shape(storage, n, k))
    return PackedWeight(storage, n, k, data, scales)


def pack_rows(
    sources: Sequence[RowSource],
    storage: StorageFormat,
    after_batch: Callable[[], None] = lambda: None,
    destination: Destination | None = None,
) -> PackedWeight:
    """Pack the rows of `sources`, one tensor after the other, on all cores.

    `after_batch` is called now and then, so that pages of a mapped source can be dropped. Without a
    `destination` the weight is in memory of this process. Raises `ModelError` for a value that is
    not finite or beyond the storage format's range, and `OSError` where the destination does.
    """
    _keep_freed_memory()
    k = sources[0].shape[1]
    n = sum(source.shape[0] for source in sources)
    destination = destination or _Memory(storage, n, k)
    coded = all(source.codes(0, 1, storage) is not None for source in sources)
    elements = CODED_ELEMENTS if coded else CHUNK_ELEMENTS
    step = max(ROW_BLOCK, elements // k // ROW_BLOCK * ROW_BLOCK)

    def pack_chunk(start: int) -> None:
        chunk = _pack_chunk(_parts(sources, start, min(start + step, n)), k, storage)
        destination.put(start // ROW_BLOCK, chunk)

    starts = range(0, n, step)
    chunks = max(_BATCH_ELEMENTS // (step * k), 1)
    with ThreadPoolExecutor(min(len(starts), core_count(), _MAX_THREADS)) as pool:
        for batch in range(0, len(starts), chunks):
            list(pool.map(pack_chunk, starts[batch : batch + chunks]))
            after_batch()
    return destination.packed()


@cache
def _keep_freed_memory() -> None:
    """Let the C library reuse freed chunks.

    glibc returns what exceeds twice the largest freed block to the system, and new pages are
    cleared.
    """
    np.empty(_LARGEST_FREED, np.uint8)  # never touched, so it is no memory


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


def _parts(sources: Sequence[RowSource], start: int, stop: int) -> list[tuple[RowSource, int, int]]:
    """Return the sources, and their rows, of rows [start, stop) of the concatenation."""
    parts, offset = [], 0
    for source in sources:
        rows = source.shape[0]
        low, high = max(start - offset, 0), min(stop - offset, rows)
        if low < high:
            parts.append((source, low, high))
        offset += rows
    return parts


def _pack_chunk(
    parts: Sequence[tuple[RowSource, int, int]], k: int, storage: StorageFormat
) -> PackedWeight:
    coded = [source.codes(low, high, storage) for source, low, high in parts]
    if all(codes is not None for codes in coded):
        return _pack_codes([codes for codes in coded if codes is not None], k, storage)
    chunks = []
    for source, low, high in parts:
        chunk = source.rows(low, high)
        check_finite(source.name, chunk, _LIMITS[storage.value])
        chunks.append(chunk)
    packed = pack(chunks[0] if len(chunks) == 1 else np.concatenate(chunks), storage)
    if any(source.watch for source, *_ in parts):
        _notify(parts, chunks, packed)
    return packed


def _pack_codes(coded: Sequence[Codes], k: int, storage: StorageFormat) -> PackedWeight:
    """Lay out codes unchanged, with rows up to a whole block."""
    if storage.scales == "block":
        return _pack_blocks([x for x in coded if isinstance(x, BlockParts)], k, storage)
    codes, scales = (_joined(arrays) for arrays in zip(*coded, strict=True))
    n = len(codes)
    missing = -n % ROW_BLOCK
    if missing:
        empty = 0x88888888 if storage is StorageFormat.Q4 else 0  # words of the code 8
        codes = np.pad(codes, ((0, missing), (0, 0), (0, 0)), constant_values=empty)
        scales = np.pad(scales, ((0, missing), (0, 0)))
    return (pack_q4 if storage is StorageFormat.Q4 else pack_q8)(codes, scales, n, k)


def _pack_blocks(coded: Sequence[BlockParts], k: int, storage: StorageFormat) -> PackedWeight:
    n = sum(len(parts.codes) for parts in coded)

    def whole(arrays: Sequence[npt.NDArray[Any] | None]) -> Any:
        present = [array for array in arrays if array is not None]
        if not present:
            return None
        joined = _joined(present)
        missing = -n % ROW_BLOCK
        if not missing:
            return joined
        return np.pad(joined, ((0, missing), *((0, 0),) * (joined.ndim - 1)))

    parts = BlockParts(*(whole(arrays) for arrays in zip(*coded, strict=True)))
    return pack_blocks(parts, storage, n, k)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _notify(
    parts: Sequence[tuple[RowSource, int, int]],
    chunks: Sequence[npt.NDArray[np.float32]],
    packed: PackedWeight,
) -> None:
    """Call the `watch` of sources that have one with what is stored."""
    stored, row = packed.dequantize(), 0
    for (source, *_), chunk in zip(parts, chunks, strict=True):
        if source.watch is not None:
            source.watch(chunk, stored[row : row + len(chunk)])
        row += len(chunk)


def _pages(dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return _ARENA.take(nbytes).view(dtype).reshape(shape)
