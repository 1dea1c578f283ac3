"""Weights in blocks: integer codes from 0 on and scales of two levels (`hetero.backends.formats`).

They hold the block types of GGUF (ggml's `ggml-common.h`) bit by bit: nothing is rounded. Layout,
with rows in blocks of 16 (lane = row), K = k rounded up to 32, N = n rounded up to 16, S the number
of blocks of a row, the last of which may be cut:

    data    uint32 [N/16, K/32, 4 or 6, 16]   words 0 to 3: nibble i of word w is the low half of
                                              the code of feature 32·g + 8·w + i
                                              words 4 and 5 (6 bits), h = 0, 1: of each byte b bits
                                              0-1, 2-3, 4-5, 6-7 are the upper bits of the features
                                              16·h + 2·b + 0, 1, 8, 9 of the group
    scales  uint8  [N/16, S, bytes]           d float16 [16], e float16 [16] (with a minimum),
                                              s int8 [groups · halves, 16], t int8 [groups, 16]
                                              (with a minimum)

What is padded has d = e = s = t = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import E2M1, GROUP_SIZE, ROWS_OF_BLOCK, Blocks, StorageFormat

BLOCK_STORAGES: Final = tuple(x for x in StorageFormat if x.scales == "block")

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Small = npt.NDArray[np.int8]
Words = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]


class BlockParts(NamedTuple):
    """Rows of a weight in their parts.

    `codes` [rows, G, 32] (G groups), or the words of these codes [rows, G, words] where they are
    stored so that this is faster; `d` [rows, S], `s` [rows, G · halves]; with a minimum `e` [rows,
    S] and `t` [rows, G], else None.
    """

    codes: Bytes | Words
    d: Halves
    s: Small
    e: Halves | None = None
    t: Small | None = None


def block_count(blocks: Blocks, groups: int) -> int:
    """Return S, the number of blocks of a row of so many groups."""
    return -(-groups // blocks.groups)


def interleaved(blocks: Blocks, parts: BlockParts) -> tuple[npt.NDArray[np.uint32], Bytes]:
    """Return `data` and `scales` of rows whose number is a multiple of 16."""
    codes = np.ascontiguousarray(parts.codes)
    return _interleaved_codes(blocks, codes), _interleaved_scales(blocks, parts)


def unpacked_parts(blocks: Blocks, data: npt.NDArray[Any], scales: npt.NDArray[Any]) -> BlockParts:
    """Return the reverse of `interleaved`."""
    count, groups = data.shape[:2]
    rows = count * ROWS_OF_BLOCK
    words = np.ascontiguousarray(data[:, :, :4].transpose(0, 3, 1, 2)).view(np.uint8)
    codes = np.empty((rows, groups, GROUP_SIZE // 2, 2), np.uint8)
    low = words.reshape(rows, groups, GROUP_SIZE // 2)
    codes[..., 0], codes[..., 1] = low & 15, low >> 4
    if blocks.bits > 4:
        upper = np.ascontiguousarray(data[:, :, 4:].transpose(0, 3, 1, 2)).view(np.uint8)
        upper = upper.reshape(rows, groups, 2, 1, 4, 1)
        shifts = np.array([[0, 2], [4, 6]], np.uint8).reshape(1, 1, 1, 2, 1, 2)
        codes |= ((upper >> shifts & 3) << 4).reshape(codes.shape)
    return BlockParts(codes.reshape(rows, groups, GROUP_SIZE), *_scales_of(blocks, scales, groups))


def values_of(blocks: Blocks, parts: BlockParts) -> Float32Array:
    """Return the weights as float32 [rows, G, 32]; d · s and e · t are exact in it."""
    groups = parts.codes.shape[1]
    scale = _of_groups(blocks, parts.d, groups)[..., None] * parts.s.astype(np.float32).reshape(
        len(parts.s), groups, blocks.halves
    )
    codes = integers(blocks, parts.codes).astype(np.float32) - np.float32(blocks.zero)
    values = codes * np.repeat(scale, GROUP_SIZE // blocks.halves, axis=-1)
    if parts.e is not None and parts.t is not None:
        values -= (_of_groups(blocks, parts.e, groups) * parts.t.astype(np.float32))[..., None]
    return np.asarray(values, np.float32)


def integers(blocks: Blocks, codes: Bytes | Words) -> Bytes | Words:
    """Return the integers that are scaled: codes, or what stands in their place."""
    return np.array(E2M1, np.uint8)[codes] if blocks.e2m1 else codes


def group_scales(blocks: Blocks, parts: BlockParts) -> tuple[Float32Array, Float32Array | None]:
    """Return d · s as [rows, G · halves] and e · t as [rows, G]: one level of scales."""
    groups = parts.codes.shape[1]
    by_half = np.repeat(_of_groups(blocks, parts.d, groups), blocks.halves, axis=1)
    scale = by_half * parts.s.astype(np.float32)
    if parts.e is None or parts.t is None:
        return scale, None
    return scale, _of_groups(blocks, parts.e, groups) * parts.t.astype(np.float32)


def rounded(blocks: Blocks, values: Float32Array) -> BlockParts:
    """Quantise [rows, G, 32] values, each group (or half) by its range.

    What random weights and tests need; files bring better codes.
    """
    rows, groups = values.shape[:2]
    count, span = block_count(blocks, groups), GROUP_SIZE // blocks.halves
    most = blocks.largest
    parts = values.reshape(rows, -1, span)
    low = parts.min(axis=-1).clip(max=0)
    if blocks.minimum:
        step = (parts.max(axis=-1).clip(min=0) - low) / most
    else:
        step = np.abs(parts).max(axis=-1) / (most - blocks.zero)
    d, s = _two_levels(step, count, blocks.groups * blocks.halves)
    scale = np.repeat(d.astype(np.float32), blocks.groups * blocks.halves, axis=1)[:, : s.shape[1]]
    scale = scale * s
    e = t = None
    shift = np.float32(blocks.zero)
    if blocks.minimum:
        e, t = _two_levels(-low, count, blocks.groups)
        parts = parts + (_of_groups(blocks, e, groups) * t.astype(np.float32))[..., None]
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    wanted = parts * inverse[..., None] + shift
    if blocks.e2m1:
        codes = np.abs(wanted[..., None] - np.array(E2M1, np.float32)).argmin(axis=-1)
    else:
        codes = np.rint(wanted).clip(0, most)
    codes = codes.astype(np.uint8)
    return BlockParts(codes.reshape(values.shape), d, s, e, t)


def _two_levels(wanted: Float32Array, count: int, inside: int) -> tuple[Halves, Small]:
    """Return fp16 [rows, S] and int8 0…63 [rows, S · inside cut], whose products are near `wanted`.

    One factor of a block of one group is 1.
    """
    rows, width = wanted.shape
    full = np.zeros((rows, count * inside), np.float32)
    full[:, :width] = wanted
    blocks = full.reshape(rows, count, inside)
    most = 63 if inside > 1 else 1
    d = (blocks.max(axis=-1) / most).astype(np.float16)
    wide = d.astype(np.float32)[..., None]
    s = np.rint(np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide != 0)).clip(0, most)
    return d, s.reshape(rows, -1)[:, :width].astype(np.int8)


def _of_groups(blocks: Blocks, floats: Halves, groups: int) -> Float32Array:
    return np.repeat(floats.astype(np.float32), blocks.groups, axis=1)[:, :groups]


def _interleaved_codes(blocks: Blocks, codes: npt.NDArray[Any]) -> Words:
    rows, groups, _ = codes.shape
    if codes.dtype == np.uint32:
        return by_lane(codes)
    words = np.empty((rows, groups, blocks.words), np.uint32)
    words[..., :4] = nibble_words(codes)
    if blocks.bits > 4:
        pairs = codes.view("<u2")
        upper = (pairs >> 4 & 3 | pairs >> 10 & 12).astype(np.uint8).view("<u4")
        words[..., 4:] = upper[..., 0::2] | upper[..., 1::2] << 4
    return by_lane(words)


def by_lane(words: Words) -> Words:
    """Return the words of rows [N, G, w] as [N/16, G, w, 16]."""
    by_block = words.reshape(-1, ROWS_OF_BLOCK, *words.shape[1:])
    return np.ascontiguousarray(by_block.transpose(0, 2, 3, 1))


def words_of_halves(blocks: Bytes, start: int, stop: int, width: int, words: int = 4) -> Words:
    """Return the words of 4-bit codes, [rows, G, words], from ggml's order of halves.

    Blocks [rows, x, bytes], in whose bytes [start, stop) the codes are: of each run of `width`
    bytes (16, 32 or 64) first the low halves, then the high ones. Words after the first four are
    still to be filled.

    Codes are not unpacked: a pair of bytes has the halves of two neighbours, which are joined in
    place.
    """
    rows, count, size = blocks.shape
    pairs = blocks.view("<u2")
    low = pairs & 0x0F0F
    low |= low >> 4
    high = pairs & 0xF0F0
    high = high >> 4 | high >> 8
    half, runs, group = width // 2, (stop - start) // width, 4 * words  # bytes, number, bytes
    unit = min(half, 16)  # bytes that are adjacent before and after
    shape = (rows, count, runs, half // unit)
    packed = np.empty((rows, count * runs * width // 16, words), "<u4")
    in_run = width // 16 * group
    for i, bits in enumerate((low, high)):
        source = np.ndarray(
            shape,
            f"V{unit}",
            bits.astype(np.uint8),
            start // 2,
            (count * size // 2, size // 2, half, unit),
        )
        target = np.ndarray(
            shape,
            f"V{unit}",
            packed,
            unit * i if half < 16 else half // 16 * i * group,
            (count * runs * in_run, runs * in_run, in_run, group),
        )
        target[...] = source
    return packed


def set_uppers(words: Words, values: Bytes, shifts: Sequence[int], mask: int) -> None:
    """Fill words 4 and 5 of groups [rows, G, 6] with the upper bits of codes.

    From bytes [rows, x, 32], of which bits `mask` from each of `shifts` on are the upper bits of
    the codes of a group.
    """
    rows, count, _ = values.shape
    pairs = np.ascontiguousarray(values).view("<u2")
    both = mask | mask << 8
    target = words.reshape(rows, count, len(shifts), 6)[..., 4:]
    for i, shift in enumerate(shifts):
        bits = pairs >> shift & both
        fours = (bits | bits >> 6).astype(np.uint8).view("<u8")  # of a half: features 0…7, 8…15
        target[:, :, i] = (fours | fours >> 28).astype(np.uint32)


def nibble_words(codes: Bytes) -> npt.NDArray[np.uint32]:
    """Return the low halves of codes [rows, G, 32] as words [rows, G, 4] of eight.

    By pairs: neighbours in strided arrays take several times as long.
    """
    pairs = np.ascontiguousarray(codes).view("<u2")
    return (pairs & 15 | pairs >> 4 & 240).astype(np.uint8).view("<u4")


def _interleaved_scales(blocks: Blocks, parts: BlockParts) -> Bytes:
    rows, count = parts.d.shape
    interleaved = np.zeros((rows // ROWS_OF_BLOCK, count, blocks.scale_bytes), np.uint8)
    floats = interleaved[..., : blocks.float_bytes].view(np.float16)
    floats[..., :ROWS_OF_BLOCK] = _by_block(parts.d)
    small = interleaved[..., blocks.float_bytes :].view(np.int8)
    inside = blocks.groups * blocks.halves
    _set_small(small[..., : inside * ROWS_OF_BLOCK], parts.s, inside)
    if parts.e is not None and parts.t is not None:
        floats[..., ROWS_OF_BLOCK:] = _by_block(parts.e)
        _set_small(small[..., inside * ROWS_OF_BLOCK :], parts.t, blocks.groups)
    return interleaved


def _by_block(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return [N, S] to [N/16, S, 16]."""
    return values.reshape(-1, ROWS_OF_BLOCK, values.shape[1]).transpose(0, 2, 1)


