"""The memory of one context: keys and values of every layer, which attention works on in place.

Each layer has two tensors in buffers of their own, the slots `k_cache.i` and `v_cache.i` of a step:
[kv_heads, capacity, head_dim] of floats, or codes with their scales (`hetero.backends.kv_rows`). A
token is one row of every head, so a run of tokens can be taken out and put back, whole (`read`,
`write`), layer by layer, or as it lies (`rows`), whatever lies before and behind it. Pages are
taken from the system when tokens first reach them, and are small: each head would take a huge page
for the first token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import CacheFormat
from hetero.backends.kv_rows import Rows
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
        """Of every tensor."""
        return self.kv.shape(self.kv_heads, self.capacity, self.head_dim)

    @property
    def slot_bytes(self) -> int:
        """Address space of one tensor: whole pages."""
        size = math.prod(self.shape) * self.kv.dtype.itemsize
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
        if layout.kv.coded:
            for index in range(layout.layers):
                for rows in self.rows(index):
                    rows.channels[:] = 1

    def __getitem__(self, slot: str) -> Tensor:
        return self._slots[slot]

    @property
    def nbytes(self) -> int:
        """Address space of all tensors."""
        return sum(tensor.buffer.nbytes for tensor in self._slots.values())

    def layer(self, index: int) -> tuple[Array, Array]:
        """Keys and values of a layer, the tensors as they lie: views."""
        keys, values = (self._slots[f"{port}.{index}"].array for port in CACHE_PORTS)
        return keys, values

    def rows(self, index: int) -> tuple[Rows, Rows]:
        """Keys and values of a layer, to read and write tokens of."""
        keys, values = (Rows(x, self.layout.kv, self.layout.head_dim) for x in self.layer(index))
        return keys, values

    @property
    def channels(self) -> Array | None:
        """The scales of the keys' channels [layers, kv_heads, head_dim], where keys are codes."""
        if not self.layout.kv.coded:
            return None
        return np.stack([self.rows(i)[0].channels for i in range(self.layout.layers)])

    def scale_by(self, channels: Array | None) -> None:
        """Take these for tokens to come; there are none yet. None: as it is."""
        if channels is not None and self.layout.kv.coded:
            for index in range(self.layout.layers):
                self.rows(index)[0].channels[:] = channels[index]

    def read(self, start: int, stop: int) -> Array:
        """Tokens [start, stop): a copy as float32 [layers, 2 (k and v), kv_heads, tokens, dim]."""
        self._check(start, stop)
        found = np.empty((self.layout.layers, 2, *self._part(stop - start)), np.float32)
        for index in range(self.layout.layers):
            for into, rows in zip(found[index], self.rows(index), strict=True):
                into[:] = rows.read(start, stop)
        return found

    def write(self, start: int, values: Array) -> None:
        """Put what `read` gave back at token `start` on. Raises `ValueError` for another shape."""
        wanted = (self.layout.layers, 2, *self._part(values.shape[3] if values.ndim == 5 else 0))
        if values.shape != wanted:
            raise ValueError(f"a part of this cache has the shape {wanted}, got {values.shape}")
        stop = start + values.shape[3]
        self._check(start, stop)
        for index in range(self.layout.layers):
            for rows, part in zip(self.rows(index), values[index], strict=True):
                rows.write(start, part)

    def copy_from(self, other: KvCache, tokens: int) -> None:
        """The first tokens of another cache of the same model, whatever its capacity, and nothing
        else: as they lie, with their channels, where both have the same format.
        """
        self.scale_by(other.channels)
        for index in range(self.layout.layers):
            for rows, source in zip(self.rows(index), other.rows(index), strict=True):
                rows.copy(0, source, 0, tokens)

    def _part(self, tokens: int) -> tuple[int, int, int]:
        return self.layout.kv_heads, tokens, self.layout.head_dim

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.layout.capacity:
            raise ValueError(
                f"tokens [{start}, {stop}) are outside a cache of {self.layout.capacity}"
            )
