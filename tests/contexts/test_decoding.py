"""Codes that a device decodes into a cache beside its other calls: the host's, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyopencl")

from hetero import Service
from hetero.backends import ops
from hetero.backends.formats import CacheFormat
from hetero.backends.kv_rows import random_rows
from hetero.backends.memory import HostBuffer
from hetero.backends.protocol import Device
from hetero.backends.registry import open_device
from hetero.contexts.codec import CHUNK_TOKENS, HALF, RAW, ChunkCodec, Codes
from hetero.contexts.decoding import DeviceDecoder, HostDecoder, decode_operation, decoders
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache
from tests.contexts.models import open_llm
from tests.runtime.models import tiny_model


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_device("opencl") as opened:
        yield opened


def poisoned(layout: CacheLayout, channels: Any = None) -> KvCache:
    """Codes have these scales of channels, or others, the same each time."""
    cache, random = KvCache(layout, HostBuffer), np.random.default_rng(5)
    for layer in range(layout.layers):
        for rows, keys in zip(cache.rows(layer), (True, False), strict=True):
            random_rows(rows, 0, random, keys=keys)
    cache.scale_by(channels)
    return cache


def chunks_of(codec: ChunkCodec, count: int, seed: int) -> list[tuple[int, Codes]]:
    """Chunks of every kind in any order, the last unfinished."""
    random = np.random.default_rng(seed)
    found = []
    for place, i in enumerate(random.permutation(count).tolist()):
        bits = int(random.choice([*codec.nested, HALF, RAW, *codec.mixed_bits]))
        tokens = CHUNK_TOKENS if i < count - 1 else 5
        shape = codec.layers, 2, codec.heads, tokens, codec.size
        values = random.standard_normal(shape).astype(np.float32)
        assert place < count
        found.append((CHUNK_TOKENS * i, codec.encode(values, bits if i < count - 1 else RAW)))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("kv", "own"), [("f32", False), ("f16", False), ("q8", False), ("q8", True)]
)
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 12), (4, 32), (1, 128)])
def test_a_device_decodes_what_the_host_does(
    device: Device, kv: str, own: bool, heads: int, size: int
) -> None:
    """Codes of 8 bits as they are, in caches with the codec's own channels."""
    cached = CacheFormat(kv)
    layout = CacheLayout(layers=2, kv_heads=heads, capacity=330, head_dim=size, kv=cached)
    random = np.random.default_rng(size)
    scales = random.uniform(0.1, 3, (2, heads, size))
    own_bits = [[8, 3, 2, 6][:heads], 4]
    codec = ChunkCodec(layout, scales, mixed=[[6, 3], [8, 2], [4, 6], own_bits])
    channels = codec.channels if own else None
    beside, op = device.clone_for_thread(), decode_operation(codec, layout)
    assert beside is not None
    little = ops.DecodeChunks(**{**vars(op), "room": op.chunk_bytes(16) + op.chunk_bytes(8)})
    chunks = chunks_of(codec, 20, size)
    wanted = poisoned(layout, channels)
    for layer in range(2):
        HostDecoder(codec).decode(chunks, layer, wanted)
    for each in (op, little):  # all at once, and in several calls
        decoder, found = DeviceDecoder("gpu", beside, codec, each), poisoned(layout, channels)
        for number in range(4):  # a shorter load leaves nothing of a longer one before it
            part = chunks[number % 2 * 12 :]
            for layer in range(2):
                decoder.decode(part, layer, found)
        assert not decoder.failure
        for layer in range(2):
            for a, b in zip(found.layer(layer), wanted.layer(layer), strict=True):
                np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_a_device_that_is_lost_leaves_decoding_to_the_host() -> None:
    layout = CacheLayout(layers=1, kv_heads=2, capacity=64, head_dim=8)
    codec = ChunkCodec(layout)
    with open_device("opencl") as device:
        host, decoder = decoders({"gpu": device}, codec, layout)
    assert isinstance(decoder, DeviceDecoder)
    chunks, wanted, found = chunks_of(codec, 4, 0), poisoned(layout), poisoned(layout)
    host.decode(chunks, 0, wanted)
    decoder.decode(chunks, 0, found)
    assert "closed" in decoder.failure
    for a, b in zip(found.layer(0), wanted.layer(0), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
@pytest.mark.parametrize("way", ["gpu", "tensor level, rest on the npu"])
def test_a_service_restores_with_its_gpu(way: str, tmp_path: Path) -> None:
    """Whatever computes attention: the devices work on the same caches."""
    folder = tiny_model(tmp_path)
    options: dict[str, Any] = {"context_memory": "2MiB", "context_disk": "8MiB", "kv_bits": "8"}
    with (
        open_llm(folder, way) as llm,
        Service(llm, directory=tmp_path / "kept", recompute=False, **options) as service,
    ):
        working, layout = service._working, service._active.cache.layout
        host, decoder = decoders(llm.engine.devices, service._codec, layout)
        app, found = service.bind("a"), []
        for each in (host, decoder):
            working._decoder = each
            context, other = app.new_context(chat=False), app.new_context(chat=False)
            context.call("abc def ghi jkl mno", max_tokens=30)
            other.call("another text of some length", max_tokens=30)
            found.append(context.call(" pqr", max_tokens=12).tokens)
            assert context.last_switch is not None
            assert context.last_switch.loaded_tokens >= 32
            context.delete()
            other.delete()
        assert found[0] == found[1]
        assert isinstance(decoder, DeviceDecoder)
        assert not decoder.failure
