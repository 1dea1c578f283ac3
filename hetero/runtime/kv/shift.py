"""Continuing in a full context: the oldest tokens but the first are dropped, the others move up.

Cached keys have their rotary embedding applied, which turns pair i of a head's dimensions by
position · f_i: turning them back by the number of dropped tokens is all that a move takes. It is an
approximation: values, and keys above the first layer, were computed from the dropped tokens. The
first tokens stay because much attention rests on them whatever they say (attention sinks:
StreamingLLM, arXiv 2309.17453, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.ops import Rope
from hetero.backends.rope_tables import inverse_frequencies
from hetero.runtime.kv.kv_cache import KvCache

Array = npt.NDArray[Any]
Ropes: TypeAlias = Sequence[Rope | None]
MOVED_TOGETHER: Final = 1024  # tokens: bounds the copies


def turned_back(keys: Array, op: Rope, tokens: int) -> Array:
    """Return float32 keys [kv_heads, T, head_dim] of the tokens `tokens` positions earlier."""
    half = op.rotated // 2
    angles = tokens * inverse_frequencies(op)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = keys.astype(np.float32)
    first, second = keys[..., :half].astype(np.float32), turned[..., half : 2 * half].copy()
    turned[..., :half] = first * cos + second * sin
    turned[..., half : 2 * half] = second * cos - first * sin
    return turned


def forget(cache: KvCache, ropes: Ropes, start: int, stop: int, cached: int) -> None:
    """Drop tokens [start, stop), and move [stop, cached) to their place.

    `ropes` has the rotary embedding of each layer, None for a layer without.
    In windows that have lost some tokens before `stop` only the positions of rows change.
    """
    count = stop - start
    lost = cache.low > start
    for index in range(cache.layout.layers):
        low, base = cache.resident(index)
        keys, values = cache.rows(index)
        moved = 0 if lost and low else count
        for at in range(max(stop, low), cached, MOVED_TOGETHER):
            end = min(at + MOVED_TOGETHER, cached)
            rope = ropes[index]
            if rope is None:
                keys.copy(at - base - moved, keys, at - base, end - base)
            else:
                turned = turned_back(keys.read(at - base, end - base), rope, count)
                keys.write(at - base - moved, turned)
            values.copy(at - base - moved, values, at - base, end - base)
        cache.wrote(index, max(stop, low) - moved, cached - moved)
    if lost:
        cache.base, cache.low = cache.base - count, max(cache.low, stop) - count
