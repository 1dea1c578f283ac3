"""RoPE scaling in the metadata of a GGUF file, as llama.cpp's loader understands it.

rope.scaling.type         none, linear, yarn or longrope; linear where it is absent
rope.scaling.factor       positions are divided by it; in files of 2023 rope.scale_linear
rope.scaling.attn_factor  multiplies cos and sin, on top of YaRN's own factor
"""

from __future__ import annotations

import math
from typing import Any, Final

from hetero.errors import ModelError
from hetero.models.fields import is_number
from hetero.models.gguf.file import GgufFile

_TYPES: Final = ("none", "linear", "yarn")
_LONG: Final = ("rope_factors_long.weight", "rope_factors_short.weight")
_OTHER_FILE: Final = "choose another file, or the model's Hugging Face directory if it is supported"


def rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a config.json, None without scaling. Raises `ModelError`."""
    prefix = f"{architecture}.rope"
    kind = file.metadata.get(f"{prefix}.scaling.type", "linear")
    factors = next((name for name in _LONG if name in file.tensors), None)
    if factors is not None:
        raise ModelError(
            f"{file.path}: tensor {factors} scales positions by LongRoPE, which is not supported; "
            "choose a model with a short context (Phi-3's of 4k tokens)"
        )
    if kind not in _TYPES:
        raise ModelError(
            f"{file.path}: {prefix}.scaling.type must be one of {', '.join(_TYPES)}, got {kind!r}; "
            f"{_OTHER_FILE}"
        )
    factor = _number(file, f"{prefix}.scaling.factor", f"{prefix}.scale_linear")
    attention = _number(file, f"{prefix}.scaling.attn_factor", zero=False)
    if kind == "yarn":
        return _yarn(file, prefix, factor, attention)
    factor = 1.0 if kind == "none" else factor
    if attention == 1:
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if factor != 1:
        raise ModelError(
            f"{file.path}: {prefix}.scaling.attn_factor other than 1 is supported with the "
            f"scaling type yarn or without a factor, got {attention:g} with {kind} scaling by "
            f"{factor:g}; {_OTHER_FILE}"
        )
    return {"rope_type": "yarn", "factor": 1.0, "attention_factor": attention}  # no frequency moves


def _yarn(file: GgufFile, prefix: str, factor: float, attention: float) -> dict[str, Any]:
    """Return YaRN's scaling; llama.cpp multiplies the attention factor of the paper."""
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = file.metadata.get(f"{prefix}.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if attention != 1:
        own = 1.0 if factor <= 1 else 1.0 + 0.1 * math.log(factor)
        scaling["attention_factor"] = attention * own
    return scaling


def _number(file: GgufFile, *names: str, zero: bool = True) -> float:
    """Return the first of these entries that is there, else 1; with `zero` also for 0."""
    for name in names:
        value = file.metadata.get(name)
        if value is not None:
            if not is_number(value) or not 0 <= value < math.inf or not (value or zero):
                raise ModelError(
                    f"{file.path}: {name} must be a positive number, got {value!r}; {_OTHER_FILE}"
                )
            return float(value) or 1.0
    return 1.0
