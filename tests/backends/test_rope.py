"""Rotary tables against `transformers`' own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from hetero.backends import rope_tables
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.ops import Rope

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HEAD_DIM = 64
LENGTH = 4096

SCALINGS: dict[str, tuple[RopeScaling, dict[str, Any]]] = {
    "linear": (RopeScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeScaling(
            kind="llama3",
            factor=32.0,
            original_max_position=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=1024),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "yarn-given": (
        RopeScaling(
            kind="yarn",
            factor=8.0,
            original_max_position=512,
            attention_factor=1.25,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.25,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
    "proportional": (
        RopeScaling(kind="proportional", factor=2.0, partial_rotary_factor=0.3),
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.3},
    ),
    "yarn-mscale": (
        RopeScaling(
            kind="yarn", factor=40.0, original_max_position=100, mscale=0.8, mscale_all_dim=1.2
        ),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 100,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
    ),
}


def theirs(parameters: dict[str, Any], theta: float) -> tuple[np.ndarray[Any, Any], float]:
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device="cpu")
    return frequencies.numpy(), factor


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    scaling, parameters = SCALINGS[name]
    op = Rope(
        heads=2, kv_heads=2, head_dim=HEAD_DIM, theta=theta, max_position=LENGTH, scaling=scaling
    )
    frequencies, factor = theirs(parameters, theta)
    np.testing.assert_allclose(rope_tables.inverse_frequencies(op), frequencies, rtol=2e-6)
    assert rope_tables.attention_factor(scaling) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_unscaled_tables_are_llamas(theta: float) -> None:
    op = Rope(heads=2, kv_heads=2, head_dim=HEAD_DIM, theta=theta, max_position=LENGTH)
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": theta, "rope_type": "default"},
    )
    embedding = LlamaRotaryEmbedding(config)
    positions = torch.arange(64)[None]
    wanted_cos, wanted_sin = embedding(torch.zeros(1, 64, HEAD_DIM), positions)
    cos, sin = rope_tables.tables(op)
    half = HEAD_DIM // 2
    np.testing.assert_allclose(cos[:64], wanted_cos[0, :, :half].numpy(), atol=1e-5)
    np.testing.assert_allclose(sin[:64], wanted_sin[0, :, :half].numpy(), atol=1e-5)


def test_partial_rotation_has_fewer_frequencies() -> None:
    op = Rope(heads=2, kv_heads=2, head_dim=80, rotary_dim=32, theta=1e4, max_position=8)
    whole = Rope(heads=2, kv_heads=2, head_dim=32, theta=1e4, max_position=8)
    np.testing.assert_array_equal(
        rope_tables.inverse_frequencies(op), rope_tables.inverse_frequencies(whole)
    )
    assert rope_tables.tables(op)[0].shape == (8, 16)


def test_tables_turn_by_one_radian_a_position() -> None:
    op = Rope(heads=1, kv_heads=1, head_dim=2, theta=1e4, max_position=5)
    cos, sin = rope_tables.tables(op)
    np.testing.assert_allclose(cos[:, 0], np.cos(np.arange(5)))
    np.testing.assert_allclose(sin[:, 0], np.sin(np.arange(5)))
