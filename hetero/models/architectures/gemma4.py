"""Gemma 4: layers of two shapes, some of which attend to the keys and values of a layer before.

Layers with full attention have larger heads. The last `num_kv_shared_layers` have queries only. The
E models give every layer inputs of its own. Scores are not scaled, values are normed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hetero.models.architectures.base import (
    Architecture,
    Decoder,
    every,
    kinds_of,
    layer_kinds,
    one_window,
    windows_of,
)
from hetero.models.architectures.gemma2 import cap
from hetero.models.architectures.gemma3 import GEMMA3
from hetero.models.expert_config import ExpertConfig, read_experts
from hetero.models.fields import Fields
from hetero.models.layer_sizes import read_layers, write_layers
from hetero.models.sliding import FULL, SLIDING
from hetero.models.stacked_experts import Stacked

BIDIRECTIONAL: Final = "use_bidirectional_attention"
ROUTER: Final = {
    "router": "router.proj",
    "experts_norm": "pre_feedforward_layernorm_2",
    "plain_norm": "post_feedforward_layernorm_1",
    "chosen_norm": "post_feedforward_layernorm_2",
}
INPUTS: Final = {"input_gate": ("per_layer_input_gate",), "input_out": ("per_layer_projection",)}
SHARED: Final = {
    "input_in": "model.per_layer_model_projection",
    "input_in_norm": "model.per_layer_projection_norm",
}
ROPES: Final = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _read(source: Fields, layers: int, inputs: int = 256) -> dict[str, Any]:
    if source.raw.get(BIDIRECTIONAL) not in (None, False, "vision"):  # pictures are left out
        raise source.error(BIDIRECTIONAL, "is not supported", "choose another model")
    (window, *_) = one_window(source, layers, 512)
    kinds = [*(layer_kinds(source, layers) or every(6, layers))[:-1], FULL]
    width = source.count("hidden_size_per_layer_input", inputs)
    vocabulary = source.positive_int("vocab_size")
    if width and source.positive_int("vocab_size_per_layer_input", 262144) != vocabulary:
        rule = f"must be vocab_size ({vocabulary})"
        raise source.error("vocab_size_per_layer_input", rule, "correct the file")
    bias = source.boolean("attention_bias", False)
    return {
        "experts": _experts(source) if source.boolean("enable_moe_block", False) else None,
        "windows": windows_of(kinds, window),
        **read_layers(source, kinds),
        "layer_inputs": width,
        "layer_scale": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "v_norm": True,
        "out_norms": True,
        "attention_scale": 1.0,
        "embed_scale": source.positive_int("hidden_size") ** 0.5,
        "logit_softcap": cap(source, "final_logit_softcapping", 0.0),
    }


def _experts(source: Fields) -> ExpertConfig:
    return read_experts(
        source,
        count=("num_experts",),
        chosen="top_k_experts",
        width="moe_intermediate_size",
        parallel=True,
    )


def _write(config: Decoder) -> dict[str, Any]:
    experts = config.experts
    routed = (
        {}
        if experts is None
        else {
            "enable_moe_block": True,
            "num_experts": experts.count,
            "top_k_experts": experts.chosen,
            "moe_intermediate_size": experts.width,
        }
    )
    return {
        **routed,
        "attention_bias": config.qkv_bias,
        "final_logit_softcapping": config.logit_softcap or None,
        "hidden_size_per_layer_input": config.layer_inputs,
        "layer_types": kinds_of(config.windows),
        "sliding_window": max(config.windows) or None,
        "vocab_size_per_layer_input": config.vocab_size,
        **write_layers(config),
    }


GEMMA4 = Architecture(
    name="gemma4_text",
    class_name="Gemma4ForCausalLM",
    keys=GEMMA3.keys,
    max_position=131072,
    intermediate_size=9216,
    kv_heads=4,
    head_dim=256,
    ids=(2, 1),
    tied=True,
    activation="gelu_pytorch_tanh",
    theta=1e6,
    local_theta=1e4,
    ropes=ROPES,
    read=_read,
    write=_write,
    used=(BIDIRECTIONAL, "num_experts"),
    defaults={"vocab_size": 262144, "num_hidden_layers": 30, "num_attention_heads": 8}
    | {"hidden_size": 2304},
    names=replace(
        GEMMA3.names,
        matmuls={**GEMMA3.names.matmuls, "q_only": ("self_attn.q_proj",), **INPUTS},
        vectors={
            **GEMMA3.names.vectors,
            **ROUTER,
            "input_out_norm": "post_per_layer_input_norm",
        },
        parameters={
            "layer_scale": "layer_scalar",
            "router_norm": "router.scale",
            "expert_scale": "router.per_expert_scale",
        },
        stacked={
            "experts_gate": Stacked(module="experts.gate_up_proj", parts=2, part=0),
            "experts_up": Stacked(module="experts.gate_up_proj", parts=2, part=1),
            "experts_down": Stacked(module="experts.down_proj"),
        },
        shared=SHARED,
        model_modules={
            **GEMMA3.names.model_modules,
            "embed_inputs": "model.embed_tokens_per_layer",
        },
    ),
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    name="gemma4_unified_text",
    class_name="Gemma4UnifiedForCausalLM",
    max_position=262144,
    read=lambda source, layers: _read(source, layers, inputs=0),
)
