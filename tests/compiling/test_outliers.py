"""Outliers that are folded into a model leave its float logits as they are, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.lab.outliers import OutlyingWeights
from bench.lab.schemes import Schemes, SimulatedModel
from hetero.backends.formats import WeightFormat
from hetero.backends.reference.compute import program
from hetero.compiling.static_scales import choose, most_important
from hetero.errors import UserError
from hetero.generation.sampling import log_softmax
from hetero.models import LoadedModel, ModelWeights, open_model
from hetero.models.random_models import RandomWeights
from tests.models.model_helpers import small_config

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "one head of keys": {"kv_heads": 1},
    "phi": {"architecture": "phi", "norm": "layer", "parallel": True, "gated": False,
            "activation": "gelu_tanh", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "norms behind": {"architecture": "gemma2", "out_norms": True},
}  # fmt: skip


def model_of(weights: ModelWeights) -> LoadedModel:
    return LoadedModel("model", weights.config, weights, "0" * 64)


def logits(weights: ModelWeights, tokens: list[int]) -> Any:
    model = SimulatedModel(model_of(weights), weights, 64, lambda n, x: program(n.op, x)[0])
    return model.logits(tokens)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_float_logits_have_the_same_bits(case: str, seed: int) -> None:
    exact = RandomWeights(small_config(**CASES[case]), WeightFormat.F32, seed)
    tokens = np.random.default_rng(seed).integers(0, 301, 30).tolist()
    outlying = OutlyingWeights(exact, seed)
    assert np.array_equal(logits(exact, tokens), logits(outlying, tokens))
    before, after = exact.block(1), outlying.block(1)
    for name in ("qkv", "o"):
        assert (before.matrix(name).dequantize() != after.matrix(name).dequantize()).any()
    grown = after.vectors["input_norm"] / before.vectors["input_norm"]
    assert sorted(set(grown.tolist()))[0] == 1
    assert 2**4 <= grown.max() <= 2**8
    assert (grown > 1).sum() == 1


def test_the_demo_has_the_same_bits_too() -> None:
    exact = open_model("demo", weights="f32")
    tokens = exact.encode("Once upon a time there was a small fox who liked to play. " * 3)[:64]
    assert np.array_equal(logits(exact.weights, tokens),
                          logits(OutlyingWeights(exact.weights, 3), tokens))  # fmt: skip


def test_rounded_weights_are_refused() -> None:
    with pytest.raises(UserError, match="open the model as f32"):
        OutlyingWeights(RandomWeights(small_config(), WeightFormat.F16))


def divergence(wanted: Any, found: Any) -> float:
    a, b = log_softmax(wanted), log_softmax(found)
    return float((np.exp(a) * (a - b)).sum(axis=-1).mean())


@pytest.mark.full
def test_hot_channels_make_up_for_outliers() -> None:
    demo = open_model("demo", weights="f32")
    text = "Once upon a time, there was a young fox named Jasmund. He lived in the village. " * 9
    tokens = demo.encode(text)
    wanted = logits(demo.weights, tokens[:60])
    weights = OutlyingWeights(demo.weights, 1)
    schemes = Schemes(model_of(weights), [tokens[60:]], 64)
    scales = schemes.scales()
    found = {
        x: divergence(wanted, schemes.model_of(x).logits(tokens[:60])) for x in ("naive", "all")
    }
    assert found["all"] < 0.1 * found["naive"], found
    order = most_important(scales, 0.5)
    least = set(scales) - order - {"lm_head"}
    good, bad = (
        schemes.chosen(choose(scales, kept)).logits(tokens[:60]) for kept in (order, least)
    )
    assert divergence(wanted, good) < divergence(wanted, bad)
