"""The block types of GGUF as codes and scales, bit by bit.

They are those of ggml's `ggml-common.h` and `dequantize_row_*` of `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.blocks import BlockParts, set_uppers, words_of_halves
from hetero.backends.formats import GROUP_SIZE, StorageFormat
from hetero.models.gguf.kinds import SIZES, Kind

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Values of the codes of IQ4_NL (`kvalues_iq4nl`).
IQ4_NL_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
MXFP4_EXPONENTS: Final = (-24, 15)  # of powers of two that fp16 has
STORED: Final = {
    Kind.Q4_0: StorageFormat.Q4,
    Kind.Q8_0: StorageFormat.Q8,
    Kind.IQ4_NL: StorageFormat.Q8,
    Kind.Q4_1: StorageFormat.Q4_1,
    Kind.Q5_0: StorageFormat.Q5_0,
    Kind.Q5_1: StorageFormat.Q5_1,
    Kind.Q3_K: StorageFormat.Q6_K,
    Kind.Q4_K: StorageFormat.Q4_K,
    Kind.Q5_K: StorageFormat.Q5_K,
    Kind.Q6_K: StorageFormat.Q6_K,
    Kind.MXFP4: StorageFormat.MXFP4,
}


def block_parts(kind: Kind, rows: Bytes) -> BlockParts:
    """Return rows [n, bytes] of a block type of `STORED`, as blocks."""
    _, size = SIZES[kind]
    return _READERS[kind](np.ascontiguousarray(rows).reshape(len(rows), -1, size))


def nibbles(values: Bytes) -> Bytes:
    """Unpack […, 16] bytes to [n, G, 32] codes: the low halves come first."""
    return np.concatenate([values & 15, values >> 4], axis=-1)


def half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """Return the fp16 number at a byte of each block, [n, S]."""
    return np.ascontiguousarray(blocks.view("<u2")[..., at // 2]).view(np.float16)


def _ones(n: int, width: int, value: int = 1) -> npt.NDArray[np.int8]:
    return np.full((n, width), value, np.int8)


def _q4_1(blocks: Bytes) -> BlockParts:
    n, groups, _ = blocks.shape
    ones = _ones(n, groups)
    words = words_of_halves(blocks, 4, 20, 16)
    return BlockParts(words, half(blocks, 0), ones, -half(blocks, 2), ones)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Return bit i of a 32-bit word as bit 4 of code i, [n, G, 32]."""
    bits = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _q5_0(blocks: Bytes) -> BlockParts:
    n, groups, _ = blocks.shape
    codes = nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return BlockParts(codes + np.uint8(16), half(blocks, 0), _ones(n, groups))


def _q5_1(blocks: Bytes) -> BlockParts:
    n, groups, _ = blocks.shape
    codes, ones = nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), _ones(n, groups)
    return BlockParts(codes, half(blocks, 0), ones, -half(blocks, 2), ones)


def _scales_and_minima(packed: Bytes) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Unpack eight scales and eight minima of 6 bits from 12 bytes, four at once; [n, 8 S].

    As ggml's `get_scale_min_k4`.
    """
    n, count, _ = packed.shape
    fours = np.ascontiguousarray(packed).view("<u4")
    low, high, last = (fours[..., i] for i in range(3))
    words = np.empty((2, n, count, 2), "<u4")
    for i, (first, upper) in enumerate(((last, low), (last >> 4, high))):
        words[i, ..., 0] = upper & 0x3F3F3F3F
        words[i, ..., 1] = first & 0x0F0F0F0F | (upper >> 6 & 0x03030303) << 4
    scales, minima = words.view(np.int8).reshape(2, n, -1)
    return scales, minima


def _q4_k(blocks: Bytes) -> BlockParts:
    s, t = _scales_and_minima(blocks[..., 4:16])
    words = words_of_halves(blocks, 16, 144, 32)
    return BlockParts(words, half(blocks, 0), s, half(blocks, 2), t)


def _q5_k(blocks: Bytes) -> BlockParts:
    s, t = _scales_and_minima(blocks[..., 4:16])
    words = words_of_halves(blocks, 48, 176, 32, words=6)
    set_uppers(words, blocks[..., 16:48], range(8), 1)
    return BlockParts(words, half(blocks, 0), s, half(blocks, 2), t)


def _q6_k(blocks: Bytes) -> BlockParts:
    n, count, _ = blocks.shape
    words = words_of_halves(np.ascontiguousarray(blocks[..., :128]), 0, 128, 64, words=6)
    upper = np.ascontiguousarray(blocks[..., 128:192]).reshape(n, 2 * count, 32)
    set_uppers(words, upper, range(0, 8, 2), 3)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(n, -1)
    return BlockParts(words, half(blocks, 208), scales)


_PAIRS: Final = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # shifts of 2 bits in a byte


def _q3_k(blocks: Bytes) -> BlockParts:
    """Return codes of two bits and a third in a mask, -4…3, with signed scales of 16, as Q6_K's."""
    n, count, _ = blocks.shape
    low = blocks[..., 32:96].reshape(n, count, 2, 1, GROUP_SIZE) >> _PAIRS & 3
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    third = blocks[..., None, :32] >> shifts & 1
    codes = low.reshape(n, -1, GROUP_SIZE) + (third << 2).reshape(n, -1, GROUP_SIZE)
    packed = blocks[..., 96:108]
    four = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    two = packed[..., None, 8:12] >> _PAIRS & 3
    scales = (four | two.reshape(n, count, 16) << 4).view(np.int8) - np.int8(32)
    return BlockParts(codes + np.uint8(28), half(blocks, 108), scales.reshape(n, -1))


def _mxfp4(blocks: Bytes) -> BlockParts:
    """Return floats of 4 bits, with a power of two for 32: 2^(e - 127), of which codes have half.

    Powers that fp16 does not have are given as infinite, but those of blocks of zeros.
    """
    exponent = blocks[..., 0].astype(np.int32) - 128
    codes = np.ascontiguousarray(blocks[..., 1:])
    lower = exponent.clip(*MXFP4_EXPONENTS)
    scales = np.where(lower == exponent, np.ldexp(1.0, lower), np.inf)
    scales[~(codes & 0x77).any(axis=-1)] = 0
    words = words_of_halves(codes, 0, 16, 16)
    return BlockParts(words, scales.astype(np.float16), _ones(*exponent.shape))


_READERS: Final[dict[Kind, Callable[[Any], BlockParts]]] = {
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.MXFP4: _mxfp4,
}
