"""GLM-4: Llama with norms around both halves of a block; half of a head is rotated, in pairs."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import (
    ROTATED_IN_PAIRS,
    Architecture,
    Decoder,
    TensorNames,
)
from hetero.models.fields import Fields
from hetero.models.rope_config import rotary_factor, rotary_factor_of


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    return {
        "out_norms": True,
        "qkv_bias": source.boolean("attention_bias", True),
        "rotary_factor": rotary_factor(source, 0.5),
    }


def _write(config: Decoder) -> dict[str, Any]:
    factor = rotary_factor_of(config.rotary_dim, config.head_dim)
    return {"attention_bias": config.qkv_bias, "partial_rotary_factor": factor}


GLM4 = Architecture(
    name="glm4",
    class_name="Glm4ForCausalLM",
    max_position=131072,
    kv_heads=2,
    head_dim=128,
    eps=1.5625e-7,
    read=_read,
    write=_write,
    row_order=ROTATED_IN_PAIRS,
    names=TensorNames(
        matmuls={
            **TensorNames().matmuls,
            "gate_up": ("mlp.gate_up_proj",),
        },
        vectors={
            "input_norm": "input_layernorm",
            "o_norm": "post_self_attn_layernorm",
            "post_norm": "post_attention_layernorm",
            "down_norm": "post_mlp_layernorm",
        },
    ),
)
