"""Impossible values of experts' fields: a configuration, or one sentence that names the field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ModelError
from hetero.models.config import ModelConfig
from hetero.models.gguf import GgufFile, read_config
from hetero.models.published import PUBLISHED
from tests.models.gguf_files import convert
from tests.runtime.test_routed_logits import IN_FILES, drawn
from tests.support.selection import examples

MODELS = {name: PUBLISHED[name] for name in ("qwen3.5-35b-a3b", "gpt-oss-20b", "lfm2-8b-a1b")}
MODELS["qwen3-moe"] = MODELS["lfm2-8b-a1b"] | {"model_type": "qwen3_moe"}
MODELS["qwen3-moe"].pop("layer_types")
FIELDS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "intermediate_size", "shared_expert_intermediate_size", "num_dense_layers", "norm_topk_prob",
    "use_expert_bias", "routed_scaling_factor", "decoder_sparse_step", "mlp_only_layers",
    "swiglu_limit", "swiglu_alpha", "attention_bias", "sliding_window", "layer_types",
    "quantization_config", "rope_scaling", "rope_parameters",
)  # fmt: skip
VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 3, 1.5, 2**31, 2**64, float("nan"), float("inf"), -0.5, "", "x", [], {}]
) | st.lists(st.sampled_from([0, -1, 10**6, "conv", "full_attention", None, []]), max_size=41)
ENTRIES = (
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func",
    "expert_shared_feed_forward_length", "leading_dense_block_count", "expert_weights_scale",
    "expert_weights_norm", "attention.sliding_window", "feed_forward_length",
    "attention.sliding_window_pattern", "rope.scaling.type", "rope.scaling.factor",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "absent"),
    [("GptOss", "attention.sliding_window_pattern"), ("Qwen3_5Moe", "feed_forward_length")],
)
def test_what_converters_leave_out(kind: str, absent: str, tmp_path: Path) -> None:
    """Every other layer of gpt-oss has a window; Qwen3.5-MoE has no plain feed-forward."""
    folder, _ = drawn(kind, IN_FILES[kind])
    convert(folder, tmp_path / "whole.gguf")
    file = GgufFile(tmp_path / "whole.gguf")
    name = f"{file.metadata['general.architecture']}.{absent}"
    assert name in file.metadata
    convert(folder, tmp_path / "m.gguf", **{name: None})
    assert read_config(GgufFile(tmp_path / "m.gguf")) == read_config(file)


def error_of(action: Callable[[], object]) -> str:
    """The sentence that an action is refused with, "" if it is not."""
    try:
        action()
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=examples(200), deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
def test_a_configuration_or_a_sentence(name: str, changes: dict[str, Any]) -> None:
    raw = MODELS[name] | changes
    sentence = error_of(lambda: ModelConfig.from_dict(raw))
    assert "\n" not in sentence
    if sentence:
        assert any(field in sentence for field in (*changes, "quant", "rope", "experts"))
        return
    config = ModelConfig.from_dict(raw)
    assert config.experts is not None
    assert 1 <= config.experts.chosen <= config.experts.count
    assert ModelConfig.from_dict(config.to_dict()).experts == config.experts


@pytest.mark.parametrize("kind", IN_FILES)
@settings(max_examples=examples(40), deadline=None)
@given(
    entry=st.sampled_from(ENTRIES),
    value=st.sampled_from([True, 0, 1, 5, 7, 2**31, -0.5, 1.5, "", "x", [0, 1], ["a"], [2.5]]),
)
def test_a_file_or_a_sentence(kind: str, entry: str, value: Any) -> None:
    folder, _ = drawn(kind, IN_FILES[kind])
    path = Path(mkdtemp()) / "m.gguf"
    convert(folder, path)
    name = GgufFile(path).metadata["general.architecture"]
    convert(folder, path, **{f"{name}.{entry}": value})
    sentence = error_of(lambda: read_config(GgufFile(path)))
    assert "\n" not in sentence
    assert not sentence or str(path) in sentence
