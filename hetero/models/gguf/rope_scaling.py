"""RoPE scaling in the metadata of a GGUF file, as llama.cpp's loader understands it.

rope.scaling.type         none, linear, yarn or longrope; linear where it is absent
rope.scaling.factor       positions are divided by it; in files of 2023 rope.scale_linear
rope.scaling.attn_factor  multiplies cos and sin, on top of YaRN's own factor
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from hetero.errors import ModelError
from hetero.models.fields import is_number
from hetero.models.gguf.file import GgufFile

_TYPES: Final = ("none", "linear", "yarn", "longrope")
_FACTORS: Final = {"short_factor": "rope_factors_short.weight",
                   "long_factor": "rope_factors_long.weight"}  # fmt: skip
_OTHER_FILE: Final = "choose another file, or the model's Hugging Face directory if it is supported"


def rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a config.json, None without scaling. Raises `ModelError`."""
    prefix = f"{architecture}.rope"
    kind = file.metadata.get(f"{prefix}.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ModelError(
            f"{file.path}: {prefix}.scaling.type must be one of {', '.join(_TYPES)}, got {kind!r}; "
            f"{_OTHER_FILE}"
        )
    factor = _number(file, f"{prefix}.scaling.factor", f"{prefix}.scale_linear")
    attention = _number(file, f"{prefix}.scaling.attn_factor", zero=False)
    factor = 1.0 if kind == "none" else factor
    if kind == "longrope" or (architecture == "phi3" and _has_factors(file)):
        return _longrope(file, architecture, kind, factor, attention)
    if kind == "yarn":
        return _yarn(file, prefix, factor, attention)
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
    """Return YaRN's scaling; llama.cpp multiplies the paper's attention factor by it."""
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = file.metadata.get(f"{prefix}.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if attention != 1:
        own = 1.0 if factor <= 1 else 1.0 + 0.1 * math.log(factor)
        scaling["attention_factor"] = attention * own
    return scaling


def _has_factors(file: GgufFile) -> bool:
    return any(name in file.tensors for name in _FACTORS.values())


def _longrope(
    file: GgufFile, architecture: str, kind: str, factor: float, attention: float
) -> dict[str, Any]:
    """Return LongRoPE's scaling; `factor` divides positions as well."""
    if kind == "yarn" or not _has_factors(file):
        raise ModelError(
            f"{file.path}: {architecture}.rope.scaling.type must be longrope where there are "
            f"tensors {' and '.join(_FACTORS.values())}, and nowhere else, got {kind}; "
            f"{_OTHER_FILE}"
        )
    original = f"{architecture}.rope.scaling.original_context_length"
    scaling: dict[str, Any] = {"rope_type": "longrope", "attention_factor": attention}
    if original in file.metadata:
        scaling["original_max_position_embeddings"] = file.metadata[original]
    present = {name: _factors(file, tensor) for name, tensor in _FACTORS.items()}
    count = max(map(len, present.values()))
    for name, factors in present.items():
        scaling[name] = [factor * x for x in factors or [1.0] * count]
    return scaling


def _factors(file: GgufFile, tensor: str) -> list[float]:
    """Return the numbers of a tensor, none where it is missing."""
    info = file.tensors.get(tensor)
    if info is None:
        return []
    if info.kind.name != "F32":
        raise ModelError(
            f"{file.path}: tensor {tensor} must be of F32, got {info.kind.name}; download the file "
            "again"
        )
    factors: list[float] = file.raw(tensor).view("<f4").astype(np.float64).tolist()
    return factors


def _number(file: GgufFile, *names: str, zero: bool = True) -> float:
    """Return the first of these entries that is present, else 1; with `zero` also for 0."""
    for name in names:
        value = file.metadata.get(name)
        if value is not None:
            if not is_number(value) or not 0 <= value < math.inf or not (value or zero):
                raise ModelError(
                    f"{file.path}: {name} must be a positive number, got {value!r}; {_OTHER_FILE}"
                )
            return float(value) or 1.0
    return 1.0
