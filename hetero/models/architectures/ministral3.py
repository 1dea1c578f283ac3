"""Ministral 3: Mistral whose queries grow with their position (`llama_4_scaling_beta`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero.models.architectures.base import one_window
from hetero.models.architectures.mistral import MISTRAL
from hetero.models.fields import Fields
from hetero.models.rope_config import NO_SCALING, rope_fields


def _read(source: Fields, layers: int) -> dict[str, Any]:
    if all(source.raw.get(name) is None for name in ("rope_parameters", "rope_scaling")):
        raise source.error("rope_parameters", "must be given for ministral3", "correct the file")
    fields: dict[str, Any] = {"windows": one_window(source, layers, 0)}
    rope = rope_fields(source)
    if rope.raw.get("llama_4_scaling_beta"):
        factors = {
            "llama_4_scaling_beta": rope.positive_float("llama_4_scaling_beta"),
            "original_max_position": rope.positive_int("original_max_position_embeddings"),
        }
        fields["adjust_rope"] = lambda x: replace(x, scaling=replace(x.scaling, **factors))
    return fields


def _write(config: Any) -> dict[str, Any]:
    unscaled = {"rope_scaling": {"rope_type": "default"}}
    return MISTRAL.write(config) | (unscaled if config.rope_scaling == NO_SCALING else {})


MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    class_name="Ministral3ForCausalLM",
    max_position=262144,
    head_dim=128,
    eps=1e-5,
    theta=1e6,
    read=_read,
    write=_write,
    used=("llama_4_scaling_beta",),
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
    },
)
