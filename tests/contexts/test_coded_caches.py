"""Caches of codes: their tokens are what a chunk's 8 bits say, and move without being rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero.backends.formats import CacheFormat
from hetero.backends.memory import HostBuffer
from hetero.contexts.codec import CHUNK_TOKENS, HALF, RAW, ChunkCodec
from hetero.contexts.planes import CodecError
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache

TOKENS = 3 * CHUNK_TOKENS


def layout(size: int, kv: CacheFormat = CacheFormat.Q8) -> CacheLayout:
    return CacheLayout(layers=2, kv_heads=2, capacity=64, head_dim=size, kv=kv)


def channels(size: int, random: np.random.Generator) -> Any:
    return random.uniform(0.1, 5, (2, 2, size)).astype(np.float32)


def filled(size: int, random: np.random.Generator, scales: Any = None) -> KvCache:
    cache = KvCache(layout(size), HostBuffer)
    cache.scale_by(scales)
    values = random.standard_normal((2, 2, 2, TOKENS, size)).astype(np.float32)
    values *= np.exp(2 * random.standard_normal((2, 2, 2, TOKENS, 1))).astype(np.float32)
    cache.write(0, values)
    return cache


def bytes_of(cache: KvCache, tokens: int = TOKENS) -> list[bytes]:
    """Of codes and steps."""
    both = [x for layer in range(2) for x in cache.rows(layer)]
    return [x.codes[:, :tokens].tobytes() + x.steps[:, :tokens].tobytes() for x in both]


@pytest.mark.parametrize("size", [7, 12, 64])
def test_a_token_is_within_half_a_step(size: int) -> None:
    random = np.random.default_rng(size)
    cache, scales = KvCache(layout(size), HostBuffer), channels(size, random)
    cache.scale_by(scales)
    values = random.standard_normal((2, 2, 2, TOKENS, size)).astype(np.float32)
    values[:, :, :, 5] = 0
    cache.write(3, values)
    read = cache.read(3, 3 + TOKENS)
    largest = np.abs(values / np.stack([scales, np.ones_like(scales)], 1)[:, :, :, None]).max(-1)
    bound = largest[..., None] / 256 * (1 + 2**-10) + 1e-7
    bound = bound * np.stack([scales, np.ones_like(scales)], 1)[:, :, :, None]
    assert (np.abs(read - values) <= bound).all()
    assert not read[:, :, :, 5].any()


@pytest.mark.parametrize("bits", [8, RAW])
@pytest.mark.parametrize("size", [12, 64])
def test_chunks_of_a_cache_come_back_to_the_byte(size: int, bits: int) -> None:
    """Into a cache of the same channels, wherever they lie; its own channels are the codec's."""
    random = np.random.default_rng(size + bits)
    scales = channels(size, random)
    source, other = filled(size, random, scales), filled(size, random, scales)
    codec = ChunkCodec(layout(size), scales)
    spans = [(0, 16), (16, 32), (32, 37)]
    codes = [(start, codec.encode_cached(source, start, stop, bits)) for start, stop in spans]
    for layer in range(2):
        codec.decode_into(codes, layer, *other.rows(layer))
    assert bytes_of(other, 37) == bytes_of(source, 37)
    for start, part in codes:
        assert part.nbytes == codec.nbytes(part.tokens, bits)
        np.testing.assert_array_equal(codec.decode(part), source.read(start, start + part.tokens))
        np.testing.assert_allclose(
            codec.decode(codec.encode(source.read(start, start + part.tokens), bits)),
            codec.decode(part),
            atol=float(np.abs(codec.decode(part)).max()) / 64,
        )


@pytest.mark.parametrize("bits", [2, 4, 8, HALF, RAW])
def test_chunks_go_into_caches_of_other_channels(bits: int) -> None:
    random = np.random.default_rng(bits)
    scales = channels(12, random)
    source, other = filled(12, random), filled(12, random)
    codec = ChunkCodec(layout(12), scales)
    codes = codec.encode_cached(source, 0, 16, bits)
    for layer in range(2):
        codec.decode_into([(0, codes)], layer, *other.rows(layer))
    wanted, read = codec.decode(codes), other.read(0, 16)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    assert (np.abs(read - wanted) <= largest / 250).all()
    rough = {2: 1 / 2, 4: 1 / 8}.get(bits, 1 / 60)
    off = np.abs(read - source.read(0, 16))
    assert (off[:, 1] <= rough * np.abs(source.read(0, 16))[:, 1].max(-1, keepdims=True)).all()


def test_values_that_are_not_finite_are_no_codes() -> None:
    random = np.random.default_rng(0)
    cache, codec = filled(12, random), ChunkCodec(layout(12))
    cache.rows(1)[0].write(3, np.full((2, 1, 12), np.nan, np.float32))
    assert np.isnan(cache.read(3, 4)).any()
    with pytest.raises(CodecError, match="not finite"):
        codec.encode_cached(cache, 0, 16, 8)


@pytest.mark.parametrize("kv", CacheFormat)
def test_a_copy_has_the_same_numbers(kv: CacheFormat) -> None:
    random = np.random.default_rng(1)
    source = filled(12, random, channels(12, random))
    other = KvCache(layout(12, kv), HostBuffer)
    other.copy_from(source, 20)
    if kv is CacheFormat.Q8:
        assert bytes_of(other, 20) == bytes_of(source, 20)
    wanted = source.read(0, 20)
    rounded = wanted.astype(np.float16) if kv is CacheFormat.F16 else wanted
    np.testing.assert_array_equal(other.read(0, 20), rounded)
    back = KvCache(layout(12), HostBuffer)
    back.copy_from(other, 20)
    np.testing.assert_allclose(back.read(0, 20), wanted, atol=float(np.abs(wanted).max()) / 100)
