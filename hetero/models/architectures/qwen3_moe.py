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
    experts = read_experts(
        source,
        count=_COUNT,
        chosen="num_experts_per_tok",
        width="moe_intermediate_size",
        renormalised=source.boolean("norm_topk_prob", False),
        dense=_dense_layers(source, layers),
    )
    return QWEN3.read(source, layers) | {"experts": experts}


def _dense_layers(source: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers whose feed-forward is not routed."""
    step = source.positive_int("decoder_sparse_step", 1)
    listed = source.raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(x not in range(layers) for x in listed):
        raise source.error(
            "mlp_only_layers", f"must list layers of the {layers}, from 0 on", "correct the file"
        )
    dense = tuple(x for x in range(layers) if x in listed or (x + 1) % step)
    if len(dense) == layers:
        name = "mlp_only_layers" if listed else "decoder_sparse_step"
        raise source.error(name, "leaves no layer with experts", "use model_type qwen3")
    return dense


def _write(config: Any) -> dict[str, Any]:
    experts = config.experts
    return QWEN3.write(config) | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.renormalised,
        "mlp_only_layers": list(experts.dense),
    }


QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    kv_heads=4,
    used=_COUNT,
    read=_read,
    write=_write,
    names=TensorNames(
        vectors={**QWEN3.names.vectors, "router": "mlp.gate"},
        experts={
            "experts_gate": "mlp.experts.{}.gate_proj",
            "experts_up": "mlp.experts.{}.up_proj",
            "experts_down": "mlp.experts.{}.down_proj",
        },
    ),
)
