"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward in parallel after one LayerNorm.

Biases are everywhere, there is no gate, and only the first dimensions of a head are rotated.
"""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import Architecture, Decoder, TensorNames
from hetero.models.fields import Fields
from hetero.models.rope_config import rotary_factor, rotary_factor_of


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    if source.boolean("qk_layernorm", False):
        raise source.error("qk_layernorm", "must be false", "choose another model")
    return {
        "norm": "layer",
        "parallel": True,
        "gated": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "rotary_factor": rotary_factor(source, 0.5),
    }


def _write(config: Decoder) -> dict[str, Any]:
    return {"partial_rotary_factor": rotary_factor_of(config.rotary_dim, config.head_dim)}


PHI = Architecture(
    name="phi",
    class_name="PhiForCausalLM",
    keys={"rms_norm_eps": "layer_norm_eps"},
    ids=(1, 2),
    activation="gelu_new",
    eps=1e-5,
    read=_read,
    write=_write,
    names=TensorNames(
        matmuls={
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.dense",),
            "gate_up": ("mlp.fc1",),
            "down": ("mlp.fc2",),
        },
        vectors={"input_norm": "input_layernorm"},
        model_modules={
            "embed": "model.embed_tokens",
            "lm_head": "lm_head",
            "final_norm": "model.final_layernorm",
        },
    ),
)
