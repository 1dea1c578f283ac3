"""Weights as stored in memory: packed for the GPU, sliced into segments of rows.

The packed layout is the GPU's: files of `hetero quantize` have these bytes, so that the GPU maps
them. The NPU's backend makes its own packed copy of the rows that it computes.

Layout, with rows in blocks of R = 16 (lane = row, so that one vector or 16 neighbouring work-items
read 16 rows at once), K = k rounded up to 32, N = n rounded up to 16, G = 32:

    q4   data   uint32  [N/16, K/32, 4, 16]   nibble i of word w is feature 32·g + 8·w + i, value
                                              nibble - 8
         scales float16 [N/16, K/32, 16]
    q8   data   int8    [N/16, K/32, 8, 16, 4]  feature 32·g + 4·w + i
         scales float16 [N/16, K/32, 16]
    q8r  data   int8    [N/16, K/32, 8, 16, 4]  as q8
         scales float32 [N/16, 16]
    f16  data   float16 [N/16, k, 16]         no scales, k not padded
    f32  data   float32 [N/16, k, 16]         no scales, k not padded

The blocks of GGUF files (`q4_1` to `q6_k`) are laid out in `hetero.backends.blocks`. A `mixed`
weight has no data of its own, but `parts`: weights of some of its rows, one after the other, whose
first rows are multiples of 16.

Padded rows and features are zero (q4: nibble 8 or scale 0).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends import blocks
from hetero.backends.formats import GROUP_SIZE, ROWS_OF_BLOCK, StorageFormat

ROW_BLOCK = ROWS_OF_BLOCK

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight of n rows and k features in the packed layout of this module.

    `data` and `scales` may be views of a memory-mapped file; they are never written.
    """

    storage: StorageFormat
    n: int
    k: int
    data: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None = None
    parts: tuple[PackedWeight, ...] = ()

    def __post_init__(self) -> None:
        if self.storage is StorageFormat.MIXED:
            _check_parts(self)
            return
        expected = data_shape(self.storage, self.n, self.k)
        if self.data.shape != expected:
            raise ValueError(
                f"{self.storage} data of a {self.n}×{self.k} weight has shape {expected}, "
                f"got {self.data.shape}"
            )
        if (self.scales is not None) != self.storage.quantised:
            raise ValueError(f"{self.storage} weights have scales exactly if they are quantised")
        if self.scales is not None:
            wanted = scales_shape(self.storage, self.n, self.k), scales_dtype(self.storage)
            if (self.scales.shape, self.scales.dtype) != wanted:
                raise ValueError(
                    f"{self.storage} scales of a {self.n}×{self.k} weight are {wanted[1]} of shape "
                    f"{wanted[0]}, got {self.scales.dtype} of shape {self.scales.shape}"
                )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the packed weight, padding included."""
        if self.parts:
            return sum(part.nbytes for part in self.parts)
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Return the segment of rows [start, stop): a view. `start` is a multiple of 16."""
        if start % ROW_BLOCK or not 0 <= start < stop <= self.n:
            raise ValueError(
                f"a segment of {self.n} rows starts at a multiple of {ROW_BLOCK}, "
                f"got [{start}, {stop})"
            )
        if self.parts:
            return stacked(list(self._parts_of(start, stop)))
        first, last = start // ROW_BLOCK, -(-stop // ROW_BLOCK)
        scales = None if self.scales is None else self.scales[first:last]
        return PackedWeight(self.storage, stop - start, self.k, self.data[first:last], scales)

    def dequantize(self) -> Float32Array:
        """Return the weight as float32 [n, k]: the numbers that every kernel must compute with."""
        if self.parts:
            return np.concatenate([part.dequantize() for part in self.parts])
        count = self.data.shape[0]
        if not self.storage.quantised:
            full = self.data.transpose(0, 2, 1).reshape(count * ROW_BLOCK, self.k)
            return np.ascontiguousarray(full[: self.n], dtype=np.float32)
        assert self.scales is not None
        if self.storage.scales == "block":
            values = blocks.values_of(self.storage.blocks, self.unpacked_parts())
            return np.ascontiguousarray(values.reshape(len(values), -1)[: self.n, : self.k])
        scales = self.scales.astype(np.float32)
        by_group = scales[:, None] if self.storage.scales == "row" else scales
        scaled = self._values() * by_group.transpose(0, 2, 1)[..., None]
        full = scaled.reshape(count * ROW_BLOCK, -1)
        return np.ascontiguousarray(full[: self.n, : self.k])

    def unpacked_parts(self) -> blocks.BlockParts:
        """Return codes and scales of a weight in blocks, rows and features padded."""
        assert self.scales is not None
        return blocks.unpacked_parts(self.storage.blocks, self.data, self.scales)

    def spans(self) -> Iterator[tuple[int, PackedWeight]]:
        """Yield (first row, weight) of the parts; a weight that is not mixed is its only one."""
        first = 0
        for part in self.parts or (self,):
            yield first, part
            first += part.n

    def _parts_of(self, start: int, stop: int) -> Iterator[PackedWeight]:
        for first, part in self.spans():
            low, high = max(start - first, 0), min(stop - first, part.n)
            if low < high:
                yield part.rows(low, high)

    def codes(self) -> npt.NDArray[np.int8]:
        """Return the codes of a q4, q8 or q8r weight as int8 [n, k]; q4: -8…7."""
        full = self._values().reshape(self.data.shape[0] * ROW_BLOCK, -1)
        return np.ascontiguousarray(full[: self.n, : self.k], dtype=np.int8)

    def _values(self) -> Float32Array:
        """Return codes as [N/16, 16, K/32, 32]."""
        return _q4_values(self.data) if self.storage is StorageFormat.Q4 else _q8_values(self.data)


