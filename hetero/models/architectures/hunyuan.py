"""Hunyuan dense: Llama whose queries and keys are normed after their rotation.

A fixed `alpha` stretches the base period of the rotary embedding (NTK-aware scaling).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.models.architectures.base import Architecture, Decoder, TensorNames
from hetero.models.fields import Fields
from hetero.models.rope_config import rope_fields

MAX_ALPHA = 1_000_000  # published: 1000


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    bias = source.boolean("attention_bias", False)
    fields: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias}
    fields |= {"qk_norm": True, "qk_norm_after": True}
    rope = rope_fields(source)
    kind = rope.raw.get("rope_type", rope.raw.get("type"))
    if kind == "dynamic" and rope.raw.get("alpha"):
        size = source.positive_int("head_dim", 0) or source.positive_int(
            "hidden_size"
        ) // source.positive_int("num_attention_heads")
        if rope.positive_float("alpha") > MAX_ALPHA:
            raise rope.error("alpha", f"must be at most {MAX_ALPHA}", "correct the file")
        stretch = rope.positive_float("alpha") ** (size / max(size - 2, 1))
        fields["adjust_rope"] = lambda rope: replace(rope, theta=rope.theta * stretch)
    return fields


def _write(config: Decoder) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


HUNYUAN = Architecture(
    name="hunyuan_v1_dense",
    class_name="HunYuanDenseV1ForCausalLM",
    ids=(1, 2),
    eps=1e-5,
    read=_read,
    write=_write,
    used=("alpha",),
    names=TensorNames(
        vectors={
            "input_norm": "input_layernorm",
            "post_norm": "post_attention_layernorm",
            "q_norm": "self_attn.query_layernorm",
            "k_norm": "self_attn.key_layernorm",
        }
    ),
)
