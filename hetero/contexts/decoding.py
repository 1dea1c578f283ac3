"""Decoders of chunks into a cache: the host, or a device that decodes during its other calls.

Decoding runs on the thread that loads. A device reads codes from one small staging buffer (a
quarter of the floats' bytes, or less), as many chunks of a layer at a time as fit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.memory import Tensor
from hetero.backends.ops import DecodeChunks
from hetero.backends.optional import SupportsThreads
from hetero.backends.protocol import BoundCall, Device, DeviceKind, port_dtype, port_shape
from hetero.contexts.codec import CHUNK_TOKENS, DECODED_TOGETHER, HALF, RAW, ChunkCodec, Codes
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache

Parts: TypeAlias = Sequence[tuple[int, Codes]]
MASKED: Final = 31  # heads of which a chunk may have some: bits of an int32
STAGED_BYTES: Final = (
    10 * DECODED_TOGETHER
)  # what decoding on the host would take (`workspace_bytes`)


class ChunkDecoder(Protocol):
    """A decoder of chunks, used by one thread at a time."""

    name: str

    def decode(self, chunks: Parts, layer: int, cache: KvCache) -> None:
        """Decode a layer of chunks, each at its first token; it is then in the cache."""


class HostDecoder:
    """Decode with numpy on the calling thread."""

    name = "host"

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def decode(self, chunks: Parts, layer: int, cache: KvCache) -> None:
        """Decode a layer of chunks into the cache."""
        self._codec.decode_into(chunks, layer, *cache.rows(layer))
        for start, codes in chunks:
            cache.wrote(layer, start, start + codes.tokens)


class SharedDecoder:
    """A decoder shared by several threads, one layer at a time."""

    def __init__(self, inner: ChunkDecoder) -> None:
        self.name = inner.name
        self._inner, self._lock = inner, threading.Lock()

    def decode(self, chunks: Parts, layer: int, cache: KvCache) -> None:
        """Decode a layer of chunks into the cache, under the lock."""
        with self._lock:
            self._inner.decode(chunks, layer, cache)


class DeviceDecoder:
    """Decode with an operation of a device, in a queue of its own.

    The host decodes partial chunks and floats, and everything once the device has failed; `failure`
    is then the reason, and the next step will meet the failure too.
    """

    def __init__(self, name: str, device: Device, codec: ChunkCodec, op: DecodeChunks) -> None:
        self.name, self.failure = name, ""
        self._device, self._host, self._op = device, HostDecoder(codec), op
        self._codec = codec
        fit = max(1, min(op.capacity // op.tokens, op.room // op.chunk_bytes(2)))
        layers = range(len(codec.channels))
        kinds = [len(codec.groups(x, layer)) for x in codec.mixed_bits for layer in layers]
        self._rows = fit * max([1, *kinds])  # a chunk has a row for each of its bits
        self._codes, self._table = (self._staging(port) for port in ("codes", "table"))
        self._kernels = [
            device.prepare(op, {"channels": np.ascontiguousarray(channels.reshape(-1))})
            for channels in codec.channels
        ]
        self._calls: weakref.WeakKeyDictionary[KvCache, dict[int, BoundCall]] = (
            weakref.WeakKeyDictionary()
        )

    def decode(self, chunks: Parts, layer: int, cache: KvCache) -> None:
        """Decode a layer of chunks into the cache, on the device or else on the host."""
        taken = [] if self.failure else [x for x in chunks if self._takes(x[1])]
        left = chunks if self.failure else [x for x in chunks if not self._takes(x[1])]
        if left:
            self._host.decode(left, layer, cache)
        try:
            for part in self._batches(taken, layer):
                self._run(part, layer, cache)
        except DeviceError as error:
            self.failure = str(error)
            self._host.decode(taken, layer, cache)

    def _takes(self, codes: Codes) -> bool:
        return codes.bits != RAW and codes.tokens == CHUNK_TOKENS

    def _batches(self, chunks: Parts, layer: int) -> Iterator[Parts]:
        """Yield batches that fit the buffer and the table."""
        part: list[tuple[int, Codes]] = []
        room, left = self._op.room, self._rows
        for chunk in chunks:
            groups = self._codec.groups(chunk[1].bits, layer)
            size = sum(self._op.chunk_bytes(bits, len(heads)) for bits, heads in groups)
            if part and (size > room or len(groups) > left):
                yield part
                part, room, left = [], self._op.room, self._rows
            part.append(chunk)
            room, left = room - size, left - len(groups)
        if part:
            yield part

    def _run(self, part: Parts, layer: int, cache: KvCache) -> None:
        at, rows = 0, []
        for start, codes in part:
            for bits, heads in self._codec.groups(codes.bits, layer):
                whole = len(heads) == self._op.kv_heads
                rows.append((start, bits, at, 0 if whole else sum(1 << x for x in heads)))
                at += self._op.chunk_bytes(bits, len(heads))
        planes = [plane[layer] for _, codes in part for plane in codes.planes]
        np.concatenate(planes, out=self._codes.array[:at])
        self._table.array[: len(rows)] = rows
        self._table.array[len(rows) :] = 0
        call = self._bound(layer, cache)
        if self._device.capabilities.asynchronous:
            call.submit().block()
        else:
            call.run()

    def _bound(self, layer: int, cache: KvCache) -> BoundCall:
        """Return the call of a cache and layer, bound once.

        Unused rows of the table are no chunks.
        """
        calls = self._calls.setdefault(cache, {})
        if layer not in calls:
            ports = {port: cache[f"{port}.{layer}"] for port in ("k_cache", "v_cache")}
            ports |= {"codes": self._codes, "table": self._table}
            calls[layer] = self._kernels[layer].bind(ports, self._rows)
        return calls[layer]

    def _staging(self, port: str) -> Tensor:
        shape, dtype = port_shape(self._op, port, self._rows), port_dtype(self._op, port)
        return Tensor(self._device.allocate(int(np.prod(shape)) * dtype.itemsize), shape, dtype)


def decode_operation(codec: ChunkCodec, layout: CacheLayout) -> DecodeChunks:
    """Return the op that decodes a model's chunks into its caches."""
    whole = codec.nbytes(CHUNK_TOKENS, HALF) // codec.layers
    return DecodeChunks(
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        capacity=layout.capacity,
        room=max(STAGED_BYTES, whole),
        by_token=codec.by_token,
        keys_by_token=codec.keys_by_token,
        kv=layout.kv,
    )


def decoders(
    devices: Mapping[DeviceKind, Device], codec: ChunkCodec, layout: CacheLayout
) -> Iterator[ChunkDecoder]:
    """Yield the host's decoder, and those of devices that can decode during their other calls.

    Their caches are coherent with the host.
    """
    yield HostDecoder(codec)
    if layout.head_dim * CHUNK_TOKENS % 4 or not layout.alike or layout.kv_heads > MASKED:
        return
    op = decode_operation(codec, layout)
    for kind, device in devices.items():
        able = device.capabilities.coherent and device.accepts(op)
        if able and isinstance(device, SupportsThreads):
            yield DeviceDecoder(kind, device.clone_for_thread(), codec, op)
