"""Qwen3-MoE: Qwen3 whose feed-forwards are routed experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.models.architectures.base import TensorNames
from hetero.models.architectures.qwen3 import QWEN3
from hetero.models.expert_config import read_experts
from hetero.models.fields import Fields

_COUNT = ("num_experts", "num_local_experts")


def _read(source: Fields, layers: int) -> dict[str, Any]:
    _refuse_dense_layers(source, layers)
    experts = read_experts(
        source,
        count=_COUNT,
        chosen="num_experts_per_tok",
        width="moe_intermediate_size",
        renormalised=source.boolean("norm_topk_prob", False),
    )
    return QWEN3.read(source, layers) | {"experts": experts}


def _refuse_dense_layers(source: Fields, layers: int) -> None:
    """Raise `ModelError` where some layers have a feed-forward that is not routed."""
    remedy = "choose a model whose layers all have experts"
    step = source.positive_int("decoder_sparse_step", 1)
    if step > 1 and layers:
        raise source.error("decoder_sparse_step", "must be 1", remedy)
    if source.raw.get("mlp_only_layers"):
        raise source.error("mlp_only_layers", "must be empty", remedy)


def _write(config: Any) -> dict[str, Any]:
    experts = config.experts
    return QWEN3.write(config) | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.renormalised,
    }


QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    kv_heads=4,
    read=_read,
    write=_write,
    names=TensorNames(
        matmuls={name: QWEN3.names.matmuls[name] for name in ("qkv", "o")},
        vectors={**QWEN3.names.vectors, "router": "mlp.gate"},
        experts={
            "experts_gate": "mlp.experts.{}.gate_proj",
            "experts_up": "mlp.experts.{}.up_proj",
            "experts_down": "mlp.experts.{}.down_proj",
        },
    ),
)
