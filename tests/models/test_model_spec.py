"""`ModelSpec`: shapes, the operators of a step, and the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from hetero.backends.ops import (
    Attention,
    Embed,
    GatedAct,
    MatMul,
    RMSNorm,
    Rope,
    RopeScaling,
    WeightFormat,
)
from hetero.backends.rope import tables
from hetero.models.random_models import KNOWN_MODELS, RandomWeights
from hetero.solver.model_spec import MatMulSpec, ModelSpec
from tests.models.model_helpers import small_config


def spec_of(name: str) -> ModelSpec:
    return KNOWN_MODELS[name].spec(WeightFormat.W4A16, name)


def test_the_matmuls_of_a_known_model() -> None:
    spec = spec_of("qwen2.5-0.5b")
    assert spec.matmuls == (
        MatMulSpec(name="qkv", n=1152, k=896, count=24, bias=True),
        MatMulSpec(name="o", n=896, k=896, count=24),
        MatMulSpec(name="gate_up", n=9728, k=896, count=24),
        MatMulSpec(name="down", n=896, k=4864, count=24),
        MatMulSpec(name="lm_head", n=151936, k=896, count=1),
    )
    assert spec.matmul_op("qkv") == MatMul(
        n=1152, k=896, weight_format=WeightFormat.W4A16, bias=True
    )
    with pytest.raises(KeyError):
        spec.matmul("gate")  # type: ignore[arg-type]


def test_the_operators_of_a_step() -> None:
    config = small_config(
        architecture="qwen3", qk_norm=True, windows=(0, 8, 8), activation="gelu_tanh"
    )
    ops = config.spec(WeightFormat.F16).step_ops(capacity=32)
    assert [(x.name, x.count) for x in ops] == [
        *[("qkv", 3), ("o", 3), ("gate_up", 3), ("down", 3), ("lm_head", 1)],
        *[("embed", 1), ("first_norm", 1), ("norm", 6), ("rope", 3)],
        *[("attention", 1), ("attention", 2), ("activation", 3)],
    ]
    records = {x.name: x.op for x in ops}
    assert records["embed"] == Embed(vocab=301, d=24, weight_format=WeightFormat.F16)
    assert records["norm"] == RMSNorm(d=24, eps=1e-6, add=True)
    assert records["activation"] == GatedAct(f=43, activation="gelu_tanh")
    assert records["rope"] == Rope(
        heads=4, kv_heads=2, head_dim=6, theta=1e4, max_position=64, qk_norm_eps=1e-6
    )
    assert [x.op for x in ops if x.name == "attention"] == [
        Attention(heads=4, kv_heads=2, head_dim=6, capacity=32, window=window) for window in (0, 8)
    ]


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_spec_reads_back_the_same(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    spec.save(tmp_path / "spec.json")
    loaded = ModelSpec.load(tmp_path / "spec.json")
    assert loaded == spec
    assert isinstance(loaded.rope_scaling, RopeScaling)
    assert tables(loaded.rope_op())[0].shape == (
        spec.max_position,
        loaded.rope_op().rotated // 2,
    )


@pytest.mark.parametrize("weights", WeightFormat)
def test_bytes_are_those_of_the_weights(weights: WeightFormat) -> None:
    config = small_config()
    model = RandomWeights(config, weights)
    blocks = [model.block(i) for i in range(3)]
    total = sum(x.nbytes for b in blocks for x in (b.qkv, b.o, b.gate_up, b.down))
    assert config.spec(weights).matmul_weight_bytes == total + model.lm_head().nbytes
    assert config.spec(weights).kv_bytes_per_token == 3 * 2 * 2 * 6 * 4


def test_a_spec_is_frozen_and_strict() -> None:
    spec = spec_of("llama-3-8b")
    with pytest.raises(ValidationError):
        spec.layers = 3
    raw = spec.model_dump(mode="json")
    for change in (
        {"schema_version": 2},
        {"layers": 0},
        {"surprise": 1},
        {"matmuls": raw["matmuls"] * 2},
        {"windows": [1, 2]},
    ):
        with pytest.raises(ValidationError):
            ModelSpec.model_validate(raw | change)
