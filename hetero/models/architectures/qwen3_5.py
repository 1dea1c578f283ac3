"""Qwen3.5: gated delta nets in three of four layers, and attention with output gates in the fourth.

`q_proj` has the queries and the gates of the output head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.models.architectures.base import (
    Architecture,
    Decoder,
    RowOrder,
    TensorNames,
    layer_kinds,
)
from hetero.models.architectures.qwen3 import QWEN3
from hetero.models.delta_net import LINEAR, DeltaNet, read_delta_net, write_delta_net
from hetero.models.fields import Fields
from hetero.models.rope_config import rotary_factor, rotary_factor_of
from hetero.models.sliding import FULL

ROTATED = 0.25  # of a head
INTERVAL = 4  # every fourth layer has attention
MIXERS = {FULL: "attention", LINEAR: "delta"}
TYPES = {mixer: kind for kind, mixer in MIXERS.items()}


def _read(source: Fields, layers: int) -> dict[str, Any]:
    bias = source.boolean("attention_bias", False)
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "output_gate": True,
        "mixers": tuple(MIXERS[kind] for kind in _layer_types(source, layers)),
        "delta": read_delta_net(source),
        "conv_taps": _taps(source),
        "rotary_factor": rotary_factor(source, ROTATED),
    }


def _taps(source: Fields) -> int:
    taps = source.positive_int("linear_conv_kernel_dim", 4)
    if taps < 2:
        raise source.error("linear_conv_kernel_dim", "must be at least 2", "correct the file")
    return taps


def _layer_types(source: Fields, layers: int) -> list[str]:
    types = layer_kinds(source, layers, (LINEAR, FULL))
    if types is None:
        interval = source.positive_int("full_attention_interval", INTERVAL)
        if interval > layers:
            raise source.error(
                "full_attention_interval",
                f"must be at most the {layers} layers, for one to have attention",
                "correct the file",
            )
        return [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    if FULL not in types:
        raise source.error(
            "layer_types", f"must have a layer of {FULL}", "choose a model with attention"
        )
    return types


def _write(config: Decoder) -> dict[str, Any]:
    assert config.delta is not None
    return {
        "attention_bias": config.qkv_bias,
        "layer_types": [TYPES[mixer] for mixer in config.mixers],
        "linear_conv_kernel_dim": config.conv_taps,
        "partial_rotary_factor": rotary_factor_of(config.rotary_dim, config.head_dim),
        **write_delta_net(config.delta),
    }


def queries_first(config: Decoder) -> npt.NDArray[np.int64]:
    """Return the rows of `q_proj` in the order queries, gates."""
    rows = np.arange(2 * config.heads * config.head_dim).reshape(config.heads, 2, config.head_dim)
    return rows.swapaxes(0, 1).reshape(-1)


def _head_size(net: DeltaNet) -> int:
    return net.v_dim


def _value_order(size: Callable[[DeltaNet], int], *, behind_keys: bool = False) -> RowOrder:
    """Return the order of value heads of so many rows each, alone or behind queries and keys."""

    def order(config: Decoder) -> npt.NDArray[np.int64]:
        net = config.delta
        assert net is not None
        return net.value_rows(size(net), before=(net.channels - net.values) * behind_keys)

    return order


QWEN3_5 = Architecture(
    name="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    max_position=32768,
    kv_heads=4,
    head_dim=256,
    read=_read,
    write=_write,
    norm_offset=1.0,
    mtp=True,
    used=("layer_types",),
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
    row_order={
        "self_attn.q_proj": queries_first,
        **{
            f"linear_attn.{name}": _value_order(_head_size, behind_keys=behind_keys)
            for name, behind_keys in (("in_proj_qkv", True), ("conv1d", True), ("in_proj_z", False))
        },
        **{
            f"linear_attn.{name}": _value_order(lambda _: 1)
            for name in ("in_proj_b", "in_proj_a", "A_log", "dt_bias")
        },
    },
    column_order={"linear_attn.out_proj": _value_order(_head_size)},
    names=TensorNames(
        matmuls={
            **QWEN3.names.matmuls,
            "delta_in": tuple(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "b", "a")),
            "delta_out": ("linear_attn.out_proj",),
        },
        vectors={
            **QWEN3.names.vectors,
            "conv": "linear_attn.conv1d",
            "delta_norm": "linear_attn.norm",
        },
        parameters={"delta_decay": "linear_attn.A_log", "delta_dt_bias": "linear_attn.dt_bias"},
    ),
)
