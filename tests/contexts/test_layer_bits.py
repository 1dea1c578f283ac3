"""Bits by layer: the least loss in so many bytes, and what is measured of a model."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import LLM
from hetero.backends.kv_codes import OWN_BITS
from hetero.contexts.codec import CHUNK_TOKENS, ChunkCodec, codec_of
from hetero.contexts.layer_bits import alike, by_layer, measure_layers
from hetero.runtime.kv.kv_cache import CacheLayout
from tests.runtime.models import tiny_model

LAYERS = 3
CODEC = ChunkCodec(CacheLayout(layers=LAYERS, kv_heads=2, capacity=64, head_dim=8))
LOSSES = st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5).map(sorted)


def nbytes(bits: tuple[int, ...]) -> int:
    return sum(sum(CODEC.plane_bytes(CHUNK_TOKENS, x, i)) for i, x in enumerate(bits))


@given(losses=st.lists(LOSSES, min_size=LAYERS, max_size=LAYERS), ratio=st.floats(0.2, 1))
def test_no_other_assignment_loses_less(losses: list[list[float]], ratio: float) -> None:
    by_bits = [dict(zip(OWN_BITS, own, strict=True)) for own in losses]
    budget = ratio * CODEC.nbytes(CHUNK_TOKENS, 8)
    every = [x for x in product(OWN_BITS, repeat=LAYERS) if nbytes(x) <= budget]
    chosen = tuple(by_layer(by_bits, CODEC, ratio))
    if not every:
        assert chosen == (2,) * LAYERS
        return
    assert nbytes(chosen) <= budget

    def lost(bits: tuple[int, ...]) -> float:
        return sum(own[x] for own, x in zip(by_bits, bits, strict=True))

    assert lost(chosen) == pytest.approx(min(map(lost, every)), abs=1e-9)


def test_more_bits_are_better_where_nothing_was_measured() -> None:
    assert by_layer(alike(LAYERS), CODEC, 1.0) == [8] * LAYERS
    half = by_layer(alike(LAYERS), CODEC, 0.5)
    assert nbytes(tuple(half)) <= 0.5 * CODEC.nbytes(CHUNK_TOKENS, 8)
    assert min(half) > 2


@pytest.mark.full
@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_losses_of_a_model(tmp_path: Path, kv: str) -> None:
    """Each alone, so that the order does not matter, and caches come back as they were."""
    with LLM(str(tiny_model(tmp_path)), device="npu", kv=kv, max_seq_len=256) as llm:
        engine, context = llm.engine, llm.new_context()
        layout = context.cache.layout
        random = np.random.default_rng(0)
        scales = random.uniform(0.5, 2, (layout.layers, layout.kv_heads, layout.head_dim))
        codec = codec_of(layout, list(scales.astype(np.float32)))
        engine.contexts.scale_by(codec.channels)
        text = random.integers(0, llm.model.config.vocab_size, 200).tolist()
        losses = measure_layers(context, codec, text, engine, 0.375)
        assert len(losses) == layout.layers
        for own in losses:
            assert list(own) == list(OWN_BITS)
            assert list(own.values()) == sorted(own.values())
            assert own[2] > own[8]
        half = measure_layers(context, codec, text, engine, 0.5)
        assert [x[3] for x in half] == [x[3] for x in losses], "2 bits alone are not tried"
        assert measure_layers(context, codec, text, engine, 0.375) == losses
        assert context.cached == 0
        for short in (text[:31], []):
            assert measure_layers(context, codec, short, engine, 0.375) == alike(layout.layers)
