"""Bits by head: the least loss in so many bytes, and what is measured of a model."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import LLM
from hetero.backends.kv_codes import OWN_BITS
from hetero.contexts.codec import CHUNK_TOKENS, MIXED, ChunkCodec, codec_of
from hetero.contexts.head_bits import alike, by_head, measure_heads
from hetero.runtime.kv.kv_cache import CacheLayout
from tests.runtime.models import tiny_model

LAYERS, HEADS = 2, 2
CODEC = ChunkCodec(CacheLayout(layers=LAYERS, kv_heads=HEADS, capacity=64, head_dim=8))
LOSSES = st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5).map(sorted)


def nbytes(bits: tuple[int, ...]) -> int:
    """The bytes of a chunk whose heads, layer after layer, have these bits."""
    layers = np.reshape(bits, (LAYERS, HEADS)).tolist()
    codec = ChunkCodec(CacheLayout(layers=LAYERS, kv_heads=HEADS, capacity=64, head_dim=8),
                       mixed=[layers])  # fmt: skip
    return codec.nbytes(CHUNK_TOKENS, MIXED)


SIZES = {bits: nbytes(bits) for bits in product(OWN_BITS, repeat=LAYERS * HEADS)}


@pytest.mark.parametrize("apart", [True, False])
@given(losses=st.lists(LOSSES, min_size=4, max_size=4), ratio=st.floats(0.2, 1))
def test_no_other_assignment_loses_less(
    apart: bool, losses: list[list[float]], ratio: float
) -> None:
    """Heads are assigned one by one, or all heads of each layer together."""
    count = HEADS if apart else 1
    by_bits = [dict(zip(OWN_BITS, own, strict=True)) for own in losses[: LAYERS * count]]
    budget = ratio * CODEC.nbytes(CHUNK_TOKENS, 8)
    every = list(product(OWN_BITS, repeat=LAYERS * count))
    every = [x for x in every if SIZES[spread(x)] <= budget]
    bits = by_head([by_bits[count * i :][:count] for i in range(LAYERS)], CODEC, ratio)
    assert [len(own) for own in bits] == [HEADS] * LAYERS
    chosen = tuple(x for own in bits for x in own[:: HEADS // count])
    assert spread(chosen) == tuple(x for own in bits for x in own)
    if not every:
        assert {*chosen} == {2}
        return
    assert SIZES[spread(chosen)] <= budget

    def lost(bits: tuple[int, ...]) -> float:
        return sum(own[x] for own, x in zip(by_bits, bits, strict=True))

    assert lost(chosen) == pytest.approx(min(map(lost, every)), abs=1e-9)


def spread(bits: tuple[int, ...]) -> tuple[int, ...]:
    """Bits of layers or of heads as those of heads."""
    each = LAYERS * HEADS // len(bits)
    return tuple(x for x in bits for _ in range(each))


def test_more_bits_are_better_where_nothing_was_measured() -> None:
    assert by_head(alike(LAYERS), CODEC, 1.0) == [[8] * HEADS] * LAYERS
    half = by_head(alike(LAYERS), CODEC, 0.5)
    assert SIZES[tuple(x for own in half for x in own)] <= 0.5 * CODEC.nbytes(CHUNK_TOKENS, 8)
    assert min(map(min, half)) > 2


@pytest.mark.full
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_losses_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str, apart: bool
) -> None:
    """Each alone, so that the order does not matter, and caches come back as they were."""
    monkeypatch.setattr("hetero.contexts.head_bits.LONGEST_S", 1e9 if apart else 0.0)
    with LLM(str(tiny_model(tmp_path)), device="npu", kv=kv, max_seq_len=256) as llm:
        engine, context = llm.engine, llm.new_context()
        layout = context.cache.layout
        random = np.random.default_rng(0)
        scales = random.uniform(0.5, 2, (layout.layers, layout.kv_heads, layout.head_dim))
        codec = codec_of(layout, list(scales.astype(np.float32)))
        engine.contexts.scale_by(codec.channels)
        text = random.integers(0, llm.model.config.vocab_size, 200).tolist()
        losses = measure_heads(context, codec, text, engine, 0.375)
        assert len(losses) == layout.layers
        for layer in losses:
            assert len(layer) == (layout.kv_heads if apart else 1)
            for own in layer:
                assert list(own) == list(OWN_BITS)
                assert list(own.values()) == sorted(own.values())
                assert own[2] > own[8]
        half = measure_heads(context, codec, text, engine, 0.5)
        of_three = [[[own[3] for own in layer] for layer in x] for x in (half, losses)]
        assert of_three[0] == of_three[1], "2 bits alone are not tried"
        assert measure_heads(context, codec, text, engine, 0.375) == losses
        assert context.cached == 0
        for short in (text[:31], []):
            assert measure_heads(context, codec, short, engine, 0.375) == alike(layout.layers)
