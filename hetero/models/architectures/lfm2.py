"""LFM2 and LFM2.5: most layers mix tokens by a short convolution, the others by attention.

A convolution's layer projects to B | C | x, convolves B ⊙ x over `conv_L_cache` tokens, and
multiplies by C. Its state is the last rows of B ⊙ x.
"""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import Architecture, Decoder, TensorNames, layer_kinds
from hetero.models.fields import Fields
from hetero.models.sliding import FULL

CONV = "conv"


def _mixers(source: Fields, layers: int) -> tuple[str, ...]:
    """Return how each layer mixes tokens: by `layer_types`, else by `full_attn_idxs`."""
    types = layer_kinds(source, layers, (CONV, FULL))
    if types is None:
        places = source.raw.get("full_attn_idxs")
        if places is None:
            places = list(range(layers))
        if not isinstance(places, list) or any(
            isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < layers for x in places
        ):
            raise source.error(
                "full_attn_idxs", f"must list layers from 0 to {layers - 1}", "correct the file"
            )
        types = [FULL if i in places else CONV for i in range(layers)]
    if FULL not in types:
        raise source.error(
            "layer_types", f"must have a layer of {FULL}", "choose a model with attention"
        )
    return tuple("attention" if kind == FULL else "conv" for kind in types)


def _feed_forward(source: Fields) -> int:
    """Return the width of the feed-forward (`Lfm2MLP`)."""
    name = "block_ff_dim" if source.raw.get("block_ff_dim") is not None else "intermediate_size"
    width = source.positive_int(name, LFM2.intermediate_size)
    if not source.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" not in source.raw or source.raw["block_ffn_dim_multiplier"]:
        step = source.positive_int("block_multiple_of", 256)
        width = int(source.positive_float("block_ffn_dim_multiplier", 1.0) * width)
        width = -(-width // step) * step
    if width < 1:
        raise source.error(name, "must leave a width of at least 1", "correct the file")
    return width


def _read(source: Fields, layers: int) -> dict[str, Any]:
    mixers = _mixers(source, layers)
    taps = source.positive_int("conv_L_cache", 3)
    if taps < 2:
        raise source.error("conv_L_cache", "must be at least 2", "correct the file")
    tied = "tie_embedding" if source.raw.get("tie_embedding") is not None else "tie_word_embeddings"
    return {
        "mixers": mixers,
        "conv_taps": taps,
        "conv_bias": source.boolean("conv_bias", False),
        "intermediate_size": _feed_forward(source),
        "tie_word_embeddings": source.boolean(tied, LFM2.tied),
        "qk_norm": True,
    }


def _write(config: Decoder) -> dict[str, Any]:
    return {
        "layer_types": [FULL if mixer == "attention" else CONV for mixer in config.mixers],
        "conv_L_cache": config.conv_taps,
        "conv_bias": config.conv_bias,
        "block_auto_adjust_ff_dim": False,
    }


LFM2 = Architecture(
    name="lfm2",
    class_name="Lfm2ForCausalLM",
    keys={"rms_norm_eps": "norm_eps"},
    max_position=128000,
    intermediate_size=12288,
    theta=1e6,
    kv_heads=8,
    ids=(1, 2),
    tied=True,
    used=("layer_types",),
    eps=1e-5,
    read=_read,
    write=_write,
    names=TensorNames(
        matmuls={
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": ("self_attn.out_proj",),
            "conv_in": ("conv.in_proj",),
            "conv_out": ("conv.out_proj",),
            "gate_up": ("feed_forward.w1", "feed_forward.w3"),
            "down": ("feed_forward.w2",),
        },
        vectors={
            "input_norm": "operator_norm",
            "post_norm": "ffn_norm",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
            "conv": "conv.conv",
        },
        model_modules={
            "embed": "model.embed_tokens",
            "lm_head": "lm_head",
            "final_norm": "model.embedding_norm",
        },
    ),
)
