"""Phi-3 and Phi-4: Llama with fused weights and a window for all layers."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import Architecture, Decoder, TensorNames, one_window
from hetero.models.fields import Fields
from hetero.models.rope_config import rotary_factor, rotary_factor_of


def _read(source: Fields, layers: int) -> dict[str, Any]:
    windows = one_window(source, layers, 0)
    return {"windows": windows, "rotary_factor": rotary_factor(source, 1.0)}


def _write(config: Decoder) -> dict[str, Any]:
    return {
        "sliding_window": max(config.windows) or None,
        "partial_rotary_factor": rotary_factor_of(config.rotary_dim, config.head_dim),
    }


PHI3 = Architecture(
    name="phi3",
    class_name="Phi3ForCausalLM",
    max_position=4096,
    ids=(1, 32000),
    eps=1e-5,
    read=_read,
    write=_write,
    names=TensorNames(
        matmuls={
            "qkv": ("self_attn.qkv_proj",),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_up_proj",),
            "down": ("mlp.down_proj",),
        },
        vectors={"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    ),
)
