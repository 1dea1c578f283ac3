"""gpt-oss: attention with sinks, every other layer in a window; all feed-forwards are experts.

Gates and ups of an expert are row by row in one tensor. Their activation is clamped.
"""

from __future__ import annotations

from typing import Any

from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.ops import SWIGLU_ALPHA, SWIGLU_LIMIT
from hetero.models.architectures.base import (
    Architecture,
    Decoder,
    TensorNames,
    every,
    kinds_of,
    layer_kinds,
    one_window,
    windows_of,
)
from hetero.models.expert_config import read_experts
from hetero.models.fields import Fields
from hetero.models.rope_config import LayerRope
from hetero.models.stacked_experts import Stacked

WINDOW = 128
# The scaling of `transformers` where config.json has none.
_YARN = RopeScaling(kind="yarn", factor=32.0, original_max_position=4096, truncate=False)
_COUNT = ("num_local_experts", "num_experts")
_GATE_UP = "mlp.experts.gate_up_proj"


def _read(source: Fields, layers: int) -> dict[str, Any]:
    for name, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if source.positive_float(name, value) != value:
            raise source.error(name, f"other than {value} is not supported", "choose another model")
    (window, *_) = one_window(source, layers, WINDOW)
    bias = source.boolean("attention_bias", True)
    experts = read_experts(
        source,
        count=_COUNT,
        chosen="num_experts_per_tok",
        width="intermediate_size",
        scores="softmax_chosen",
        router_bias=True,
        bias=True,
        activation="swiglu_oai",
    )
    return {
        "experts": experts,
        "sinks": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "windows": windows_of(layer_kinds(source, layers) or every(2, layers), window),
        "adjust_rope": None if _has_rope(source) else _scaled,
    }


def _has_rope(source: Fields) -> bool:
    return any(source.raw.get(name) for name in ("rope_parameters", "rope_scaling"))


def _scaled(rope: LayerRope) -> LayerRope:
    return LayerRope(theta=rope.theta, scaling=_YARN)


def _write(config: Decoder) -> dict[str, Any]:
    assert config.experts is not None
    rope = {} if config.rope_scaled else {"rope_scaling": {"rope_type": "default"}}
    return rope | {
        "attention_bias": config.qkv_bias,
        "layer_types": kinds_of(config.windows),
        "sliding_window": max(config.windows) or None,
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.chosen,
    }


GPT_OSS = Architecture(
    name="gpt_oss",
    class_name="GptOssForCausalLM",
    max_position=131072,
    intermediate_size=2880,
    kv_heads=8,
    head_dim=64,
    eps=1e-5,
    theta=150000.0,
    read=_read,
    write=_write,
    used=(*_COUNT, "layer_types"),
    quantised=("mxfp4",),
    names=TensorNames(
        vectors={**TensorNames().vectors, "router": "mlp.router"},
        parameters={"sinks": "self_attn.sinks"},
        stacked={
            "experts_gate": Stacked(
                module=_GATE_UP, parts=2, part=0, interleaved=True, transposed=True
            ),
            "experts_up": Stacked(
                module=_GATE_UP, parts=2, part=1, interleaved=True, transposed=True
            ),
            "experts_down": Stacked(module="mlp.experts.down_proj", transposed=True),
        },
    ),
)