def padded(value: int, multiple: int) -> int:
    """Return `value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def data_shape(storage: StorageFormat, n: int, k: int) -> tuple[int, ...]:
    """Return the shape of `PackedWeight.data`."""
    count, groups = padded(n, ROW_BLOCK) // ROW_BLOCK, padded(k, GROUP_SIZE) // GROUP_SIZE
    if storage.scales == "block":
        return (count, groups, storage.blocks.words, ROW_BLOCK)
    if storage is StorageFormat.Q4:
        return (count, groups, 4, ROW_BLOCK)
    if storage.quantised:
        return (count, groups, 8, ROW_BLOCK, 4)
    return (count, k, ROW_BLOCK)


def data_dtype(storage: StorageFormat) -> np.dtype[Any]:
    """Return the element type of `PackedWeight.data`."""
    if storage.scales == "block":
        return np.dtype(np.uint32)
    kinds = {"q4": np.uint32, "q8": np.int8, "q8r": np.int8, "f16": np.float16, "f32": np.float32}
    return np.dtype(kinds[storage.value])


def scales_shape(storage: StorageFormat, n: int, k: int) -> tuple[int, ...]:
    """Return the shape of `PackedWeight.scales` of a quantised weight."""
    count, groups = padded(n, ROW_BLOCK) // ROW_BLOCK, padded(k, GROUP_SIZE) // GROUP_SIZE
    if storage.scales == "row":
        return (count, ROW_BLOCK)
    if storage.scales == "block":
        of = storage.blocks
        return (count, blocks.block_count(of, groups), of.scale_bytes)
    return (count, groups, ROW_BLOCK)


def scales_dtype(storage: StorageFormat) -> np.dtype[Any]:
    """Return the element type of `PackedWeight.scales` of a quantised weight."""
    kinds = {"row": np.float32, "block": np.uint8}
    return np.dtype(kinds.get(storage.scales, np.float16))


def packed_bytes(storage: StorageFormat, n: int, k: int) -> int:
    """Return `PackedWeight.nbytes` of an n × k weight; of a mixed one, what it usually comes to."""
    if storage is StorageFormat.MIXED:
        padded_size = padded(n, ROW_BLOCK) * padded(k, GROUP_SIZE)
        return math.ceil(storage.bytes_per_weight * padded_size)
    size = math.prod(data_shape(storage, n, k)) * data_dtype(storage).itemsize
    if not storage.quantised:
        return size
    return size + math.prod(scales_shape(storage, n, k)) * scales_dtype(storage).itemsize


def pack(weight: npt.NDArray[Any], storage: StorageFormat) -> PackedWeight:
    """Quantise or convert a [n, k] weight and lay it out. Non-finite values are refused.

    q4 is llama.cpp's Q4_0: the scale is fp16(v / -8) with v the group's value of largest magnitude,
    signed. q8 is its Q8_0: fp16(max |w| / 127). q8r: fp32(max |w| / 127) of the row. Blocks cover
    the range of each group (`blocks.rounded`). Mixed: every 16 rows of another storage than those
    before them, for tests.
    """
    n, k = weight.shape
    values = np.asarray(weight, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"a weight of shape {weight.shape} holds values that are not finite")
    if storage is StorageFormat.MIXED:
        return _pack_mixed(weight)
    if not storage.quantised:
        return PackedWeight(storage, n, k, _interleave(values.astype(data_dtype(storage))))
    full = np.zeros((padded(n, ROW_BLOCK), padded(k, GROUP_SIZE)), dtype=np.float32)
    full[:n, :k] = values
    grouped = full.reshape(full.shape[0], -1, GROUP_SIZE)
    if storage is StorageFormat.Q4:
        codes, scales = _quantize_q4(grouped)
        return pack_q4(codes, scales, n, k)
    if storage.scales == "block":
        return pack_blocks(blocks.rounded(storage.blocks, grouped), storage, n, k)
    if storage is StorageFormat.Q8R:
        return pack_q8r(*_quantize_rows(full), n, k)
    codes8, scales = _quantize_q8(grouped)
    return pack_q8(codes8, scales, n, k)


def pack_q4(
    codes: npt.NDArray[Any],
    scales: npt.NDArray[np.float16],
    n: int,
    k: int,
) -> PackedWeight:
    """Lay out 4-bit codes [N, K/32, 32] or their words [N, K/32, 4], and scales [N, K/32].

    A code is 0…15, its value code - 8.
    """
    words = codes if codes.dtype == np.uint32 else blocks.nibble_words(codes)
    return PackedWeight(StorageFormat.Q4, n, k, blocks.by_lane(words), _interleave_scales(scales))


def pack_q8(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float16], n: int, k: int
) -> PackedWeight:
    """Lay out 8-bit codes [N, K/32, 32] and scales [N, K/32]."""
    return PackedWeight(
        StorageFormat.Q8, n, k, _interleave_codes(codes), _interleave_scales(scales)
    )


def pack_q8r(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], n: int, k: int
) -> PackedWeight:
    """Lay out 8-bit codes [N, K] and scales [N] of rows; N and K are n and k padded."""
    by_group = codes.reshape(codes.shape[0], -1, GROUP_SIZE)
    by_block = np.ascontiguousarray(scales.reshape(-1, ROW_BLOCK))
    return PackedWeight(StorageFormat.Q8R, n, k, _interleave_codes(by_group), by_block)


def pack_blocks(parts: blocks.BlockParts, storage: StorageFormat, n: int, k: int) -> PackedWeight:
    """Lay out codes and scales of rows up to a multiple of 16."""
    return PackedWeight(storage, n, k, *blocks.interleaved(storage.blocks, parts))


def stacked(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Return a mixed weight of the rows of `parts`; all but the last have a multiple of 16 rows."""
    n = sum(part.n for part in parts)
    return PackedWeight(
        StorageFormat.MIXED, n, parts[0].k, np.empty(0, np.uint8), None, tuple(parts)
    )


