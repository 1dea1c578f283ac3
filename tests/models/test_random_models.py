"""Random models: the shapes of known models, reproducible numbers of a sane size."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import Float32Array, PackedWeight, padded
from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.layout import expert_matrices
from hetero.models.random_models import (
    KNOWN_MODELS,
    MAX_POSITION,
    RandomWeights,
    known_config,
    limited,
)
from tests.models.model_helpers import small_config

# Parameters as published by each model's authors, in millions.
PARAMETERS = {
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3-8b": 8030,
    "llama-2-7b": 6738,
    "tinyllama-1.1b": 1100,
    "internlm2-1.8b": 1889,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1544,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "smollm2-135m": 134.5,
    "smollm2-1.7b": 1711,
    "falcon3-7b": 7456,
    "qwen3-30b-a3b": 30532,
    "qwen3-moe-3b": 2792,
    "mistral-7b": 7242,
    "qwen1.5-1.8b": 1837,
    "gemma-2b": 2506,
    "gemma-2-2b": 2614,
    "phi-2": 2780,
    "phi-3-mini": 3821,
    "opt-1.3b": 1316,
    "lfm2-1.2b": 1170,
    "gemma-3-270m": 268,
    "gemma-3-1b": 1000,
    "gemma-3-4b": 3880,
    # Of the text, with keys that are values twice, and without the table of the layers' inputs.
    "gemma-4-e2b": 2279,
    "gemma-4-e4b": 4644,
    "gemma-4-12b": 11922,
    "gemma-4-31b": 30806,
    "gemma-4-26b-a4b": 25200,
    "qwen3.5-0.8b": 752,
    "qwen3.5-2b": 1882,
    "qwen3.5-4b": 4206,
    "qwen3.5-9b": 8954,
    "qwen3.5-27b": 26896,
    "phi-3.5-mini": 3821,
    "phi-4-mini": 3836,
    "granite-3.3-2b": 2534,
    "granite-4.0-micro": 3403,
    "minicpm-2b": 2725,
    "smollm3-3b": 3075,
    "ministral-3-3b": 3429,
    "ministral-3-8b": 8490,
    "olmo-2-1b": 1485,
    "olmo-3-7b": 7298,
    "exaone-4.0-1.2b": 1279,
    "glm-4-9b": 9400,
    "ernie-4.5-0.3b": 361,
    "hunyuan-1.8b": 1791,
    "command-r7b": 8028,
    "qwen3.5-35b-a3b": 34660,
    "gpt-oss-20b": 20915,
    "gpt-oss-120b": 116829,
    "lfm2-8b-a1b": 8340,
}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    config = KNOWN_MODELS[name]
    total = sum(x.n * x.k * x.count for x in config.matmuls())
    for i in range(config.num_layers):
        total += sum(x.n * x.k for x in expert_matrices(config, i))
        total += config.experts.count * config.hidden_size if config.routed(i) else 0
    total += 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    total += config.positions * config.hidden_size
    assert total / 1e6 == pytest.approx(PARAMETERS[name], rel=2e-3)


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        known_config("llama3.2-1b")
    assert str(caught.value) == (
        "'llama3.2-1b' is not a known model; did you mean 'llama-3.2-1b'? choose one of: "
        + ", ".join(KNOWN_MODELS)
    )


def test_the_context_is_limited() -> None:
    assert limited(KNOWN_MODELS["llama-3.2-1b"]).max_position == MAX_POSITION
    assert limited(KNOWN_MODELS["tinyllama-1.1b"]).max_position == 2048
    assert open_model("random:LLAMA-3.2-1b").config.max_position == MAX_POSITION


@pytest.mark.parametrize("weights", [x for x in WeightFormat if not x.of_file])
def test_the_same_seed_gives_the_same_numbers(weights: WeightFormat) -> None:
    config = small_config(qkv_bias=True)
    first, again = (RandomWeights(config, weights, seed=3) for _ in range(2))
    other = RandomWeights(config, weights, seed=4)
    again.block(0)  # the order of asking does not matter
    assert np.array_equal(first.block(2).matrix("down").data, again.block(2).matrix("down").data)
    biases = [x.block(2).vectors["qkv_bias"] for x in (first, again)]
    assert np.array_equal(*biases)
    assert np.array_equal(first.lm_head().data, again.lm_head().data)
    assert not np.array_equal(
        first.block(2).matrix("down").data, other.block(2).matrix("down").data
    )


@pytest.mark.parametrize("weights", [x for x in WeightFormat if not x.of_file])
def test_blocks_differ_and_share_no_memory(weights: WeightFormat) -> None:
    model = RandomWeights(small_config(hidden_size=256, head_dim=64), weights)
    blocks = [model.block(i) for i in range(3)]
    values = [block.matrix("qkv").dequantize().ravel() for block in blocks]
    for i in range(3):
        for j in range(i):
            assert not np.shares_memory(*(blocks[x].matrix("qkv").data for x in (i, j)))
            assert abs(np.corrcoef(values[i], values[j])[0, 1]) < 0.05


@pytest.mark.parametrize("weights", [x for x in WeightFormat if not x.of_file])
@pytest.mark.parametrize("k", [172, 256])
def test_padding_is_zero(weights: WeightFormat, k: int) -> None:
    model = RandomWeights(small_config(intermediate_size=k, hidden_size=43), weights)
    down = model.block(0).matrix("down")
    assert (down.n, down.k) == (43, k)
    whole = whole_padding(down)
    assert np.count_nonzero(whole[:43, :k]) > 0.8 * 43 * k
    assert not whole[43:].any()
    assert not whole[:, k:].any()


def whole_padding(packed: PackedWeight) -> Float32Array:
    """The weight with its padded rows and features."""
    width = padded(packed.k, 32) if packed.scales is not None else packed.k
    full = PackedWeight(packed.storage, padded(packed.n, 16), width, packed.data, packed.scales)
    return full.dequantize()


@pytest.mark.parametrize("weights", [x for x in WeightFormat if not x.of_file])
def test_the_spread_is_one_over_the_root_of_k(weights: WeightFormat) -> None:
    model = RandomWeights(small_config(hidden_size=512, intermediate_size=1024), weights)
    for packed in (model.block(1).matrix("gate_up"), model.block(1).matrix("down"), model.embed()):
        values = packed.dequantize() * packed.k**0.5
        assert values.std() == pytest.approx(1, rel=0.05)
        assert abs(values.mean()) < 0.02


def test_activations_stay_sane_through_many_layers() -> None:
    config = small_config(
        hidden_size=256, intermediate_size=688, num_layers=24, heads=4, kv_heads=4, head_dim=64
    )
    model = RandomWeights(config, WeightFormat.W4A16)
    x = model.embed().dequantize()[:8]
    for index in range(config.num_layers):
        block = model.block(index)
        dense = {name: matrix.dequantize().T for name, matrix in block.matrices.items()}
        values = (normed(x, block.vectors["input_norm"]) @ dense["qkv"])[:, -256:]
        x += values @ dense["o"]  # attention to itself only
        gate, up = np.split(normed(x, block.vectors["post_norm"]) @ dense["gate_up"], 2, axis=1)
        x += (gate / (1 + np.exp(-gate)) * up) @ dense["down"]
        model.release(index)
    logits = normed(x, model.final_norm()) @ model.lm_head().dequantize().T
    assert 0.5 < x.std() < 20
    assert logits.std() == pytest.approx(1, rel=0.3)


def normed(x: Float32Array, weight: Float32Array) -> Float32Array:
    rms = np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
    return np.asarray(x / rms * weight, dtype=np.float32)


def test_arrays_are_on_pages() -> None:
    block = RandomWeights(small_config(), WeightFormat.W4A16).block(0)
    assert block.matrix("qkv").storage is StorageFormat.Q4
    assert block.matrix("qkv").data.ctypes.data % 4096 == 0
    assert block.matrix("qkv").scales is not None
    assert block.matrix("qkv").scales.ctypes.data % 4096 == 0
