"""The memory of one context: keys and values of every layer, which attention works on in place.

Each layer has two tensors [kv_heads, capacity, head_dim], float32 or float16, in buffers of their
own: the slots `k_cache.i` and `v_cache.i` of a step. A token is one row of every head, so a run of
tokens can be taken out and put back, whole (`read`, `write`) or layer by layer (`layer`), whatever
lies before and behind it. Pages are taken from the system when tokens first reach them, and are
small: each head would take a huge page for the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import CacheFormat
from hetero.backends.memory import PAGE_BYTES, HostBuffer, Tensor
from hetero.backends.protocol import CACHE_PORTS
from hetero.errors import memory_for

Allocate: TypeAlias = Callable[[int], HostBuffer]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The shape of every cache of a model. `capacity` is in tokens, padding of calls included."""

    layers: int
    kv_heads: int
    capacity: int
    head_dim: int
    kv: CacheFormat = CacheFormat.F32

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors, as the decoder's nodes have them."""
        return tuple(f"{port}.{layer}" for layer in range(self.layers) for port in CACHE_PORTS)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of every tensor: [kv_heads, capacity, head_dim]."""
        return self.kv_heads, self.capacity, self.head_dim

    @property
    def slot_bytes(self) -> int:
        """Address space of one tensor: whole pages."""
        size = self.kv_heads * self.capacity * self.head_dim * self.kv.dtype.itemsize
        return -(-size // PAGE_BYTES) * PAGE_BYTES

    @property
    def nbytes(self) -> int:
        """Address space of one context's cache; what is resident depends on its length."""
        return len(self.slots) * self.slot_bytes


class KvCache:
    """Keys and values of up to `layout.capacity` tokens.

    `allocate` gives the memory (`Device.allocate` of the device with the stricter needs). Steps
    that were bound to a cache die with it. Raises `UserError` where the system refuses the memory.
    """

    def __init__(self, layout: CacheLayout, allocate: Allocate) -> None:
        self.layout = layout
        with memory_for(f"a context of {layout.nbytes / 2**20:.1f} MiB"):
            self._slots = {
                name: Tensor(allocate(layout.slot_bytes), layout.shape, layout.kv.dtype)
                for name in layout.slots
            }

    def __getitem__(self, slot: str) -> Tensor:
        return self._slots[slot]

    @property
    def nbytes(self) -> int:
        """Address space of all tensors."""
        return sum(tensor.buffer.nbytes for tensor in self._slots.values())

    def layer(self, index: int) -> tuple[Array, Array]:
        """Keys and values of a layer, [kv_heads, capacity, head_dim]: views."""
        keys, values = (self._slots[f"{port}.{index}"].array for port in CACHE_PORTS)
        return keys, values

    def read(self, start: int, stop: int) -> Array:
        """Tokens [start, stop): a copy as float32 [layers, 2 (k and v), kv_heads, tokens, dim]."""
        self._check(start, stop)
        found = np.empty((self.layout.layers, 2, *self._part(stop - start)), np.float32)
        for index in range(self.layout.layers):
            for into, cache in zip(found[index], self.layer(index), strict=True):
                into[:] = cache[:, start:stop]
        return found

    def write(self, start: int, values: Array) -> None:
        """Put what `read` gave back at token `start` on. Raises `ValueError` for another shape."""
        wanted = (self.layout.layers, 2, *self._part(values.shape[3] if values.ndim == 5 else 0))
        if values.shape != wanted:
            raise ValueError(f"a part of this cache has the shape {wanted}, got {values.shape}")
        stop = start + values.shape[3]
        self._check(start, stop)
        for index in range(self.layout.layers):
            for cache, part in zip(self.layer(index), values[index], strict=True):
                cache[:, start:stop] = part

    def copy_from(self, other: KvCache, tokens: int) -> None:
        """The first tokens of another cache of the same model, whatever its capacity."""
        for index in range(self.layout.layers):
            for cache, source in zip(self.layer(index), other.layer(index), strict=True):
                cache[:, :tokens] = source[:, :tokens]

    def _part(self, tokens: int) -> tuple[int, int, int]:
        return self.layout.kv_heads, tokens, self.layout.head_dim

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.layout.capacity:
            raise ValueError(
                f"tokens [{start}, {stop}) are outside a cache of {self.layout.capacity}"
            )
