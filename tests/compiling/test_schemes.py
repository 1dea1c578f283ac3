"""Simulated ways to make activations int8: each against plain sums, and the command's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.lab.schemes import Schemes, SimulatedModel
from hetero import LLM
from hetero.backends.formats import WeightFormat
from hetero.backends.reference.compute import program
from hetero.compiling.static_scales import Scale, StaticWeights, choose, static_weights
from hetero.errors import UserError
from hetero.models import LoadedModel, open_model
from hetero.models.calibration_record import matmul_shapes
from hetero.models.quantized import save
from hetero.models.random_models import RandomWeights
from tests.models.model_helpers import small_config
from tests.support.helpers import relative_difference

TOKENS = np.random.default_rng(5).integers(0, 301, (2, 40)).tolist()


def loaded(**changes: Any) -> LoadedModel:
    weights = RandomWeights(small_config(**changes), WeightFormat.F32)
    return LoadedModel("small", weights.config, weights, "0" * 64)


def floats(model: LoadedModel) -> SimulatedModel:
    return SimulatedModel(model, model.weights, 64, lambda node, x: program(node.op, x)[0])


@pytest.mark.parametrize("scheme", ["naive", "none", "smooth", "per-token", "activations", "15%",
                                    "all", "paper"])  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
def test_every_scheme_is_near_the_float_model(scheme: str, tied: bool) -> None:
    model = loaded(tie_word_embeddings=tied, qkv_bias=True)
    found = Schemes(model, TOKENS, 64).model_of(scheme).logits(TOKENS[0])
    difference = relative_difference(found, floats(model).logits(TOKENS[0]))
    assert 0 < difference < 0.06
    assert found.shape == (40, 301)


@pytest.mark.full
def test_without_shadows_it_is_what_the_engine_computes(tmp_path: Path) -> None:
    demo = open_model("demo", weights="f32")
    tokens = [demo.encode("Once upon a time there was a small fox who liked to play. " * 3)]
    save(static_weights(demo.weights, tokens, outliers="none"), tmp_path / "out")
    wanted = Schemes(demo, tokens, 64).model_of("none").logits(tokens[0][:20])
    with LLM(str(tmp_path / "out"), device="gpu", gpu="reference", kv="f32") as llm:
        assert relative_difference(llm.logits(tokens[0][:20]), wanted) < 1e-4


def test_a_slab_is_the_float_product_of_its_channels() -> None:
    """Every channel hot: nothing is left to the integers but in the head, which keeps no shadow."""
    model = loaded()
    scales = Schemes(model, TOKENS, 64).scales()
    sizes = {name: x.k for name, x in matmul_shapes(model.config).items()}
    everything = {
        name: Scale(1.0, 100.0, 0.0, np.arange(sizes[name], dtype="i4")) for name in scales
    } | {"lm_head": scales["lm_head"].widest}
    found = Schemes(model, TOKENS, 64).chosen(everything).logits(TOKENS[1])
    wanted = floats(model).logits(TOKENS[1])
    assert relative_difference(found, wanted) < WeightFormat.W8A8.tolerance


def test_a_directory_with_shadows_serves_the_simulation() -> None:
    model = loaded()
    schemes = Schemes(model, TOKENS, 64)
    kept = {"blocks.0.down", "blocks.2.o"}
    weights = StaticWeights(model.weights, choose(schemes.scales(), kept))
    assert [set(weights.block(i).shadows) for i in range(3)] == [{"down"}, set(), {"o"}]


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(UserError, match="unknown scheme 'best': choose one of naive, smooth"):
        Schemes(loaded(), TOKENS, 64).model_of("best")