PART_STORAGES = (
    *blocks.BLOCK_STORAGES,
    StorageFormat.Q4,
    StorageFormat.Q8,
    StorageFormat.F16,
    StorageFormat.F32,
)


def _pack_mixed(weight: npt.NDArray[Any]) -> PackedWeight:
    n, k = weight.shape
    kinds = itertools.islice(itertools.cycle(PART_STORAGES), (n // ROW_BLOCK + k) % 10, None)
    starts = range(0, n, ROW_BLOCK)
    return stacked(
        [pack(weight[x : x + ROW_BLOCK], kind) for x, kind in zip(starts, kinds, strict=False)]
    )


def _check_parts(weight: PackedWeight) -> None:
    ends = list(itertools.accumulate(part.n for part in weight.parts))
    whole = bool(ends) and ends[-1] == weight.n and not any(x % ROW_BLOCK for x in ends[:-1])
    kinds = {part.storage for part in weight.parts}
    if not whole or {x.k for x in weight.parts} != {weight.k} or not kinds <= set(PART_STORAGES):
        raise ValueError(
            f"the parts of a mixed {weight.n}×{weight.k} weight have all its rows, from multiples "
            f"of {ROW_BLOCK} on, in storages of {', '.join(PART_STORAGES)}; got "
            f"{[(x.storage.value, x.n, x.k) for x in weight.parts]}"
        )


def _interleave_codes(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    groups = codes.shape[1]
    blocks = codes.reshape(-1, ROW_BLOCK, groups, 8, 4).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(blocks)


def _interleave(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    n, k = values.shape
    full = np.zeros((padded(n, ROW_BLOCK), k), dtype=values.dtype)
    full[:n] = values
    return np.ascontiguousarray(full.reshape(-1, ROW_BLOCK, k).transpose(0, 2, 1))


def _interleave_scales(scales: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    groups = scales.shape[1]
    return np.ascontiguousarray(scales.reshape(-1, ROW_BLOCK, groups).transpose(0, 2, 1))


def _quantize_q4(
    grouped: Float32Array,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    at = np.abs(grouped).argmax(axis=-1, keepdims=True)
    scales = (np.take_along_axis(grouped, at, axis=-1)[..., 0] / -8.0).astype(np.float16)
    inverse = _inverse(scales)
    codes = np.floor(grouped * inverse[..., None] + 8.5).clip(0, 15)
    return codes.astype(np.uint8), scales


def _quantize_q8(
    grouped: Float32Array,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    scales = (np.abs(grouped).max(axis=-1) / 127.0).astype(np.float16)
    codes = np.rint(grouped * _inverse(scales)[..., None]).clip(-127, 127)
    return codes.astype(np.int8), scales


def _quantize_rows(
    full: Float32Array,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    scales = np.abs(full).max(axis=-1) / np.float32(127.0)
    scales[scales < np.finfo(np.float32).tiny] = 0  # float32 does not hold their reciprocals
    codes = np.rint(full * _inverse(scales)[:, None]).clip(-127, 127)
    return codes.astype(np.int8), scales


def _inverse(scales: npt.NDArray[Any]) -> Float32Array:
    wide = scales.astype(np.float32)
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0)


def _q4_values(data: npt.NDArray[Any]) -> Float32Array:
    """Return [N/16, K/32, 4, 16] words to [N/16, 16, K/32, 32] values."""
    nibbles = (data[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    values = nibbles.transpose(0, 3, 1, 2, 4).astype(np.float32) - 8.0
    blocks, _, groups = values.shape[:3]
    return np.ascontiguousarray(values).reshape(blocks, ROW_BLOCK, groups, GROUP_SIZE)


def _q8_values(data: npt.NDArray[Any]) -> Float32Array:
    values = data.transpose(0, 3, 1, 2, 4).astype(np.float32)
    blocks, _, groups = values.shape[:3]
    return np.ascontiguousarray(values).reshape(blocks, ROW_BLOCK, groups, GROUP_SIZE)
