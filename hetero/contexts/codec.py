"""Keys and values of a chunk as codes of 8, 4 or 2 bits, nested: fewer bits are the first bytes.

Notation: L layers, G key/value heads, T tokens (at most `CHUNK_TOKENS`), D head size.

A value x is mapped to y = x / (s·a) in [-1, 1], a the amplitude of its group (fp16, rounded up, so
that nothing is clipped) and s the scale of its channel (keys only, one for each [L, G, D] of the
model: keys have channels that are large for every token, values have not). Its code of b bits is
floor((y + 1)·2^(b-1)), read back at the middle of its bin: x' = s·a·((2c + 1)/2^b - 1), so that
|x - x'| <= s·a/2^b. The code of 4 bits is the upper half of that of 8, that of 2 the upper half of
that of 4: taking bits away never reads a value again, and never writes one.

A chunk lies in planes, each [L, bytes], contiguous by layer: amplitudes with the upper two bits,
the two bits below them, the lower four. 2, 4 and 8 bits are one, two and three planes. 32 bits are
one plane of the float32 values themselves, which is exact, 16 bits one of float16.

Groups that share an amplitude: the chunk's T·D values of a layer and head; for values each token's
D where D is at least 64 (KIVI: keys by channel, values by token). Amplitudes count as bytes.

This is numpy on the host. Layer by layer many chunks are decoded together, since each call of numpy
costs as much as a chunk's layer of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.kv_codes import decoded, spread
from hetero.contexts.kv_cache import CacheLayout

CODEC_VERSION: Final = 1
CHUNK_TOKENS: Final = 16
RAW: Final = 32
HALF: Final = 16
DECODED_TOGETHER: Final = 1 << 15  # values: more are fresh pages for every step of decoding
NESTED: Final = (8, 4, 2)
TOKEN_AMPLITUDES_FROM: Final = 64  # head sizes whose values have an amplitude for each token

Array: TypeAlias = npt.NDArray[Any]
_PLANES: Final = {RAW: 1, HALF: 1, 2: 1, 4: 2, 8: 3}


class CodecError(ValueError):
    """Values that codes cannot hold: not finite, or beyond the range of an amplitude."""


@dataclass(frozen=True)
class Codes:
    """A chunk of `tokens` tokens in `bits` bits; `planes` are uint8 [L, bytes], never written."""

    bits: int
    tokens: int
    planes: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(plane.nbytes for plane in self.planes)

    def lowered(self, bits: int) -> Codes:
        """The same in fewer bits: planes are left out, nothing is computed."""
        if bits > self.bits or (bits < self.bits and (bits > 8 or self.bits > 8)):
            raise ValueError(f"codes of {self.bits} bits do not hold any of {bits}")
        return Codes(bits, self.tokens, self.planes[: _PLANES[bits]])


class ChunkCodec:
    """Encodes and decodes chunks of one model. Immutable; any thread.

    `channels` are the scales of the keys' channels, float32 [L, G, D], none of them 0.
    """

    def __init__(self, layout: CacheLayout, channels: Array | None = None) -> None:
        self.layers, self.heads, self.size = layout.layers, layout.kv_heads, layout.head_dim
        if self.heads * self.size % 2:
            raise ValueError(f"{self.heads} heads of {self.size} values do not fill bytes")
        shape = (self.layers, self.heads, self.size)
        scales = np.ones(shape, np.float32) if channels is None else channels.astype(np.float32)
        if scales.shape != shape or not (np.isfinite(scales) & (scales > 0)).all():
            raise ValueError(f"channels must be positive numbers of the shape {shape}")
        self.channels = scales
        self.by_token = self.size >= TOKEN_AMPLITUDES_FROM

    def plane_bytes(self, tokens: int, bits: int) -> tuple[int, ...]:
        """Bytes of a layer in each plane."""
        values = 2 * self.heads * tokens * self.size
        if bits > 8:
            return (bits // 8 * values,)
        each = (2 * self._amplitudes(tokens) + values // 4, values // 4, values // 2)
        return each[: _PLANES[bits]]

    def nbytes(self, tokens: int, bits: int) -> int:
        """Bytes of a chunk, amplitudes included."""
        return self.layers * sum(self.plane_bytes(tokens, bits))

    @property
    def workspace_bytes(self) -> int:
        """At most what encoding a chunk and decoding some take, both at once, beside their codes:
        4.1 raw chunks, and 9 bytes for each value that is decoded together.
        """
        raw = self.nbytes(CHUNK_TOKENS, RAW)
        return 5 * raw + 10 * max(DECODED_TOGETHER, raw // 4 // self.layers)

    def empty(self, tokens: int, bits: int) -> Codes:
        """Codes to be read into, of undefined contents."""
        sizes = self.plane_bytes(tokens, bits)
        planes = tuple(np.empty((self.layers, size), np.uint8) for size in sizes)
        return Codes(bits, tokens, planes)

    def encode(self, values: Array, bits: int) -> Codes:
        """Codes of float32 [L, 2 (k and v), G, T, D]. Raises `CodecError`."""
        tokens = values.shape[3]
        if values.shape != (self.layers, 2, self.heads, tokens, self.size):
            raise ValueError(f"a chunk of this model has another shape than {values.shape}")
        if bits == RAW:
            plane = np.array(values, np.float32, order="C").view(np.uint8)
            return Codes(RAW, tokens, (plane.reshape(self.layers, -1),))
        if bits == HALF:
            return Codes(HALF, tokens, (_halves(values).view(np.uint8).reshape(self.layers, -1),))
        scaled = values.astype(np.float32)
        scaled[:, 0] /= self.channels[:, :, None, :]
        amplitudes = self._measured(scaled)
        divisors = spread(amplitudes, self.heads, tokens, by_token=self.by_token)
        scaled /= np.where(divisors > 0, divisors, np.float32(1))
        codes = np.clip(np.floor((scaled + 1) * 128), 0, 255).astype(np.uint8)
        flat = codes.reshape(self.layers, -1)
        head = amplitudes.astype(np.float16).view(np.uint8).reshape(self.layers, -1)
        planes: tuple[Array, ...] = (
            np.concatenate([head, _packed2(flat >> 6)], axis=1),
            _packed2((flat >> 4) & 3),
            (flat[:, 0::2] & 15) | ((flat[:, 1::2] & 15) << 4),
        )
        return Codes(8, tokens, planes).lowered(bits)

    def decode(self, codes: Codes) -> Array:
        """Values float32 [L, 2, G, T, D] of codes."""
        return self._decoded(codes.bits, codes.tokens, codes.planes, slice(None))

    def decode_layer(self, codes: Codes, layer: int) -> Array:
        """As `decode`, of one layer: [2, G, T, D]."""
        planes = [plane[layer : layer + 1] for plane in codes.planes]
        found: Array = self._decoded(codes.bits, codes.tokens, planes, slice(layer, layer + 1))[0]
        return found

    def decode_into(
        self, chunks: Sequence[tuple[int, Codes]], layer: int, keys: Array, values: Array
    ) -> None:
        """A layer of chunks, each at its first token, into a cache's keys and values
        [G, capacity, D]. `DECODED_TOGETHER` values at once, of chunks with equal bits.
        """
        kinds: dict[tuple[int, int], list[tuple[int, Codes]]] = {}
        for start, codes in chunks:
            kinds.setdefault((codes.bits, codes.tokens), []).append((start, codes))
        for (bits, tokens), found in kinds.items():
            one = 2 * self.heads * tokens * self.size
            for part in _batched(found, max(1, DECODED_TOGETHER // one)):
                rows = zip(*(codes.planes for _, codes in part), strict=True)
                planes = [np.stack([plane[layer] for plane in row]) for row in rows]
                decoded = self._decoded(bits, tokens, planes, slice(layer, layer + 1))
                for (start, _), (k, v) in zip(part, decoded, strict=True):
                    keys[:, start : start + tokens] = k
                    values[:, start : start + tokens] = v

    def _decoded(self, bits: int, tokens: int, planes: Sequence[Array], layers: slice) -> Array:
        """Float32 [n, 2, G, T, D] of planes [n, bytes]: n layers, or n chunks of one."""
        count = len(planes[0])
        shape = (count, 2, self.heads, tokens, self.size)
        if bits == RAW:
            exact: Array = planes[0].reshape(-1).view(np.float32).reshape(shape)
            return exact
        if bits == HALF:
            return planes[0].reshape(-1).view(np.float16).astype(np.float32).reshape(shape)
        heads = self.heads, tokens, self.size
        return decoded(bits, planes, heads, self.channels[layers], by_token=self.by_token)

    # --- amplitudes -------------------------------------------------------------------------

    def _amplitudes(self, tokens: int) -> int:
        """Of a layer: of the keys, then of the values."""
        return self.heads * (1 + (tokens if self.by_token else 1))

    def _measured(self, values: Array) -> Array:
        """Largest magnitudes [L, amplitudes], fp16 rounded up, as float32. Raises `CodecError`."""
        keys = np.abs(values[:, 0]).max(axis=(2, 3))
        others = np.abs(values[:, 1]).max(axis=3 if self.by_token else (2, 3))
        exact = np.concatenate([keys, others.reshape(self.layers, -1)], axis=1)
        if not (exact < 65504).all():  # nor NaN
            raise CodecError("keys or values are not finite, or too large for codes")
        rounded = exact.astype(np.float16)
        short = rounded.astype(np.float32) < exact
        rounded[short] = np.nextafter(rounded[short], np.float16(np.inf))
        return rounded.astype(np.float32)


def _batched(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), count):
        yield items[start : start + count]


def _halves(values: Array) -> Array:
    """Float16 of finite values in its range. Raises `CodecError`."""
    if not (np.abs(values) < 65504).all():
        raise CodecError("keys or values are not finite, or too large for codes")
    return np.array(values, np.float16, order="C")


def channel_scales(values: Array) -> Array:
    """Scales [L, G, D] of the keys' channels: root mean squares over tokens of [L, 2, G, T, D],
    relative to their head's, none below a hundredth of it.
    """
    squares = np.square(values[:, 0].astype(np.float64)).mean(axis=2)  # [L, G, D]
    head = np.sqrt(squares.mean(axis=2, keepdims=True))
    relative = np.sqrt(squares) / np.where(head > 0, head, 1)
    scales: Array = np.maximum(relative, 0.01).astype(np.float32)
    return scales


def relative_errors(codec: ChunkCodec, values: Array) -> dict[int, float]:
    """Measured error of keys and values at 8, 4 and 2 bits: root mean square, relative to theirs.

    The mean of the keys' and the values' errors.
    """
    codes, errors = codec.encode(values, 8), {}
    size = np.sqrt(np.square(values.astype(np.float64)).mean(axis=(0, 2, 3, 4)))
    for bits in NESTED:
        wrong = codec.decode(codes.lowered(bits)).astype(np.float64) - values
        rms = np.sqrt(np.square(wrong).mean(axis=(0, 2, 3, 4)))
        errors[bits] = float((rms / np.where(size > 0, size, 1)).mean())
    return errors


def _packed2(codes: Array) -> Array:
    """Codes of two bits [L, n], four in a byte."""
    first, second, third, fourth = (codes[:, i::4] for i in range(4))
    packed: Array = first | (second << 2) | (third << 4) | (fourth << 6)
    return packed
