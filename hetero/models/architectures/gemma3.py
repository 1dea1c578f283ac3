"""Gemma 3: Gemma 2 with norms of queries and keys, and a rotary embedding for each kind of layer.

Five of six layers attend through a window, with a base period of their own that is never scaled.
"""

from __future__ import annotations

from typing import Any

from hetero.models.architectures.base import (
    DEFAULT_WINDOW,
    Architecture,
    TensorNames,
    every,
    layer_kinds,
    one_window,
    windows_of,
)
from hetero.models.architectures.gemma import gemma_fields
from hetero.models.architectures.gemma2 import GEMMA2, gemma2_numbers, write_gemma2
from hetero.models.fields import Fields

PATTERN = 6  # every sixth layer has full attention


def _read(source: Fields, layers: int) -> dict[str, Any]:
    (window, *_) = one_window(source, layers, DEFAULT_WINDOW)
    pattern = source.positive_int("sliding_window_pattern", PATTERN)
    kinds = layer_kinds(source, layers) or every(pattern, layers)
    return {
        **gemma_fields(source),
        **gemma2_numbers(source, caps=(0.0, 0.0)),
        "windows": windows_of(kinds, window),
        "qk_norm": True,
    }


GEMMA3 = Architecture(
    name="gemma3_text",
    class_name="Gemma3ForCausalLM",
    keys=GEMMA2.keys,
    max_position=131072,
    kv_heads=4,
    head_dim=256,
    ids=(2, 1),
    tied=True,
    activation="gelu_pytorch_tanh",
    theta=1e6,
    local_theta=1e4,
    read=_read,
    write=write_gemma2,
    used=("sliding_window_pattern", "rope_local_base_freq"),
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    norm_offset=1.0,
    names=TensorNames(
        vectors={
            **GEMMA2.names.vectors,
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
        }
    ),
)
