"""Gemma 2: norms around both halves of a block, capped scores and logits, alternating windows.

Every other layer attends through a window, and scores are scaled by `query_pre_attn_scalar`.
"""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import (
    DEFAULT_WINDOW,
    Architecture,
    Decoder,
    TensorNames,
    every,
    kinds_of,
    layer_kinds,
    one_window,
    windows_of,
)
from hetero.models.architectures.gemma import gemma_fields
from hetero.models.fields import Fields


def cap(source: Fields, name: str, default: float) -> float:
    """Return a soft cap; null is none."""
    if name in source.raw and source.raw[name] is None:
        return 0.0
    return source.positive_float(name, default)


def gemma2_numbers(source: Fields, caps: tuple[float, float]) -> dict[str, Any]:
    """Return norms after both halves of a block, and scales.

    `caps` are those of scores and logits that are not given.
    """
    scores, logits = caps
    return {
        "out_norms": True,
        "attention_scale": source.positive_float("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": cap(source, "attn_logit_softcapping", scores),
        "logit_softcap": cap(source, "final_logit_softcapping", logits),
    }


def _read(source: Fields, layers: int) -> dict[str, Any]:
    (window, *_) = one_window(source, layers, DEFAULT_WINDOW)
    kinds = layer_kinds(source, layers) or every(2, layers)
    return {
        **gemma_fields(source),
        **gemma2_numbers(source, caps=(50.0, 30.0)),
        "windows": windows_of(kinds, window),
    }


def write_gemma2(config: Decoder) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 read."""
    assert config.attention_scale is not None
    scalar = config.attention_scale**-2
    near = round(scalar)  # the root and the square need not give the same float back
    exact = near if near and float(near) ** -0.5 == config.attention_scale else scalar
    return {
        "sliding_window": max(config.windows) or None,
        "layer_types": kinds_of(config.windows),
        "query_pre_attn_scalar": exact,
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }


GEMMA2 = Architecture(
    name="gemma2",
    class_name="Gemma2ForCausalLM",
    keys={"hidden_act": "hidden_activation"},
    max_position=8192,
    kv_heads=4,
    head_dim=256,
    ids=(2, 1),
    tied=True,
    activation="gelu_pytorch_tanh",
    read=_read,
    write=write_gemma2,
    norm_offset=1.0,
    names=TensorNames(
        vectors={
            "input_norm": "input_layernorm",
            "o_norm": "post_attention_layernorm",
            "post_norm": "pre_feedforward_layernorm",
            "down_norm": "post_feedforward_layernorm",
        }
    ),
)