def _set_small(target: npt.NDArray[Any], values: Small, inside: int) -> None:
    """Set [N, width] into [N/16, S, inside · 16]; the last block may be cut."""
    blocks, count, _ = target.shape
    full = np.zeros((len(values), count * inside), np.int8)
    full[:, : values.shape[1]] = values
    by_block = full.reshape(blocks, ROWS_OF_BLOCK, count, inside).transpose(0, 2, 3, 1)
    target[...] = by_block.reshape(blocks, count, -1)


def _scales_of(
    blocks: Blocks, scales: npt.NDArray[Any], groups: int
) -> tuple[Halves, Small, Halves | None, Small | None]:
    """Return d, s, e and t of `BlockParts`."""
    floats = np.ascontiguousarray(scales[..., : blocks.float_bytes]).view(np.float16)
    small = np.ascontiguousarray(scales[..., blocks.float_bytes :]).view(np.int8)
    inside = blocks.groups * blocks.halves
    s = _small_of(small[..., : inside * ROWS_OF_BLOCK], inside)[:, : groups * blocks.halves]
    d = _by_row(floats[..., :ROWS_OF_BLOCK])
    if not blocks.minimum:
        return d, s, None, None
    t = _small_of(small[..., inside * ROWS_OF_BLOCK :], blocks.groups)[:, :groups]
    return d, s, _by_row(floats[..., ROWS_OF_BLOCK:]), t


def _by_row(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(-1, values.shape[1])


def _small_of(values: npt.NDArray[Any], inside: int) -> Small:
    blocks, count, _ = values.shape
    split = values.reshape(blocks, count, inside, ROWS_OF_BLOCK).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(split).reshape(blocks * ROWS_OF_BLOCK, count * inside)
