"""Qwen1.5, Qwen2 and Qwen2.5: biases on queries, keys and values."""

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
    return {"qkv_bias": True, "windows": switched_window(source, layers)}


def _write(config: Decoder) -> dict[str, Any]:
    return write_switched_window(config.windows)


QWEN2 = Architecture(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    max_position=32768,
    kv_heads=32,
    read=_read,
    write=_write,
)
