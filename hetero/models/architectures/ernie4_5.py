"""ERNIE 4.5: Llama whose heads are rotated in pairs of neighbours."""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import ROTATED_IN_PAIRS, Architecture, Decoder
from hetero.models.fields import Fields


def _read(source: Fields, _layers: int) -> dict[str, Any]:
    bias = source.boolean("use_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def _write(config: Decoder) -> dict[str, Any]:
    return {"use_bias": config.qkv_bias}


ERNIE4_5 = Architecture(
    name="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    max_position=131072,
    kv_heads=2,
    head_dim=128,
    ids=(1, 2),
    tied=True,
    eps=1e-5,
    theta=5e5,
    read=_read,
    write=_write,
    row_order=ROTATED_IN_PAIRS,
)
