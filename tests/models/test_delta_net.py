"""Gated delta nets: the order of their heads, and configurations and files that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.config import ModelConfig
from hetero.models.delta_net import DeltaNet
from hetero.models.graph import model_graph
from tests.models.gguf_files import convert
from tests.models.test_gguf import check_same_weights
from tests.models.test_model_config import of
from tests.support.checkpoints import Case, make_checkpoint

TINY = {
    "head_dim": 8,
    "pad_token_id": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def test_value_heads_go_round_by_round_over_the_key_heads() -> None:
    net = DeltaNet(k_heads=2, v_heads=6, k_dim=1, v_dim=2)
    np.testing.assert_array_equal(net.value_rows(1), [0, 3, 1, 4, 2, 5])
    np.testing.assert_array_equal(net.value_rows(2, before=1)[:5], [0, 1, 2, 7, 8])


def test_one_of_four_layers_has_attention() -> None:
    config = ModelConfig.from_dict(of("qwen3_5_text", num_hidden_layers=8, head_dim=16))
    assert config.mixers == ("delta", "delta", "delta", "attention") * 2
    graph = model_graph(config, "f32", capacity=64)
    own = [node.name.removeprefix("layer0.") for node in graph.nodes if node.layer == 0]
    assert own[1:5] == ["delta_in", "conv", "delta", "delta_out"]
    assert graph.counts["delta_in"] == 6
    assert graph.counts["qkv"] == 2
    states = {slot for node in graph.nodes for slot in node.slots.values() if "_state." in slot}
    assert states == {f"{kind}_state.{i}" for kind in ("conv", "delta") for i in range(2, 8)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 8}, "linear_num_value_heads must be "
         "a multiple of linear_num_key_heads, got 8 and 3; correct the file"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim must be a positive integer"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2, got 1; cor"),
        ({"full_attention_interval": 5}, "full_attention_interval must be at most the 4 layers, "
         "for one to have attention, got 5; correct the file"),
        *(
            ({"layer_types": types}, "layer_types must list linear_attention or full_attention for "
             "each of the 4 layers, got")
            for types in (5, ["full_attention"], ["conv"] * 4, [["full_attention"]] * 4)
        ),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must have a layer of "
         "full_attention, got"),
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        ModelConfig.from_dict(of("qwen3_5_text", **changes))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_5")
    make_checkpoint(Case("qwen3.5", "Qwen3_5", TINY), folder)
    return folder


def test_the_text_part_of_a_larger_model(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    text = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    raw = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    written = json.dumps(raw | {"text_config": text, "vision_config": {}})
    (tmp_path / "config.json").write_text(written, encoding="utf-8")
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(checkpoint / "model.safetensors").items()
    }
    others = {"model.visual.patch.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors | others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = (open_model(x, weights="f32") for x in (tmp_path, checkpoint))
    assert ours.config == theirs.config
    check_same_weights(ours, theirs)
    said = " ".join(capsys.readouterr().err.split())
    assert "only the text part is loaded; visual (1 tensors) left out" in said
    assert "the head for multi-token prediction is left out" in said  # it lacks tensors
    assert ours.weights.mtp is None


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *((f"ssm.{key}", value)
          for key in ("group_count", "state_size", "conv_kernel", "time_step_rank", "inner_size")
          for value in (0, "4", 1.5, [2, 2], 1 << 30)),
        ("nextn_predict_layers", 3),
        ("attention.recurrent_layers", "no"),
        ("attention.recurrent_layers", [True]),
        ("block_count", "3"),
    ],
)  # fmt: skip
def test_a_file_with_wrong_sizes_is_refused(
    checkpoint: Path, tmp_path: Path, entry: str, value: Any
) -> None:
    convert(checkpoint, tmp_path / "model.gguf", **{f"qwen35.{entry}": value})
    with pytest.raises(ModelError, match=r"model\.gguf"):
        open_model(tmp_path / "model.gguf", weights="f32")
