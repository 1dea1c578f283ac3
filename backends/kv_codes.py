"""Codes of keys and values, read on the host: what `ops.DecodeChunks` says, of many chunks at once.

Notation: G key/value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.kv_rows import CacheRows
from hetero.backends.ops import DecodeChunks

Array: TypeAlias = npt.NDArray[Any]
OWN_BITS: Final = {8: (8, 8), 6: (8, 4), 4: (4, 4), 3: (4, 2), 2: (2, 2)}  # of keys, of values


def decoded(
    bits: int,
    planes: Sequence[Array],
    shape: tuple[int, int, int],
    channels: Array,
    *,
    by_token: bool,
    keys_by_token: bool = False,
) -> Array:
    """Return float32 [n, 2, G, T, D] of n chunks in 8 to 2 bits.

    Their planes are uint8 [n, bytes].

    `shape` is (G, T, D); `channels` are [G, D], or [n, G, D] where chunks are of several layers.
    The first plane has the amplitudes and upper bits.
    """
    heads, tokens, _ = shape
    rows = tokens if keys_by_token else 1, tokens if by_token else 1
    codes, amplitudes = unpacked(bits, planes, heads * sum(rows))
    values = codes.astype(np.float32).reshape(len(codes), 2, *shape)
    scale = spread(amplitudes.astype(np.float32), heads, rows)
    for kind, own in enumerate(OWN_BITS[bits]):
        values[:, kind] += np.float32(0.5 - 2.0 ** (own - 1))
        scale[:, kind] *= np.float32(2.0 ** (1 - own))
    values[:, 1] *= scale[:, 1]
    values[:, 0] *= scale[:, 0] * channels[..., None, :]
    return values


def unpacked(bits: int, planes: Sequence[Array], count: int) -> tuple[Array, Array]:
    """Return codes uint8 [n, values] of n chunks, and their `count` amplitudes, fp16 [n, count]."""
    amplitudes = np.ascontiguousarray(planes[0][:, : 2 * count]).view(np.float16)
    codes = unpacked2(planes[0][:, 2 * count :])  # words of four codes
    for plane, unpack, width, least in ((1, unpacked2, 2, 4), (2, unpacked4, 4, 8)):
        of_keys, of_values = (x >= least for x in OWN_BITS[bits])
        if of_keys:
            longer = codes if of_values else codes[:, : codes.shape[1] // 2]
            longer <<= width
            longer |= unpack(planes[plane])
    return codes.view(np.uint8), amplitudes


def spread(amplitudes: Array, heads: int, rows: tuple[int, int]) -> Array:
    """Spread amplitudes over tokens: [n, 2, G, most of `rows`, 1].

    From amplitudes [n, those of keys, then of values], of which a head has as many as `rows` says
    of keys and of values: one, or one for each token.
    """
    count, split = len(amplitudes), heads * rows[0]
    if rows == (1, 1):
        amplitudes_by_token: Array = amplitudes.reshape(count, 2, heads, 1, 1)
        return amplitudes_by_token
    amplitudes_by_token = np.empty((count, 2, heads, max(rows), 1), np.float32)
    amplitudes_by_token[:, 0] = amplitudes[:, :split].reshape(count, heads, rows[0], 1)
    amplitudes_by_token[:, 1] = amplitudes[:, split:].reshape(count, heads, rows[1], 1)
    return amplitudes_by_token


def unpacked2(packed: Array) -> Array:
    """Return words, uint32 [n, bytes], of the four codes of two bits in each byte."""
    words = packed.astype(np.uint32)
    words |= words << 12
    words &= 0x000F000F
    words |= words << 6
    words &= 0x03030303
    return words


def unpacked4(packed: Array) -> Array:
    """Do the same as `unpacked2`, [n, bytes / 2]: a word is two bytes of two codes of four bits."""
    pairs = packed.astype(np.uint16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    words: Array = pairs.view(np.uint32)
    return words


def decode_chunks(op: DecodeChunks, channels: Array, arrays: dict[str, Array]) -> None:
    """Compute a call of the operation; chunks of equal bits and heads together."""
    table, codes = arrays["table"], arrays["codes"]
    every = channels.reshape(op.kv_heads, op.head_dim)
    caches = [CacheRows(arrays[port], op.kv, op.head_dim) for port in ("k_cache", "v_cache")]
    moves = op.kv.coded and np.array_equal(caches[0].channels, every)
    for bits, mask in sorted({(x, y) for _, x, _, y in table.tolist() if x}):
        rows = table[(table[:, 1] == bits) & (table[:, 3] == mask)]
        heads = heads_of(op, mask)
        size, shape = op.chunk_bytes(bits, len(heads)), (len(heads), op.tokens, op.head_dim)
        parts = np.stack([codes[start : start + size] for start in rows[:, 2]])
        if bits == 16:
            values_of = parts.view(np.float16).astype(np.float32).reshape(len(rows), 2, *shape)
        else:
            quarter = shape[0] * op.tokens * op.head_dim // 2
            first = 2 * shape[0] * sum(op.amplitude_rows) + quarter
            planes = np.split(parts, [first, first + quarter], axis=1)
            if bits == 8 and moves:
                _move(op, heads, rows[:, 0].tolist(), planes, caches)
                continue
            values_of = decoded(
                bits,
                planes,
                shape,
                every[heads],
                by_token=op.by_token,
                keys_by_token=op.keys_by_token,
            )
        for first, values in zip(rows[:, 0].tolist(), values_of, strict=True):
            for into, part in zip(caches, values, strict=True):
                write_heads(into, heads, first, part)


def heads_of(op: DecodeChunks, mask: int) -> list[int]:
    """Return the heads of a chunk."""
    return [x for x in range(op.kv_heads) if not mask or mask >> x & 1]


def write_heads(rows: CacheRows, heads: Sequence[int], start: int, values: Array) -> None:
    """Write tokens of some heads from `start` on, [heads, tokens, D]."""
    if len(heads) == len(rows.array):
        rows.write(start, values)
        return
    some = CacheRows(rows.array[list(heads)], rows.kv, rows.head_dim)  # a copy
    some.write(start, values)
    rows.array[list(heads)] = some.array


def _move(
    op: DecodeChunks,
    heads: list[int],
    firsts: Sequence[int],
    planes: Sequence[Array],
    caches: Sequence[CacheRows],
) -> None:
    """Move codes of 8 bits into caches of codes, unchanged."""
    count = len(heads)
    codes, amplitudes = unpacked(8, planes, count * sum(op.amplitude_rows))
    steps = spread(amplitudes.astype(np.float32) / 128, count, op.amplitude_rows)
    parts = (codes ^ 128).view(np.int8)
    for first, part, step in zip(firsts, parts, steps, strict=True):
        shaped = part.reshape(2, count, op.tokens, op.head_dim)
        for into, own, scale in zip(caches, shaped, step, strict=True):
            into.codes[heads, first : first + op.tokens] = own
            into.steps[heads, first : first + op.tokens] = scale


def random_channels(op: DecodeChunks, random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return scales of the keys' channels, for self-tests and tests."""
    scales: npt.NDArray[np.float32] = 0.5 + random.random(op.kv_heads * op.head_dim, np.float32)
    return scales


def random_chunks(
    op: DecodeChunks, m: int, random: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Return codes and table of m chunks of every kind, at any positions and bytes.

    They are for self-tests and tests.

    Every seventh row is none; every second one has some heads only.
    """
    codes = random.integers(0, 256, op.room, np.uint8)
    slots = random.permutation(op.capacity // op.tokens)[:m]
    table, at = np.zeros((m, 4), np.int32), 0
    for i in range(m):
        bits = (8, 4, 16, 3, 2, 6, 0)[i % 7]
        mask = int(random.integers(1, 1 << min(op.kv_heads, 30))) if i % 2 else 0
        count = len(heads_of(op, mask))
        table[i] = slots[i] * op.tokens, bits, at, mask
        floats = {0: 0, 16: op.values}.get(bits, op.amplitudes) * count // op.kv_heads
        codes[at : at + 2 * floats] = (
            random.uniform(0.1, 4, floats).astype(np.float16).view(np.uint8)
        )
        at += (op.chunk_bytes(bits, count) if bits else 0) + 2 * int(random.integers(3))
    return codes, table
