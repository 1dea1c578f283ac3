"""OLMo 2 and 3: blocks whose outputs are normed, not their inputs.

Queries and keys are normed over their whole rows. OLMo 3 has windows in three of four layers, and
scales the rotary embeddings of the others alone.
"""

from __future__ import annotations

from dataclasses import replace
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
from hetero.models.fields import Fields

POST_NORMS = TensorNames(
    vectors={
        "o_norm": "post_attention_layernorm",
        "down_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }
)
PERIOD = 4  # of layers, the last of which has full attention


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    bias = source.boolean("attention_bias", False)
    norms = {"in_norms": False, "out_norms": True, "qk_norm": True, "qk_norm_row": True}
    return {**norms, "qkv_bias": bias, "o_bias": bias}


def _write(config: Decoder) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _read3(source: Fields, layers: int) -> dict[str, Any]:
    (window, *_) = one_window(source, layers, DEFAULT_WINDOW)
    kinds = layer_kinds(source, layers) or every(PERIOD, layers)
    return {**_read(source, layers), "windows": windows_of(kinds, window)}


def _write3(config: Decoder) -> dict[str, Any]:
    return {
        **_write(config),
        "sliding_window": max(config.windows) or None,
        "layer_types": kinds_of(config.windows),
    }


OLMO2 = Architecture(
    name="olmo2",
    class_name="Olmo2ForCausalLM",
    eps=1e-5,
    read=_read,
    write=_write,
    names=POST_NORMS,
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    class_name="Olmo3ForCausalLM",
    theta=5e5,
    local_theta=5e5,
    read=_read3,
    write=_write3,
)
