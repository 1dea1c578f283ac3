"""Layers of several sizes in config.json: what cannot be is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.config import ModelConfig
from tests.models.gguf_files import convert
from tests.support.checkpoints import GEMMA4 as GEMMA4_CASE
from tests.support.checkpoints import make_checkpoint

GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 263, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "global_head_dim": 16, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 263,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "max_position_embeddings": 512,
}  # fmt: skip


def test_shared_layers_read_the_last_one_of_their_kind() -> None:
    config = ModelConfig.from_dict(GEMMA4)
    assert config.kv_source == (0, 1, 0, 1)
    assert config.cache_numbers == (0, 1, 0, 1)
    assert config.cached_layers == [0, 1]
    assert [config.at(i).head_dim for i in range(4)] == [8, 16, 8, 16]
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_kv_shared_layers": 3},
            "num_kv_shared_layers must leave a layer with full_attention among the first 1, got 3; "
            "correct the file",
        ),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers must be from 0 to 3, got 4; "),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers must be from 0 to 3, got True; "),
        (
            {"per_layer_config": {"4": {}}},
            "per_layer_config must have layer numbers below 4, got '4'; correct the file",
        ),
        ({"per_layer_config": {"1": {"window": 3}}}, "window is not supported for a layer, got 3;"),
        (
            {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
            "layer 1 must have key/value heads that divide num_attention_heads (8), of an even "
            "size, got 3 of 8; correct the file",
        ),
        ({"global_head_dim": 7}, "layer 1 must have key/value heads that divide"),
        ({"vocab_size_per_layer_input": 99}, "must be vocab_size (263), got 99; correct the file"),
        ({"enable_moe_block": True}, "num_experts must be a positive integer, but it is missing"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}
            | {"moe_intermediate_size": 32},
            "top_k_experts must be at most the 4 of num_experts, got 5; correct the file",
        ),
        (
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention is not supported, got 'all'; choose another model",
        ),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v must be true or false, got 1; "),
    ],
)
def test_impossible_layers_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(GEMMA4 | changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("attention__shared_kv_layers", 9, "num_kv_shared_layers must be from 0 to 4, got 9; "),
        ("attention__shared_kv_layers", [1, 2], "num_kv_shared_layers must be from 0 to 4, got"),
        ("attention__head_count_kv", [4, 3, 4, 4, 4], "layer 1 must have key/value heads that"),
        ("feed_forward_length", [172, 172], "must be one number or a list of 5, one for each"),
        ("attention__key_length_swa", "8", "head_dim must be a positive integer, got '8'; "),
        ("attention__key_length", 32, "rope_freqs.weight must be 16 F32 numbers, ones and then"),
        ("embedding_length_per_layer_input", 8, "must have the shape"),
    ],
)
def test_impossible_entries_of_files_are_refused(
    entry: str, value: Any, said: str, tmp_path: Path
) -> None:
    make_checkpoint(GEMMA4_CASE, tmp_path)
    convert(tmp_path, tmp_path / "model.gguf", **{f"gemma4__{entry}": value})
    with pytest.raises(ModelError) as caught:
        open_model(tmp_path / "model.gguf")
    assert said in str(caught.value)
