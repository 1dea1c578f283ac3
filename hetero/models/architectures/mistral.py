"""Mistral: one sliding window for all layers."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import DEFAULT_WINDOW, Architecture, Decoder, one_window
from hetero.models.fields import Fields


def _read(source: Fields, layers: int) -> dict[str, Any]:
    return {"windows": one_window(source, layers, DEFAULT_WINDOW)}


def _write(config: Decoder) -> dict[str, Any]:
    return {"sliding_window": max(config.windows) or None}


MISTRAL = Architecture(
    name="mistral",
    class_name="MistralForCausalLM",
    max_position=131072,
    kv_heads=8,
    ids=(1, 2),
    read=_read,
    write=_write,
)
