"""LFM2-MoE: LFM2 whose feed-forwards are routed experts, but for those of the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.models.architectures.base import Decoder
from hetero.models.architectures.lfm2 import LFM2
from hetero.models.expert_config import read_experts
from hetero.models.fields import Fields

EPS = 1e-6  # of the sum that weights are divided by
_COUNT = ("num_experts", "num_local_experts")


def _read(source: Fields, layers: int) -> dict[str, Any]:
    plain = Fields({**source.raw, "block_auto_adjust_ff_dim": False}, source.where)
    name = "num_dense_layers"
    none = isinstance(given := source.raw.get(name), int) and given == 0
    dense = 0 if none else source.positive_int(name, 2)
    if dense >= layers:
        raise source.error(name, f"must be less than the {layers} layers", "use model_type lfm2")
    experts = read_experts(
        source,
        count=_COUNT,
        chosen="num_experts_per_tok",
        width="moe_intermediate_size",
        scores="sigmoid",
        choice_bias=source.boolean("use_expert_bias", True),
        renormalised=source.boolean("norm_topk_prob", True),
        eps=EPS,
        scale=source.positive_float("routed_scaling_factor", 1.0),
        dense=tuple(range(dense)),
    )
    return LFM2.read(plain, layers) | {"experts": experts}


def _write(config: Decoder) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return LFM2.write(config) | {
        "num_dense_layers": len(experts.dense),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "use_expert_bias": experts.choice_bias,
        "norm_topk_prob": experts.renormalised,
        "routed_scaling_factor": experts.scale,
    }


LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    intermediate_size=7168,
    used=(*LFM2.used, *_COUNT),
    read=_read,
    write=_write,
    names=replace(
        LFM2.names,
        vectors={**LFM2.names.vectors, "router": "feed_forward.gate"},
        parameters={"choice_bias": "feed_forward.expert_bias"},
        experts={
            "experts_gate": "feed_forward.experts.{}.w1",
            "experts_up": "feed_forward.experts.{}.w3",
            "experts_down": "feed_forward.experts.{}.w2",
        },
    ),
)
