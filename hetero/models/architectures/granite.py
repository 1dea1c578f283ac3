"""Granite 3 and 4: Llama with factors on embeddings, scores, what blocks add, and logits.

Granite 4's dense models are `granitemoehybrid` without experts and without Mamba layers. MiniCPM is
the same under other names.
"""

from __future__ import annotations

import math
from typing import Any

from hetero.models.architectures.base import (
    Architecture,
    Decoder,
    TensorNames,
    layer_kinds,
    scale,
)
from hetero.models.architectures.llama import LLAMA
from hetero.models.fields import Fields
from hetero.models.sliding import FULL

_POSITIONS = "position_embedding_type"
_ATTENTION = ("attention", FULL)  # in `layer_types`, in either spelling
_SCALES = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
_HYBRID = (*_SCALES, _POSITIONS, "layer_types", "layers_block_type")


def _read(source: Fields, layers: int) -> dict[str, Any]:
    return {
        **LLAMA.read(source, layers),
        "embed_scale": scale(source, "embedding_multiplier"),
        "residual_scale": scale(source, "residual_multiplier"),
        "attention_scale": scale(source, "attention_multiplier"),
        "logit_scale": 1 / scale(source, "logits_scaling"),
    }


def _write(config: Any) -> dict[str, Any]:
    return {
        **LLAMA.write(config),
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": 1 / config.logit_scale,
    }


def _read_hybrid(source: Fields, layers: int) -> dict[str, Any]:
    for name in ("layer_types", "layers_block_type"):
        remedy = "choose a model without Mamba"
        kinds = layer_kinds(source, layers, _ATTENTION, name=name, remedy=remedy)
        if kinds is None and name == "layer_types" and "layers_block_type" not in source.raw:
            raise source.error(name, f"must be {_ATTENTION[0]} in every layer", remedy)
    positions = source.text(_POSITIONS, "nope")
    if positions not in ("rope", "nope"):
        raise source.error(_POSITIONS, "must be rope or nope", "choose another model")
    return {**_read(source, layers), "rotates": (positions == "rope",) * layers}


def _write_hybrid(config: Decoder) -> dict[str, Any]:
    positions = "rope" if any(config.rotates) else "nope"
    kinds = [_ATTENTION[0]] * config.num_layers
    return {**_write(config), _POSITIONS: positions, "layer_types": kinds}


def _read_minicpm(source: Fields, layers: int) -> dict[str, Any]:
    base = source.positive_int("dim_model_base", 1)
    return {
        **LLAMA.read(source, layers),
        "embed_scale": scale(source, "scale_emb"),
        "residual_scale": scale(source, "scale_depth") / math.sqrt(layers),
        "logit_scale": base / source.positive_int("hidden_size"),
    }


def _write_minicpm(config: Decoder) -> dict[str, Any]:
    return {
        **LLAMA.write(config),
        "scale_emb": config.embed_scale,
        "scale_depth": config.residual_scale * math.sqrt(config.num_layers),
        "dim_model_base": round(config.logit_scale * config.hidden_size),
    }


GRANITE = Architecture(
    name="granite",
    class_name="GraniteForCausalLM",
    ids=(1, 2),
    read=_read,
    write=_write,
    used=_SCALES,
)
GRANITE_HYBRID = Architecture(
    name="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    keys={"intermediate_size": "shared_intermediate_size"},
    ids=(1, 2),
    read=_read_hybrid,
    write=_write_hybrid,
    used=_HYBRID,
    names=TensorNames(
        matmuls={
            **TensorNames().matmuls,
            "gate_up": ("shared_mlp.input_linear",),
            "down": ("shared_mlp.output_linear",),
        }
    ),
)
MINICPM = Architecture(
    name="minicpm",
    class_name="MiniCPMForCausalLM",
    ids=(1, 2),
    tied=True,
    read=_read_minicpm,
    write=_write_minicpm,
    used=("scale_emb", "scale_depth"),
)
