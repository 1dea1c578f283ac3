"""Command R7B (Cohere 2): attention and feed-forward in parallel after a LayerNorm without bias.

Layers with a window rotate pairs of neighbours; every fourth layer has full attention and no
rotary embedding. Logits have a factor.
"""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import (
    DEFAULT_WINDOW,
    ROTATED_IN_PAIRS,
    Architecture,
    Decoder,
    TensorNames,
    every,
    kinds_of,
    layer_kinds,
    one_window,
    scale,
    windows_of,
)
from hetero.models.fields import Fields

PERIOD = 4


def _read(source: Fields, layers: int) -> dict[str, Any]:
    (window, *_) = one_window(source, layers, DEFAULT_WINDOW)
    period = source.positive_int("sliding_window_pattern", PERIOD)
    windows = windows_of(layer_kinds(source, layers) or every(period, layers), window)
    bias = source.boolean("attention_bias", False)
    return {
        "norm": "layer",
        "parallel": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "logit_scale": scale(source, "logit_scale", 0.0625),
        "windows": windows,
        "rotates": tuple(size > 0 for size in windows),
    }


def _write(config: Decoder) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "logit_scale": config.logit_scale,
        "sliding_window": max(config.windows) or None,
        "layer_types": kinds_of(config.windows),
    }


COHERE2 = Architecture(
    name="cohere2",
    class_name="Cohere2ForCausalLM",
    keys={"rms_norm_eps": "layer_norm_eps"},
    max_position=8192,
    ids=(5, 255001),
    tied=True,
    eps=1e-5,
    read=_read,
    write=_write,
    used=("logit_scale", "sliding_window_pattern"),
    row_order=ROTATED_IN_PAIRS,
    norm_bias=False,
    names=TensorNames(vectors={"input_norm": "input_layernorm"}),
)
