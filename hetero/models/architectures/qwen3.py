"""Qwen3: each head of queries and keys is normalised before it is rotated."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import (
    Architecture,
    Decoder,
    switched_window,
    write_switched_window,
)
from hetero.models.fields import Fields


def _read(source: Fields, layers: int) -> dict[str, Any]:
    bias = source.boolean("attention_bias", False)
    windows = switched_window(source, layers)
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias, "windows": windows}


def _write(config: Decoder) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, **write_switched_window(config.windows)}


QWEN3 = Architecture(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    max_position=32768,
    kv_heads=32,
    head_dim=128,
    read=_read,
    write=_write,
)
