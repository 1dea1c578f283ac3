"""Models of text and pictures: their text part is loaded, the rest is named and left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from hetero.errors import ModelError
from hetero.models import open_model
from hetero.models.config import ModelConfig
from hetero.models.wrapper import WRAPPERS, text_tensors
from tests.models.test_gguf import check_same_weights
from tests.support.checkpoints import (
    TINY,
    Case,
    make_checkpoint,
    reference_logits,
    relative_error,
    torch,
    transformers,
    write_byte_tokenizer,
)

SPELLINGS = {  # of a tensor of the decoder, and of its output head
    "older": ("language_model.", "language_model."),
    "newer": ("model.language_", ""),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_text_part_is_the_same_model(
    spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    make_checkpoint(Case("gemma3", "Gemma3", {"tie_word_embeddings": False}), plain)
    wrap(plain, wrapped, spelling)
    theirs, ours = (open_model(x, weights="f32") for x in (plain, wrapped))
    assert ours.config == theirs.config
    check_same_weights(ours, theirs)
    notice = (
        f"hetero: {wrapped}: only the text part is loaded; multi_modal_projector, vision_tower "
        "(2 tensors) left out\n"
    )
    assert notice in capsys.readouterr().err


VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "head_dim": 16, "image_size": 28, "patch_size": 14,
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "Gemma3": {"text_config": {"sliding_window": 8}, "mm_tokens_per_image": 1},
    "Mistral3": {
        "text_config": {"model_type": "ministral3", "tie_word_embeddings": False},
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("kind", WHOLE)
def test_logits_of_a_text_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    """As `transformers` saves it and computes it."""
    torch.manual_seed(3)
    changes = WHOLE[kind]
    text = {**TINY, "head_dim": 16, "pad_token_id": 0, **changes["text_config"]}
    vision = VISION | ({"model_type": "pixtral"} if kind == "Mistral3" else {})
    config = getattr(transformers, f"{kind}Config")(
        **changes | {"text_config": text, "vision_config": vision}
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path, TINY["vocab_size"])
    tokens = list(range(5, 60))
    with LLM(str(tmp_path), device="npu", weights="f32", kv="f32") as llm:
        assert relative_error(llm.logits(tokens), reference_logits(model, tokens)) < 2e-5


def wrap(source: Path, target: Path, spelling: str) -> None:
    """Write the model of text and pictures whose decoder is in `source`."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    text = json.loads((source / "config.json").read_text(encoding="utf-8"))
    outer = {key: text.pop(key) for key in ("eos_token_id", "tie_word_embeddings")}
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    written = json.dumps(raw | outer | {"text_config": text, "vision_config": {}})
    (target / "config.json").write_text(written, encoding="utf-8")
    block, head = SPELLINGS[spelling]
    tensors = {
        (head if name.startswith("lm_head") else block) + name: value
        for name, value in load_file(source / "model.safetensors").items()
    }
    for name in ("vision_tower.patch.weight", "multi_modal_projector.weight"):
        tensors[f"model.{name}" if spelling == "newer" else name] = torch.ones(2)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def test_a_text_config_has_the_defaults_of_its_class() -> None:
    config = ModelConfig.from_dict({"model_type": "gemma3", "text_config": {"hidden_size": 2560}})
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2560, 26, 262208)
    assert config.architecture == "gemma3_text"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"text_config": 5}, "config.json: text_config must be a JSON object, got 5; correct the"),
        (
            {"text_config": {"model_type": "mamba"}},
            "text_config: model_type must be gemma3_text, got 'mamba'; choose another model",
        ),
        ({"text_config": {"hidden_size": 0}}, "text_config: hidden_size must be a positive"),
        (
            {"text_config": {}, "quantization_config": {"quant_method": "fp8"}},
            "weights quantised with 'fp8' are not",
        ),
    ],
)
def test_a_wrong_text_config_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        ModelConfig.from_dict({"model_type": "gemma3", **changes})


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_has_a_text_config(name: str) -> None:
    with pytest.raises(ModelError, match=f"text_config must be given for {name}, but it is miss"):
        ModelConfig.from_dict({"model_type": name})


def test_names_without_a_prefix_stay() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "vision"]
    assert text_tensors(names) == ({x: x for x in names}, [])
