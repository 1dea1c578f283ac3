"""RoPE scaling in GGUF metadata: the numbers that `transformers` computes with the same scaling."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends.rope_tables import attention_factor, inverse_frequencies
from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.gguf import GgufFile, read_config
from tests.models.gguf_files import convert, write_tiny
from tests.models.model_helpers import first_rope
from tests.support.checkpoints import CASES, make_checkpoint

MAX_POSITION = 64
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def scaled(path: Path, architecture: str = "llama", **entries: Any) -> Path:
    entries = {f"rope__{name}": value for name, value in entries.items()}
    return write_tiny(path / "m.gguf", arch=architecture, **entries)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "internlm2"])
@pytest.mark.parametrize(
    ("entries", "same"),
    [
        ({"scaling__factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scale_linear": 2.0, "scaling__factor": 4.0}, LINEAR),
        ({"scaling__type": "linear", "scale_linear": 4.0}, LINEAR),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
        ({"scaling__factor": 1.0}, None),
        ({"scaling__factor": 0.0}, None),
        ({"scaling__type": "yarn", "scaling__factor": 4.0,
          "scaling__original_context_length": 32}, YARN),
        ({"scaling__type": "yarn", "scaling__factor": 4.0,
          "scaling__original_context_length": 32, "scaling__attn_factor": 0.5},
         YARN | {"attention_factor": 0.5 * (1 + 0.1 * math.log(4))}),
        ({"scaling__type": "yarn", "scale_linear": 8.0, "scaling__attn_factor": 1.25},
         {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25 * (1 + 0.1 * math.log(8))}),
        ({"scaling__attn_factor": 1.5},
         {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.5}),
    ],
)  # fmt: skip
def test_scaling_is_that_of_transformers(
    architecture: str, entries: dict[str, Any], same: dict[str, Any] | None, tmp_path: Path
) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs = modeling.LlamaRotaryEmbedding(
        modeling.LlamaConfig(
            hidden_size=32, num_attention_heads=4, max_position_embeddings=MAX_POSITION,
            rope_scaling=same, rope_theta=1e4,
        )
    )  # fmt: skip
    rope = first_rope(read_config(GgufFile(scaled(tmp_path, architecture, **entries))))
    np.testing.assert_allclose(inverse_frequencies(rope), theirs.inv_freq.numpy(), rtol=1e-5)
    assert attention_factor(rope.scaling) == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("name", ["llama-linear-rope", "llama-yarn-rope"])
def test_a_scaled_model_is_the_same_in_both_formats(name: str, tmp_path: Path) -> None:
    make_checkpoint(next(x for x in CASES if x.name == name), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["rope_parameters"]
    changes = {"llama__rope__scaling__type": raw["rope_type"]} | {
        f"llama__rope__scaling__{ours}": raw[theirs]
        for ours, theirs in (
            ("factor", "factor"),
            ("original_context_length", "original_max_position_embeddings"),
        )
        if theirs in raw
    }
    convert(tmp_path, tmp_path / "m.gguf", **changes)
    ours, theirs = (open_model(x, weights="f32").config for x in (tmp_path / "m.gguf", tmp_path))
    assert ours.rope_scaling == theirs.rope_scaling


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"scaling__type": "dynamic"},
         "llama.rope.scaling.type must be one of none, linear, yarn, longrope, got 'dynamic'"),
        ({"scaling__type": 2}, "must be one of none, linear, yarn, longrope, got 2"),
        ({"scaling__factor": -2.0}, "llama.rope.scaling.factor must be a positive number, got -2"),
        ({"scale_linear": "2"}, "llama.rope.scale_linear must be a positive number, got '2'"),
        ({"scaling__attn_factor": 0.0},
         "llama.rope.scaling.attn_factor must be a positive number, got 0.0"),
        ({"scaling__attn_factor": 2.0, "scaling__factor": 3.0},
         "llama.rope.scaling.attn_factor other than 1 is supported with the scaling type yarn or "
         "without a factor, got 2 with linear scaling by 3"),
    ],
)  # fmt: skip
def test_other_scaling_is_refused(entries: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = scaled(tmp_path, **entries)
    with pytest.raises(ModelError, match=sentence.replace(".", r"\.")):
        open_model(path)


FACTORS = {
    f"rope_factors_{x}.weight": np.full(4, value, np.float32)
    for x, value in (("long", 4), ("short", 2))
}


@pytest.mark.parametrize(
    ("entries", "short", "long"),
    [
        ({}, 2.0, 4.0),
        ({"scaling__factor": 3.0}, 6.0, 12.0),
        ({"scaling__factor": 3.0, "scaling__attn_factor": 1.5}, 6.0, 12.0),
    ],
)
def test_factors_of_longrope(
    entries: dict[str, Any], short: float, long: float, tmp_path: Path
) -> None:
    """llama.cpp divides by a factor as well, and takes 1 for the one that is not there."""
    original = {"scaling__type": "longrope", "scaling__original_context_length": 32}
    entries = {f"rope__{name}": value for name, value in (original | entries).items()}
    path = write_tiny(tmp_path / "m.gguf", tensors=FACTORS, **entries)
    scaling = read_config(GgufFile(path)).rope_scaling
    assert (scaling.short_factor, scaling.long_factor) == ((short,) * 4, (long,) * 4)
    assert scaling.attention_factor == entries.get("rope__scaling__attn_factor", 1.0)
    assert (scaling.original_max_position, scaling.long) == (32, False)
    only = {name: value for name, value in FACTORS.items() if "long" in name}
    scaling = read_config(GgufFile(write_tiny(path, tensors=only, **entries))).rope_scaling
    assert (scaling.short_factor, scaling.long_factor) == ((short / 2,) * 4, (long,) * 4)


@pytest.mark.parametrize(
    ("architecture", "entries", "tensors", "sentence"),
    [
        ("llama", {}, FACTORS, "tensor rope_factors_long.weight does not belong to a llama"),
        ("internlm2", {}, FACTORS, "tensor rope_factors_long.weight does not belong to a int"),
        ("llama", {"scaling__type": "longrope"}, {},
         "rope.scaling.type must be longrope where there are tensors rope_factors_short.weight"),
        ("phi3", {"scaling__type": "yarn"}, FACTORS, "and nowhere else, got yarn; choose another"),
        ("llama", {"scaling__type": "longrope"},
         {"rope_factors_long.weight": np.ones(3, np.float32)}, "must have 4 numbers, one for two"),
        ("llama", {"scaling__type": "longrope"},
         {"rope_factors_long.weight": np.zeros(4, np.float32)}, "must be a list of positive numb"),
    ],
)  # fmt: skip
def test_other_factors_are_refused(
    architecture: str,
    entries: dict[str, Any],
    tensors: dict[str, Any],
    sentence: str,
    tmp_path: Path,
) -> None:
    entries = {f"rope__{name}": value for name, value in entries.items()}
    path = write_tiny(tmp_path / "m.gguf", arch=architecture, tensors=tensors, **entries)
    with pytest.raises(ModelError, match=sentence.replace(".", r"\.")):
        open_model(path)


DIVISORS = {"rope_freqs.weight": np.array([1, 2, 4, 3], np.float32)}


def test_frequencies_are_divided_by_their_tensor_and_by_a_factor(tmp_path: Path) -> None:
    """llama.cpp does so where a file has both."""
    for factor in (1.0, 4.0):
        path = write_tiny(tmp_path / "m.gguf", tensors=DIVISORS, rope__scaling__factor=factor)
        config = read_config(GgufFile(path))
        plain = 1e4 ** -(np.arange(4) / 4) / factor
        wanted = plain / DIVISORS["rope_freqs.weight"]
        np.testing.assert_allclose(inverse_frequencies(first_rope(config)), wanted)
        assert open_model(path)


@pytest.mark.parametrize("architecture", ["llama", "internlm2"])
def test_tensors_that_would_be_ignored_are_refused(architecture: str, tmp_path: Path) -> None:
    """llama.cpp reads one of the two kinds of tensors; type and family decide which."""
    kind = None if architecture == "llama" else "longrope"
    path = write_tiny(
        tmp_path / "m.gguf", arch=architecture, tensors=FACTORS | DIVISORS,
        rope__scaling__type=kind,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"tensor rope_f\w+\.weight does not belong to a"):
        open_model(path)


@pytest.mark.parametrize(
    ("divisors", "entries", "sentence"),
    [
        ([1, 1, 1, 1], {"scaling__type": "yarn", "scaling__factor": 2.0}, "and yarn scaling are n"),
        ([1, 1, 0, 1], {}, "short_factor must be a list of positive numbers"),
        ([1, 1, float("nan"), 1], {}, "short_factor must be a list of positive numbers"),
        ([1, 1, 1], {}, "tensor rope_freqs.weight must be 4 F32 numbers"),
    ],
)
def test_other_frequencies_are_refused(
    divisors: list[float], entries: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    entries = {f"rope__{name}": value for name, value in entries.items()}
    tensor = {"rope_freqs.weight": np.array(divisors, np.float32)}
    path = write_tiny(tmp_path / "m.gguf", tensors=tensor, **entries)
    with pytest.raises(ModelError, match=sentence.replace(".", r"\.")):
        open_model(path)


def test_frequencies_of_another_architecture_are_refused(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(4, np.float32)}
    path = write_tiny(tmp_path / "m.gguf", arch="internlm2", tensors=ones)
    with pytest.raises(
        ModelError, match=r"tensor rope_freqs.weight does not belong to a internlm2"
    ):
        open_model(path)
