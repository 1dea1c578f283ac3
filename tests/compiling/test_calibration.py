"""GPTQ: less error than rounding to nearest where inputs are correlated, and a lower divergence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import pack
from hetero.cli import app as cli
from hetero.compiling.calibration import CalibratedWeights, calibrated, gptq, hessian
from hetero.errors import UserError
from hetero.measuring.evaluation import evaluate
from hetero.models import open_model
from hetero.models.quantized import save


@pytest.mark.parametrize(("n", "k"), [(16, 64), (37, 172), (5, 20)])
def test_outputs_are_closer_than_with_rounding(n: int, k: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((n, k), dtype=np.float32)
    inputs = rng.standard_normal((400, 8)) @ rng.standard_normal((8, k))
    inputs += 0.1 * rng.standard_normal((400, k))
    exact = inputs @ weight.T

    def lost(stored: np.ndarray) -> float:  # type: ignore[type-arg]
        return float(np.linalg.norm(inputs @ stored.T - exact) / np.linalg.norm(exact))

    rounded = lost(pack(weight, StorageFormat.Q4).dequantize())
    chosen = gptq(weight, hessian([inputs]))
    assert (chosen.n, chosen.k, chosen.storage) == (n, k, StorageFormat.Q4)
    assert lost(chosen.dequantize()) < 0.6 * rounded


def test_a_weight_of_zeros_stays_zero() -> None:
    found = gptq(np.zeros((3, 40), np.float32), hessian([np.zeros((2, 40))]))
    assert not found.dequantize().any()


@pytest.mark.full
def test_divergence_from_the_float_model_is_lower(stories: Path, tmp_path: Path) -> None:
    with LLM(str(stories), device="npu", weights="f32") as exact:
        texts = [
            [1, *exact.generate([1], max_tokens=300, temperature=1.0, seed=seed).tokens]
            for seed in range(5)
        ]
        weights = open_model(stories, weights="f32").weights
        save(CalibratedWeights(weights, WeightFormat.W4A16, texts[:3]), tmp_path / "out")
        found = []
        for model in (stories, tmp_path / "out"):
            with LLM(str(model), device="npu") as llm:
                scores = [evaluate(llm, text, reference=exact, window=302) for text in texts[3:]]
                found.append(float(np.mean([x.kl_mean for x in scores])))
    assert found[1] < 0.85 * found[0], found


def test_the_command(stories: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little girl who loved to play. " * 8)
    common = ["quantize", str(stories), "--out", str(tmp_path / "out"), "--calibrate", str(text)]
    with pytest.raises(SystemExit) as ended:
        cli.main([*common, "--calibration-tokens", "64"])
    assert ended.value.code == 0
    plain = open_model(stories).weights.block(0).matrix("qkv").dequantize()
    assert (open_model(tmp_path / "out").weights.block(0).matrix("qkv").dequantize() != plain).any()


def test_what_cannot_be_calibrated(stories: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("x")
    with pytest.raises(UserError, match="calibration needs at least 32"):
        calibrated(str(stories), "w4a16", text, 100)
    text.write_text("word " * 50)
    with pytest.raises(UserError, match="choose w4a16 or w4a8 "):
        calibrated(str(stories), "w8a16", text, 100)
    with pytest.raises(UserError, match="cannot be read"):
        calibrated(str(stories), "w4a16", tmp_path / "none", 100)
