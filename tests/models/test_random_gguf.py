"""Random GGUF files in the shapes of known models (`bench/parts/gguf_models.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parts.gguf_models import shallow_config, write_random_model
from hetero.backends.formats import WeightFormat
from hetero.models.config import ModelConfig
from hetero.models.gguf import open_weights

SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
OWN = {
    "qwen3.5-0.8b": DELTA | {"linear_value_head_dim": 32},
    "lfm2-1.2b": {},
    "qwen3-moe-3b": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("model", OWN)
def test_file_has_the_layers_of_the_known_model(tmp_path: Path, model: str) -> None:
    """Four layers are of every kind that the model has, and the file's metadata says which."""
    raw = shallow_config(model, 4).to_dict() | SMALL | HEADS | OWN[model]
    config = ModelConfig.from_dict(raw, where=model)
    write_random_model(config, tmp_path / "random.gguf", context=512)
    weights = open_weights(tmp_path / "random.gguf", WeightFormat.W4A8)
    assert weights.config.mixers == config.mixers
    assert weights.config.experts == config.experts
    assert weights.config.delta == config.delta
    assert [weights.config.block_matmuls(i) for i in range(4)] == [
        config.block_matmuls(i) for i in range(4)
    ]
    weights.close()
