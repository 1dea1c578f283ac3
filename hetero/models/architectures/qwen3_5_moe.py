"""Qwen3.5-MoE: Qwen3.5 whose feed-forwards are routed experts, and a gated one for all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.models.architectures.base import Decoder
from hetero.models.architectures.qwen3_5 import QWEN3_5
from hetero.models.architectures.qwen3_moe import QWEN3_MOE
from hetero.models.expert_config import read_experts
from hetero.models.fields import Fields
from hetero.models.stacked_experts import Stacked

_COUNT = ("num_experts", "num_local_experts")
_GATE_UP = "mlp.experts.gate_up_proj"


def _read(source: Fields, layers: int) -> dict[str, Any]:
    experts = read_experts(
        source,
        count=_COUNT,
        chosen="num_experts_per_tok",
        width="moe_intermediate_size",
        shared=True,
    )
    return QWEN3_5.read(source, layers) | {"experts": experts}


def _write(config: Decoder) -> dict[str, Any]:
    assert config.experts is not None
    return QWEN3_5.write(config) | {
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.chosen,
        "moe_intermediate_size": config.experts.width,
    }


QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    keys={"intermediate_size": "shared_expert_intermediate_size"},
    kv_heads=2,
    used=(*QWEN3_5.used, *_COUNT),
    defaults={
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    read=_read,
    write=_write,
    names=replace(
        QWEN3_5.names,
        matmuls={
            **QWEN3_5.names.matmuls,
            "gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            "down": ("mlp.shared_expert.down_proj",),
        },
        vectors={
            **QWEN3_5.names.vectors,
            "router": "mlp.gate",
            "shared_gate": "mlp.shared_expert_gate",
        },
        experts=QWEN3_MOE.names.experts,
        stacked={
            "experts_gate": Stacked(module=_GATE_UP, parts=2, part=0),
            "experts_up": Stacked(module=_GATE_UP, parts=2, part=1),
            "experts_down": Stacked(module="mlp.experts.down_proj"),
        },
    ),
)
