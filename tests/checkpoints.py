"""Random Hugging Face checkpoints of every supported architecture, and the reference's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hetero.backends.weights import PackedWeight
from hetero.models import LoadedModel

TINY = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """One architecture at one size."""

    name: str
    kind: str
    changes: dict[str, Any]


CASES = (
    Case("llama-tied", "Llama", {"tie_word_embeddings": True}),
    Case(
        "llama3-rope",
        "Llama",
        {
            "hidden_size": 128,
            "head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    Case("llama-linear-rope", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    Case(
        "llama-yarn-rope",
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    Case("mistral-window", "Mistral", {"sliding_window": 24, "head_dim": 16}),
    Case(
        "qwen2-biases",
        "Qwen2",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    Case("qwen3-qk-norm", "Qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
)


def make_checkpoint(
    case: Case, folder: Path, *, dtype: torch.dtype = torch.float32, spread: float = 0.1
) -> Any:
    """Write a random checkpoint; returns the `transformers` model in float32.

    `spread` is the weights' standard deviation; 0.1 lets the blocks outweigh the embeddings, so
    that a wrong block cannot hide; 0.02 is what `transformers` itself takes.
    """
    torch.manual_seed(7)
    config = getattr(transformers, f"{case.kind}Config")(
        **{**TINY, "initializer_range": spread, **case.changes}
    )
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(dtype).save_pretrained(folder)
    write_byte_tokenizer(folder, config.vocab_size)
    return model.to(torch.float32)


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer that covers the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet]
    words += [f"<extra{i}>" for i in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}', encoding="utf-8"
    )


def load_dequantized(model: Any, loaded: LoadedModel) -> Any:
    """Put the numbers that `loaded` computes with into the reference model."""
    config = loaded.config
    state: dict[str, torch.Tensor] = {}

    def put(name: str, weight: PackedWeight, rows: slice = slice(None)) -> None:
        state[f"{name}.weight"] = torch.from_numpy(weight.dequantize()[rows].copy())

    put("model.embed_tokens", loaded.weights.embed())
    put("lm_head", loaded.weights.lm_head())
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    cuts = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    for i in range(config.num_layers):
        block = loaded.weights.block(i)
        for name, rows in cuts.items():
            put(f"model.layers.{i}.self_attn.{name}_proj", block.qkv, rows)
        put(f"model.layers.{i}.self_attn.o_proj", block.o)
        half = config.intermediate_size
        put(f"model.layers.{i}.mlp.gate_proj", block.gate_up, slice(0, half))
        put(f"model.layers.{i}.mlp.up_proj", block.gate_up, slice(half, None))
        put(f"model.layers.{i}.mlp.down_proj", block.down)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith(("norm.weight", "bias")) for name in missing), missing
    return model


def reference_logits(model: Any, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits [tokens, vocab] of the `transformers` model, float32."""
    with torch.no_grad():
        found = model(torch.tensor([list(tokens)])).logits[0]
    return np.asarray(found.float().numpy())


def relative_error(got: Any, expected: Any) -> float:
    """‖got − expected‖ / ‖expected‖ in float64."""
    wide = np.asarray(expected, dtype=np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - wide) / np.linalg.norm(wide))
