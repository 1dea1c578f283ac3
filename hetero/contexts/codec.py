"""Keys and values of a chunk as codes of 8 to 2 bits, nested: fewer bits are a prefix of more.

Notation: L layers, G key/value heads, T tokens (at most `CHUNK_TOKENS`), D head size.

A value x is mapped to y = x / (s·a) in [-1, 1], a the amplitude of its group (fp16, rounded up, so
that nothing is clipped) and s the scale of its channel (keys only, one for each [L, G, D] of the
model: keys have channels that are large for every token, values have not). Its code of b bits is
floor((y + 1)·2^(b-1)), read back at the middle of its bin: x' = s·a·((2c + 1)/2^b - 1), so that |x
- x'| <= s·a/2^b. The 4-bit code is the upper half of the 8-bit one, and the 2-bit code the upper
half of the 4-bit one: dropping bits neither reads nor writes a value. "3 bits" are 4 of keys and 2
of values, whose errors cost far less.

A chunk is stored in planes, each [L, bytes], contiguous by layer (`LayerBytes` where layers differ
in size): amplitudes with the upper two bits; the two bits below them, of keys, then of values; the
lower four. 2, 3, 4 and 8 bits are one to four planes (in folders of `FIRST_VERSIONS`, and where a
token's keys do not fill bytes, both planes in the middle are one, and there are no 3 bits). 32 bits
are one plane of the float32 values themselves, which is exact, 16 bits one of float16.

In `mixed` bits each head of each layer has its own: 8, 6 (8 of keys and 4 of values), 4, 3 or 2.
Such a chunk is one plane: of a layer heads of equal bits follow each other, most bits first, each
time the first bytes of those that these heads have at 8 bits. It is not lowered.

The values that share an amplitude are the chunk's T·D values of a layer and head; where D is at
least 64, each token's D (folders of `FIRST_VERSIONS`: only of values). One token of a chunk whose
keys are larger would otherwise cost the others most of their bits. Amplitudes count as bytes.

Where caches store codes themselves (`hetero.backends.kv_rows`), keys and values have an amplitude
for each token, as there, and 32 bits are the cache's own bytes. 8 bits are then the cache's own
codes and amplitudes: exact, and not computed from floats where channels are the same.

This is numpy on the host. Many chunks are decoded at once, layer by layer, since one call of numpy
costs as much as a chunk's layer of a small model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.kv_codes import OWN_BITS, decoded, spread
from hetero.backends.kv_rows import CacheRows
from hetero.contexts.planes import (
    CodecError,
    exact_rows,
    exact_values,
    halves,
    joined,
    measured_amplitudes,
    move_codes,
    packed,
)
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache

CODEC_VERSION: Final = 3
FIRST_VERSIONS: Final = (1, 2)  # still read and written in their folders: equal layers, or not
CHUNK_TOKENS: Final = 16
RAW: Final = 32
HALF: Final = 16
STATES: Final = 64  # in the place of a chunk's bits: it is the states of layers, exact
MIXED: Final = 128  # and above, likewise: bits by head, `ChunkCodec.mixed`
DECODED_TOGETHER: Final = 1 << 15  # values: more are fresh pages for every step of decoding
NESTED: Final = (8, 4, 3, 2)
TOKEN_AMPLITUDES_FROM: Final = 64  # head sizes that have an amplitude for each token

Array: TypeAlias = npt.NDArray[Any]
Heads: TypeAlias = list[int] | None  # of a layer; None: all
Assignment: TypeAlias = Sequence[int | Sequence[int]]  # bits of layers, or of the heads of each
_PLANES: Final = {STATES: 1, RAW: 1, HALF: 1, 2: 1, 3: 2, 4: 3, 6: 4, 8: 4}
_FEWER: Final = _PLANES | {3: 2, 4: 2, 6: 3, 8: 3}  # without those of keys alone


class LayerBytes:
    """A plane whose layers have so many bytes each: uint8 [L][bytes] in one piece of memory."""

    def __init__(self, sizes: Sequence[int], data: Array | None = None) -> None:
        self._sizes = sizes
        self.data = np.empty(sum(sizes), np.uint8) if data is None else data
        self._layers = np.split(self.data, np.cumsum(sizes[:-1]))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all layers."""
        return self.data.nbytes

    def __getitem__(self, layer: int) -> Array:
        return self._layers[layer]

    def __setitem__(self, layer: int, values: Array) -> None:
        self._layers[layer][:] = values

    def __iter__(self) -> Iterator[Array]:
        return iter(self._layers)

    def copy(self) -> LayerBytes:
        """Return the same bytes in memory of their own."""
        return LayerBytes(self._sizes, self.data.copy())


