"""OPT: learned positions (from row 2 of their table) instead of rotary ones, LayerNorm, ReLU."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import Architecture, Decoder, TensorNames
from hetero.models.fields import Fields

POSITION_OFFSET = 2


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    for name, wanted in (
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if source.boolean(name, wanted) is not wanted:
            raise source.error(name, f"must be {str(wanted).lower()}", "choose another OPT model")
    width = source.positive_int("word_embed_proj_dim", source.positive_int("hidden_size"))
    if width != source.positive_int("hidden_size"):
        raise source.error("word_embed_proj_dim", "must be hidden_size", "choose another OPT model")
    bias = source.boolean("enable_bias", True)
    return {
        "norm": "layer",
        "gated": False,
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bias,
        "positions": source.positive_int("max_position_embeddings", 2048) + POSITION_OFFSET,
        "position_offset": POSITION_OFFSET,
    }


def _write(config: Decoder) -> dict[str, Any]:
    return {"enable_bias": config.qkv_bias}


OPT = Architecture(
    name="opt",
    class_name="OPTForCausalLM",
    keys={
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_eps",  # never given: LayerNorm's own default
    },
    grouped=False,
    ids=(2, 2),
    tied=True,
    activation="relu",
    eps=1e-5,
    read=_read,
    write=_write,
    names=TensorNames(
        block="model.decoder.layers.{}.",
        matmuls={
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.out_proj",),
            "gate_up": ("fc1",),
            "down": ("fc2",),
        },
        vectors={"input_norm": "self_attn_layer_norm", "post_norm": "final_layer_norm"},
        model_modules={
            "embed": "model.decoder.embed_tokens",
            "lm_head": "lm_head",
            "final_norm": "model.decoder.final_layer_norm",
            "positions": "model.decoder.embed_positions",
        },
    ),
)
