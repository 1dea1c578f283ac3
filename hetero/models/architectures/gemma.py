"""Gemma: embeddings scaled by sqrt(d), norms that multiply by 1 + weight, GeGLU."""

from __future__ import annotations

import math
from typing import Any

from hetero.models.architectures.base import Architecture
from hetero.models.fields import Fields


def gemma_fields(source: Fields) -> dict[str, Any]:
    """Return what every Gemma has in common.

    The first configurations said `gelu` where the models were trained with its tanh approximation
    (`transformers` corrected them with `hidden_activation`), so `hidden_act` alone means nothing.
    """
    if source.raw.get("attention_bias"):
        raise source.error("attention_bias", "must be false for Gemma", "choose another model")
    found: dict[str, Any] = {"embed_scale": math.sqrt(source.positive_int("hidden_size"))}
    if source.raw.get("hidden_activation") is None and source.raw.get("hidden_act") == "gelu":
        found["activation"] = "gelu_tanh"
    return found


GEMMA = Architecture(
    name="gemma",
    class_name="GemmaForCausalLM",
    keys={"hidden_act": "hidden_activation"},
    max_position=8192,
    kv_heads=16,
    head_dim=256,
    ids=(2, 1),
    tied=True,
    activation="gelu_pytorch_tanh",
    read=lambda source, _layers: gemma_fields(source),
    norm_offset=1.0,
)