Plane: TypeAlias = Array | LayerBytes


@dataclass(frozen=True)
class Codes:
    """A chunk of `tokens` tokens in `bits` bits; `planes` are uint8 [L, bytes], never written.

    Those of states (`STATES`) have no tokens.
    """

    bits: int
    tokens: int
    planes: tuple[Plane, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes in memory."""
        return sum(plane.nbytes for plane in self.planes)

    def lowered(self, bits: int) -> Codes:
        """Return the same chunk in fewer bits: planes are dropped, nothing is computed."""
        if bits > self.bits or (bits < self.bits and (bits > 8 or self.bits > 8)):
            raise ValueError(f"codes of {self.bits} bits do not hold any of {bits}")
        counts = _PLANES if len(self.planes) == _PLANES[self.bits] else _FEWER
        return Codes(bits, self.tokens, self.planes[: counts[bits]])


class HeadGroup(NamedTuple):
    """The planes of heads of equal bits in a layer of a chunk."""

    bits: int
    heads: Heads
    planes: list[Array]


class ChunkCodec:
    """Encoder and decoder of one model's chunks. Immutable; any thread may use it.

    `channels` are the scales of the keys' channels, float32 [L, G, D], none of them 0; `mixed` are
    assignments of bits to layers, or to the heads of each, which `MIXED` + i stands for. Heads of
    equal bits are stored together, those with most bits first.
    """

    def __init__(
        self,
        layout: CacheLayout,
        channels: Array | None = None,
        version: int = CODEC_VERSION,
        mixed: Sequence[Assignment] = (),
    ) -> None:
        self.layers, self.heads, self.size = layout.layers, layout.kv_heads, layout.head_dim
        if self.heads * self.size % 2:
            raise ValueError(f"{self.heads} heads of {self.size} values do not fill bytes")
        shape = (self.layers, self.heads, self.size)
        scales = np.ones(shape, np.float32) if channels is None else channels.astype(np.float32)
        if scales.shape != shape or not (np.isfinite(scales) & (scales > 0)).all():
            raise ValueError(f"channels must be positive numbers of the shape {shape}")
        self.channels: Sequence[Array] | Array = scales
        self._scales = scales
        self.kv, self.version = layout.kv, version
        self.by_token = self.size >= TOKEN_AMPLITUDES_FROM or self.kv.coded
        self.keys_by_token = self.by_token if version == CODEC_VERSION else self.kv.coded
        self._split = version == CODEC_VERSION and self.heads * self.size % 4 == 0
        self._states = [shape for _, shape in layout.states]
        self._state_values = sum(map(math.prod, self._states))
        self.mixed = _checked(mixed, [self.heads] * self.layers, self.size)
        self.kinds = _kinds(*self.mixed, [0] * self.layers)

    @property
    def nested(self) -> tuple[int, ...]:
        """Return the numbers of bits that codes have, most first."""
        return NESTED if self._split else tuple(x for x in NESTED if x != 3)

    @property
    def exact(self) -> tuple[int, ...]:
        """Return the bits that lose nothing of what caches store."""
        return (RAW, 8) if self.kv.coded else (RAW,)

    @property
    def splits_heads(self) -> bool:
        """Return whether heads of a layer may have different bits: their values fill bytes."""
        return self.size % 4 == 0

    @property
    def mixed_bits(self) -> range:
        """Return what stands for bits by head in the place of a chunk's bits."""
        return range(MIXED, MIXED + len(self.mixed))

    def heads_at(self, layer: int) -> int:  # noqa: ARG002
        """Return the key/value heads of a layer."""
        return self.heads

    def groups(self, bits: int, layer: int) -> list[tuple[int, list[int]]]:
        """Return the heads of equal bits in a layer of a chunk, those of most bits first."""
        own = self.mixed[bits - MIXED][layer] if bits >= MIXED else (bits,) * self.heads
        kinds = sorted({*own}, reverse=True)
        return [(kind, [h for h, x in enumerate(own) if x == kind]) for kind in kinds]

    def plane_bytes(self, tokens: int, bits: int, layer: int) -> tuple[int, ...]:
        """Return the bytes of a layer in each plane."""
        if bits >= MIXED:
            parts = self.groups(bits, layer)
            return (sum(sum(self._plane_bytes(tokens, x, len(heads))) for x, heads in parts),)
        if bits == STATES:
            return (4 * -(-self._state_values // self.layers),)
        return self._plane_bytes(tokens, bits, self.heads)

    def _plane_bytes(self, tokens: int, bits: int, heads: int) -> tuple[int, ...]:
        """Return the bytes of so many heads in each plane."""
        values = 2 * heads * tokens * self.size
        if bits == RAW and self.kv.coded:
            return (2 * heads * tokens * self.kv.row(self.size),)
        if bits > 8:
            return (bits // 8 * values,)
        first = 2 * heads * sum(self._rows(tokens)) + values // 4
        lower = values // (4 if bits == 6 else 2)
        if self._split:
            return (first, values // 8, values // 8, lower)[: _PLANES[bits]]
        return (first, values // (8 if bits == 3 else 4), lower)[: _FEWER[bits]]

    def nbytes(self, tokens: int, bits: int) -> int:
        """Return the bytes of a chunk, amplitudes included."""
        counts = Counter(self.kinds)
        return sum(n * sum(self.plane_bytes(tokens, bits, x)) for x, n in counts.items())

    def encoding_bytes(self, tokens: int, bits: int) -> int:
        """Return the bytes that a chunk takes while it is encoded, without the workspace."""
        return self.nbytes(tokens, 8 if bits >= MIXED else max(bits, 8))

    @property
    def workspace_bytes(self) -> int:
        """Return a bound on the workspace of encoding one chunk while a batch is decoded.

        Without the codes: 4.1 raw chunks, 9 bytes for each value of the batch, and a part of the
        states that is read and opened.
        """
        raw = 2 * self.nbytes(CHUNK_TOKENS, HALF)
        (states,) = self.plane_bytes(0, STATES, 0)
        widths = (self.plane_bytes(CHUNK_TOKENS, HALF, layer) for layer in set(self.kinds))
        widest = max(nbytes // 2 for (nbytes,) in widths)  # values
        return 5 * raw + 10 * max(DECODED_TOGETHER, widest) + 3 * states

    def empty(self, tokens: int, bits: int) -> Codes:
        """Return codes to read into, of undefined contents."""
        if bits >= MIXED:
            layers = range(self.layers)
            sizes = [size for x in layers for size in self.plane_bytes(tokens, bits, x)]
            return Codes(bits, tokens, (LayerBytes(sizes),))
        sizes = [*self.plane_bytes(tokens, bits, 0)]
        planes = tuple(np.empty((self.layers, size), np.uint8) for size in sizes)
        return Codes(bits, tokens, planes)

    def _of_layer(self, codes: Codes, layer: int) -> list[HeadGroup]:
        """Return the planes of a layer of a chunk, by heads of equal bits."""
        if codes.bits < MIXED:
            return [HeadGroup(codes.bits, None, [plane[layer] for plane in codes.planes])]
        left, split = codes.planes[0][layer], []
        for bits, heads in self.groups(codes.bits, layer):
            stops = np.cumsum(self._plane_bytes(codes.tokens, bits, len(heads)))
            *planes, left = np.split(left, stops)
            split.append(HeadGroup(bits, None if len(heads) == self.heads else heads, planes))
        return split

    def encode(self, values: Sequence[Array] | Array, bits: int) -> Codes:
        """Encode float32 values [L, 2 (k and v), G, T, D]. Raises `CodecError`."""
        values = np.asarray(values)
        tokens = values.shape[3]
        if values.shape != (self.layers, 2, self.heads, tokens, self.size):
            raise ValueError(f"a chunk of this model has another shape than {values.shape}")
        if bits == RAW:
            plane = exact_rows(values, self.kv, self._scales).view(np.uint8)
            return Codes(RAW, tokens, (plane.reshape(self.layers, -1),))
        if bits == HALF:
            return Codes(HALF, tokens, (halves(values).view(np.uint8).reshape(self.layers, -1),))
        scaled = values.astype(np.float32)
        scaled[:, 0] /= self._scales[:, :, None, :]
        amplitudes = measured_amplitudes(
            scaled, keys_by_token=self.keys_by_token, by_token=self.by_token
        )
        divisors = spread(amplitudes, self.heads, self._rows(tokens))
        scaled /= np.where(divisors > 0, divisors, np.float32(1))
        codes = np.clip(np.floor((scaled + 1) * 128), 0, 255).astype(np.uint8)
        return self._coded(codes, amplitudes, tokens, bits)

    def encode_cached(self, cache: KvCache, start: int, stop: int, bits: int) -> Codes:
        """Encode tokens [start, stop) of a cache. Raises `CodecError`."""
        return self.encode_rows([cache.rows(i) for i in range(self.layers)], start, stop, bits)

    def encode_rows(
        self, both: Sequence[tuple[CacheRows, CacheRows]], start: int, stop: int, bits: int
    ) -> Codes:
        """Encode rows [start, stop) of each layer's keys and values. Raises `CodecError`."""
        own = self.kv.coded and np.array_equal([x.channels for x, _ in both], self._scales)
        if not own or bits == HALF:
            read = [[x.read(start, stop) for x in rows] for rows in both]
            return self.encode(np.array(read, np.float32), bits)
        if bits == RAW:
            rows = np.array([[x.array[:, start:stop] for x in layer] for layer in both])
            return Codes(RAW, stop - start, (rows.view(np.uint8).reshape(self.layers, -1),))
        steps = np.array([[x.steps[:, start:stop] for x in rows] for rows in both])
        if not (steps < 65504 / 128).all():  # nor NaN
            raise CodecError("keys or values are not finite, or too large for codes")
        codes = np.array([[x.codes[:, start:stop] for x in rows] for rows in both])
        amplitudes = (steps * 128).reshape(self.layers, -1)
        return self._coded(codes.view(np.uint8) ^ 128, amplitudes, stop - start, bits)

    def encode_states(self, states: Sequence[Array]) -> Codes:
        """Encode a model's states, in their order: all values after each other, in equal parts."""
        (size,) = self.plane_bytes(0, STATES, 0)
        flat = np.concatenate([x.reshape(-1) for x in states])
        flat.resize(self.layers * size // 4)
        return Codes(STATES, 0, (flat.view(np.uint8).reshape(self.layers, size),))

    def decode_states(self, codes: Codes) -> list[Array]:
        """Return what `encode_states` was given."""
        plane = codes.planes[0]
        whole = plane.data if isinstance(plane, LayerBytes) else plane.reshape(-1)
        stops = np.cumsum([math.prod(shape) for shape in self._states])
        parts = np.split(whole.view(np.float32), stops)
        return [part.reshape(shape) for part, shape in zip(parts, self._states, strict=False)]

    def _coded(self, codes: Array, amplitudes: Array, tokens: int, bits: int) -> Codes:
        """Return 8-bit codes uint8 [L, 2, G, T, D] in the bits that are asked for.

        Amplitudes are [L, of keys, then of values].
        """
        if bits < MIXED:
            return Codes(8, tokens, packed(codes, amplitudes, split=self._split)).lowered(bits)
        made, rows = self.empty(tokens, bits), self._rows(tokens)
        of_keys, of_values = np.split(amplitudes, [self.heads * rows[0]], axis=1)
        by_head = [x.reshape(self.layers, self.heads, -1) for x in (of_keys, of_values)]
        for layer in range(self.layers):
            parts = []
            for own, heads in self.groups(bits, layer):
                chosen = [x[layer, heads].reshape(1, -1) for x in by_head]
                part = codes[layer : layer + 1, :, heads]
                planes = packed(part, np.hstack(chosen), split=self._split)
                size = sum(self._plane_bytes(tokens, own, len(heads)))
                parts.append(np.hstack(planes)[0, :size])
            made.planes[0][layer] = np.concatenate(parts)
        return made

    def decode(self, codes: Codes) -> Sequence[Array] | Array:
        """Return the values of codes, float32 [L, 2, G, T, D]."""
        if codes.bits >= MIXED:
            layers = (([self._of_layer(codes, x)], codes.tokens, x) for x in range(self.layers))
            return np.concatenate([self._of_groups(*x) for x in layers])
        planes = [x for x in codes.planes if not isinstance(x, LayerBytes)]
        return self._decoded(codes.bits, codes.tokens, planes, slice(None))

    def decode_into(
        self, chunks: Sequence[tuple[int, Codes]], layer: int, keys: CacheRows, values: CacheRows
    ) -> None:
        """Decode a layer of chunks, each at its first token, into a cache's keys and values."""
        if own := self.kv.coded and np.array_equal(keys.channels, self._scales[layer]):
            chunks = [x for x in chunks if not self._moved(*x, layer, (keys, values))]
        kinds: dict[tuple[int, int], list[tuple[int, list[HeadGroup]]]] = {}
        for start, codes in chunks:
            groups = self._of_layer(codes, layer)
            bits = groups[0].bits if groups[0].heads is None else codes.bits
            kinds.setdefault((bits, codes.tokens), []).append((start, groups))
        for (_, tokens), alike in kinds.items():
            one = 2 * self.heads * tokens * self.size
            for part in _batched(alike, max(1, DECODED_TOGETHER // one)):
                decoded = self._of_groups([groups for _, groups in part], tokens, layer)
                for (start, groups), (k, v) in zip(part, decoded, strict=True):
                    keys.write(start, k)
                    values.write(start, v)
                    for bits, heads, planes in groups if own else ():
                        if bits == 8:
                            rows = slice(start, start + tokens), joined(planes, split=self._split)
                            move_codes((keys, values), *rows, heads)

    def _moved(
        self, start: int, codes: Codes, layer: int, into: tuple[CacheRows, CacheRows]
    ) -> bool:
        """Copy a chunk into caches of codes with the same channels; return whether it was."""
        (group, *others) = self._of_layer(codes, layer)
        if others or group.bits not in (8, RAW):
            return False
        planes = group.planes if group.bits == RAW else joined(group.planes, split=self._split)
        move_codes(into, slice(start, start + codes.tokens), planes)
        return True

    def _of_groups(self, chunks: Sequence[list[HeadGroup]], tokens: int, layer: int) -> Array:
        """Return float32 [n, 2, G, T, D] of a layer of n chunks whose heads have the same bits."""
        own = slice(layer, layer + 1)
        made = np.empty((len(chunks), 2, self.heads, tokens, self.size), np.float32)
        for alike in zip(*chunks, strict=True):
            bits, heads, _ = alike[0]
            planes = [np.stack(row) for row in zip(*(x.planes for x in alike), strict=True)]
            decoded = self._decoded(bits, tokens, planes, own, heads)
            if heads is None:
                return decoded
            made[:, :, heads] = decoded
        return made

    def _decoded(
        self, bits: int, tokens: int, planes: Sequence[Array], layers: slice, heads: Heads = None
    ) -> Array:
        """Return float32 [n, 2, G, T, D] of planes [n, bytes]: n layers, or n chunks of a layer.

        G are all heads, or some.
        """
        scales = self._scales[layers] if heads is None else self._scales[layers][:, heads]
        shape = scales.shape[1], tokens, self.size
        if bits == RAW:
            stored = planes[0].reshape(-1)
            return exact_values(stored, (len(planes[0]), 2, *shape), self.kv, scales)
        if bits == HALF:
            floats = planes[0].reshape(-1).view(np.float16).astype(np.float32)
            return floats.reshape(-1, 2, *shape)
        planes, both = joined(planes, split=self._split), (self.by_token, self.keys_by_token)
        return decoded(bits, planes, shape, scales, by_token=both[0], keys_by_token=both[1])

    def _rows(self, tokens: int) -> tuple[int, int]:
        """Return the number of amplitudes of a head's keys, and of its values."""
        return tokens if self.keys_by_token else 1, tokens if self.by_token else 1


class LayeredCodec(ChunkCodec):
    """The same for layers whose heads differ in number or size: each has a codec of its own.

    Values, and `channels`, are lists by layer.
    """

    def __init__(
        self,
        layout: CacheLayout,
        channels: Sequence[Array] | Array | None = None,
        version: int = CODEC_VERSION,
        mixed: Sequence[Assignment] = (),
    ) -> None:
        self._own = []
        sizes = [layout.heads(layer) for layer in range(layout.layers)]
        self.mixed = _checked(mixed, [x for x, _ in sizes], math.gcd(*(x for _, x in sizes)))
        for layer in range(layout.layers):
            heads, size = layout.heads(layer)
            one = CacheLayout(
                layers=1, kv_heads=heads, head_dim=size, capacity=layout.capacity, kv=layout.kv
            )
            scales = None if channels is None else channels[layer][None]
            own_bits = [[bits[layer]] for bits in self.mixed]
            self._own.append(ChunkCodec(one, scales, version, own_bits))
        self._split = all(x._split for x in self._own)
        for own in self._own:
            own._split = self._split
        self.layers, self.kv, self.version = layout.layers, layout.kv, version
        self.kinds = _kinds(*self.mixed, sizes)
        self._states = [shape for _, shape in layout.states]
        self._state_values = sum(map(math.prod, self._states))
        self.channels = [x.channels[0] for x in self._own]

    @property
    def splits_heads(self) -> bool:
        """Return whether heads of a layer may have different bits."""
        return all(x.splits_heads for x in self._own)

    def heads_at(self, layer: int) -> int:
        """Return the key/value heads of a layer."""
        return self._own[layer].heads

    def plane_bytes(self, tokens: int, bits: int, layer: int) -> tuple[int, ...]:
        """Return the bytes of a layer in each plane."""
        if bits == STATES:
            return super().plane_bytes(0, bits, layer)
        return self._own[layer].plane_bytes(tokens, bits, 0)

    def empty(self, tokens: int, bits: int) -> Codes:
        """Return codes to read into, of undefined contents."""
        each = [self.plane_bytes(tokens, bits, layer) for layer in range(self.layers)]
        return Codes(bits, tokens, tuple(map(LayerBytes, zip(*each, strict=True))))

    def encode(self, values: Sequence[Array] | Array, bits: int) -> Codes:
        """Encode float32 values [2, G, T, D] by layer. Raises `CodecError`."""
        pairs = zip(self._own, values, strict=True)
        return self._joined([own.encode(part[None], bits) for own, part in pairs])

    def encode_rows(
        self, both: Sequence[tuple[CacheRows, CacheRows]], start: int, stop: int, bits: int
    ) -> Codes:
        """Encode rows [start, stop) of each layer's keys and values. Raises `CodecError`."""
        pairs = zip(self._own, both, strict=True)
        return self._joined([own.encode_rows([rows], start, stop, bits) for own, rows in pairs])

    def decode(self, codes: Codes) -> list[Array]:
        """Return the values of codes, float32 [2, G, T, D] by layer."""
        return [x.decode(self._part(codes, i))[0] for i, x in enumerate(self._own)]

    def decode_into(
        self, chunks: Sequence[tuple[int, Codes]], layer: int, keys: CacheRows, values: CacheRows
    ) -> None:
        """Decode a layer of chunks, each at its first token, into a cache's keys and values."""
        parts = [(start, self._part(codes, layer)) for start, codes in chunks]
        self._own[layer].decode_into(parts, 0, keys, values)

    def _joined(self, layers: Sequence[Codes]) -> Codes:
        """Return the codes of all layers as one chunk."""
        joined = self.empty(layers[0].tokens, layers[0].bits)
        for layer, codes in enumerate(layers):
            for plane, own in zip(joined.planes, codes.planes, strict=True):
                plane[layer] = own[0]
        return joined

    def _part(self, codes: Codes, layer: int) -> Codes:
        """Return a layer of a chunk, as its codec has it."""
        return Codes(codes.bits, codes.tokens, tuple(x[layer][None] for x in codes.planes))


def codec_of(
    layout: CacheLayout,
    channels: Sequence[Array] | Array | None = None,
    version: int = CODEC_VERSION,
    mixed: Sequence[Assignment] = (),
) -> ChunkCodec:
    """Return the codec of a model's chunks, with the scales of the keys' channels by layer.

    `mixed` are assignments of bits to layers, or to their heads. Raises `ValueError` for what is
    none.
    """
    if not layout.alike:
        return LayeredCodec(layout, channels, version, mixed)
    scales = None if channels is None else np.array(channels, np.float32)
    return ChunkCodec(layout, scales, version, mixed)


def _checked(
    mixed: Sequence[Assignment], heads: Sequence[int], size: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the bits of each layer's heads. Raises `ValueError` for others than there are."""
    checked = []
    for layers in mixed:
        pairs = zip(layers, heads, strict=False)
        own = tuple((x,) * n if isinstance(x, int) else tuple(x) for x, n in pairs)
        fits = (
            len(layers) == len(heads)
            and [len(x) for x in own] == [*heads]
            and all(OWN_BITS.keys() >= {*x} for x in own)
        )
        if not fits or (size % 4 and any(len({*x}) > 1 for x in own)):
            raise ValueError(
                f"{len(heads)} layers have {', '.join(map(str, OWN_BITS))} bits, for all heads or "
                f"for each, got {layers}"
            )
        checked.append(own)
    return tuple(checked)


def _kinds(*sizes: Iterable[object]) -> list[int]:
    """Return the first layer whose planes have the same sizes, by layer."""
    layers = list(zip(*sizes, strict=True))
    return list(map(layers.index, layers))


def _batched(items: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), count):
        yield items[start : start + count]


def channel_scales(values: Array) -> Array:
    """Return scales [L, G, D] of the keys' channels, from values [L, 2, G, T, D].

    A scale is the root mean square over tokens relative to its head's, at least a hundredth of it.
    """
    squares = np.square(values[:, 0].astype(np.float64)).mean(axis=2)  # [L, G, D]
    head = np.sqrt(squares.mean(axis=2, keepdims=True))
    relative = np.sqrt(squares) / np.where(head > 0, head, 1)
    scales: Array = np.maximum(relative, 0.01).astype(np.float32)
    return scales
