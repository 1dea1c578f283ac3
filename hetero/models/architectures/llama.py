"""Llama 1 to 3, TinyLlama and everything else that `transformers` loads as Llama."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import Architecture, Decoder
from hetero.models.fields import Fields


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    attention = source.boolean("attention_bias", False)
    return {
        "qkv_bias": attention,
        "o_bias": attention,
        "mlp_bias": source.boolean("mlp_bias", False),
    }


def _write(config: Decoder) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


LLAMA = Architecture(
    name="llama", class_name="LlamaForCausalLM", ids=(1, 2), read=_read, write=_write
)
