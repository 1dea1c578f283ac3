"""The planes of a chunk's codes, and the exact forms: what `hetero.contexts.codec` stores.

Notation as there: n layers, G heads, T tokens, D head size. With `split` the two bits in the middle
are a plane of keys and one of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import CacheFormat
from hetero.backends.kv_codes import unpacked
from hetero.backends.kv_rows import CacheRows, rounded_up

Array: TypeAlias = npt.NDArray[Any]


class CodecError(ValueError):
    """Values that codes cannot hold: not finite, or beyond the range of an amplitude."""


def packed(codes: Array, amplitudes: Array, *, split: bool) -> tuple[Array, ...]:
    """Pack 8-bit codes uint8 [n, 2, G, T, D] and their amplitudes [n, count] into planes."""
    flat = codes.reshape(len(codes), -1)
    head = amplitudes.astype(np.float16).view(np.uint8).reshape(len(codes), -1)
    middle = _packed2((flat >> 4) & 3)
    return (
        np.concatenate([head, _packed2(flat >> 6)], axis=1),
        *(np.split(middle, 2, axis=1) if split else [middle]),
        (flat[:, 0::2] & 15) | ((flat[:, 1::2] & 15) << 4),
    )


def joined(planes: Sequence[Array], *, split: bool) -> Sequence[Array]:
    """Return planes with those of keys and of values as one."""
    if split and len(planes) > 2:
        return [planes[0], np.concatenate(planes[1:3], axis=-1), *planes[3:]]
    return planes


def measured_amplitudes(values: Array, *, keys_by_token: bool, by_token: bool) -> Array:
    """Return the largest magnitudes of values [n, 2, G, T, D], rounded up to fp16, as float32.

    They are [n, those of keys, then of values], one for each head, or for each of its tokens.
    Raises `CodecError`.
    """
    keys = np.abs(values[:, 0]).max(axis=3 if keys_by_token else (2, 3))
    others = np.abs(values[:, 1]).max(axis=3 if by_token else (2, 3))
    exact = np.concatenate([part.reshape(len(values), -1) for part in (keys, others)], axis=1)
    if not (exact < 65504).all():  # nor NaN
        raise CodecError("keys or values are not finite, or too large for codes")
    return rounded_up(exact)


def halves(values: Array) -> Array:
    """Return finite values as float16. Raises `CodecError` outside its range."""
    if not (np.abs(values) < 65504).all():
        raise CodecError("keys or values are not finite, or too large for codes")
    return np.array(values, np.float16, order="C")


def exact_rows(values: Array, kv: CacheFormat, channels: Array) -> Array:
    """Return values [n, 2, G, T, D] exactly: floats, or the bytes that a cache of codes stores."""
    if not kv.coded:
        return np.array(values, np.float32, order="C")
    layers, _, heads, tokens, size = values.shape
    codes = np.zeros((layers, 2, *kv.shape(heads, tokens, size)), np.int8)
    for layer, both in enumerate(values):
        for kind, (part, array) in enumerate(zip(both, codes[layer], strict=True)):
            rows = CacheRows(array, kv, size)
            rows.channels[:] = 1 if kind else channels[layer]
            rows.write(0, part)
    return np.ascontiguousarray(codes[:, :, :, :tokens])


def exact_values(stored: Array, shape: tuple[int, ...], kv: CacheFormat, channels: Array) -> Array:
    """Return float32 values of a shape [n, 2, G, T, D] of what `exact_rows` gives."""
    if not kv.coded:
        exact: Array = stored.view(np.float32).reshape(shape)
        return exact
    size = shape[-1]
    rows = stored.view(np.int8).reshape(*shape[:-1], kv.row(size))
    steps = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    steps = np.broadcast_to(steps, shape).copy()
    steps[:, 0] *= channels[..., None, :]
    values: Array = (rows[..., :size] + np.float32(0.5)) * steps
    return values


def move_codes(
    into: tuple[CacheRows, CacheRows],
    rows: slice,
    planes: Sequence[Array],
    heads: list[int] | None = None,
) -> None:
    """Copy a chunk's codes of 8 bits, or a cache's own bytes, into rows of caches of codes.

    They are one plane of bytes, or planes that are `joined`, of all heads or some.
    """
    chosen = [*range(len(into[0].array))] if heads is None else heads
    count, tokens = len(chosen), rows.stop - rows.start
    shape = (2, count, tokens, -1)
    if len(planes) == 1:
        for cache, part in zip(into, planes[0].view(np.int8).reshape(shape), strict=True):
            cache.array[:, rows] = part
        return
    codes, amplitudes = unpacked(8, [x[None] for x in planes], 2 * count * tokens)
    steps = (amplitudes.astype(np.float32) / 128).reshape(shape)
    parts = (codes ^ 128).view(np.int8).reshape(shape)
    for cache, part, step in zip(into, parts, steps, strict=True):
        cache.codes[chosen, rows], cache.steps[chosen, rows] = part, step


def _packed2(codes: Array) -> Array:
    """Pack two-bit codes [n, count], four in a byte."""
    first, second, third, fourth = (codes[:, i::4] for i in range(4))
    packed_codes: Array = first | (second << 2) | (third << 4) | (fourth << 6)
    return packed_codes
