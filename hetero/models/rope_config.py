"""Rotary embeddings in `config.json`: `rope_theta` and `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from hetero.backends.frequency_scaling import RopeScaling
from hetero.errors import ModelError
from hetero.models.fields import Fields
from hetero.models.sliding import FULL, SLIDING

NO_SCALING = RopeScaling()
# "dynamic" stretches positions beyond max_position_embeddings only, and none are beyond it here.
_UNSCALED = ("default", "dynamic")
_KINDS = (*_UNSCALED, "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, kw_only=True)
class LayerRope:
    """The rotary embedding of a layer."""

    theta: float
    scaling: RopeScaling = NO_SCALING


def rope_fields(source: Fields) -> Fields:
    """Return the fields of `rope_parameters` or `rope_scaling`, none without."""
    name = "rope_parameters" if source.raw.get("rope_parameters") is not None else "rope_scaling"
    return Fields(source.object(name), f"{source.where}: {name}")


def read_ropes(
    source: Fields, max_position: int, *, theta: float, local_theta: float | None
) -> list[LayerRope]:
    """Return the rotary embeddings of layers with full and with sliding attention.

    `config.json` has one for both, in either spelling, or `rope_parameters` by layer type. The
    thetas are an architecture's defaults; with `local_theta` one embedding that is given is of full
    attention alone. Raises `ModelError`.
    """
    rope = rope_fields(source)
    by_kind = any(isinstance(value, dict) for value in rope.raw.values())
    if by_kind and (local_theta is None or set(rope.raw) - {FULL, SLIDING}):
        raise ModelError(
            f"{rope.where} per layer type is not supported, got "
            f"{', '.join(rope.raw)}; choose a model with one rotary embedding for all layers"
        )
    of_full, of_sliding = rope, rope
    if by_kind:
        of_full, of_sliding = (
            Fields(rope.object(kind), f"{rope.where}: {kind}") for kind in (FULL, SLIDING)
        )
    full = _read_rope(source, of_full, max_position, theta)
    if by_kind and local_theta is not None:
        return [full, _read_rope(of_sliding, of_sliding, max_position, local_theta)]
    if local_theta is not None:
        return [full, LayerRope(theta=source.positive_float("rope_local_base_freq", local_theta))]
    return [full, full]


def _read_rope(source: Fields, rope: Fields, max_position: int, theta: float) -> LayerRope:
    theta_source = rope if rope.raw.get("rope_theta") is not None else source
    theta = theta_source.positive_float("rope_theta", theta)
    return LayerRope(theta=theta, scaling=_scaling(source, rope, max_position))


def write_ropes(full: LayerRope, sliding: LayerRope | None) -> dict[str, Any]:
    """Return the fields that `read_ropes` reads; `sliding` if it has a rotary embedding apart."""
    if sliding is None:
        return {"rope_theta": full.theta, "rope_scaling": rope_dict(full.scaling)}
    by_kind = {
        kind: {"rope_type": "default", **(rope_dict(x.scaling) or {}), "rope_theta": x.theta}
        for kind, x in ((FULL, full), (SLIDING, sliding))
    }
    return {"rope_parameters": by_kind}


def rotary_factor(source: Fields, default: float) -> float:
    """Return the rotated share of a head, `partial_rotary_factor` in either spelling."""
    for holder in (Fields(source.object("rope_parameters"), source.where), source):
        if holder.raw.get("partial_rotary_factor") is not None:
            return _part(holder, default)
    return default


def _part(holder: Fields, default: float) -> float:
    factor = holder.positive_float("partial_rotary_factor", default)
    if factor > 1:
        raise holder.error("partial_rotary_factor", "must be at most 1", "correct the file")
    return factor


def refuse_partial_rotary(source: Fields) -> None:
    """Raise `ModelError` for a partial rotation where the architecture rotates whole heads."""
    for name in ("rope_parameters", "rope_scaling"):
        for holder in (source, Fields(source.object(name), source.where)):
            if holder.raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
                raise holder.error(
                    "partial_rotary_factor", "other than 1 is not supported", "choose another model"
                )


def rotary_factor_of(rotary_dim: int, head_dim: int) -> float:
    """Return the `partial_rotary_factor` that `transformers` truncates to `rotary_dim`."""
    if not rotary_dim:
        return 1.0
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, 2.0)


def _scaling(source: Fields, rope: Fields, max_position: int) -> RopeScaling:
    key = "rope_type" if "rope_type" in rope.raw else "type"
    kind = rope.text(key, "default")
    if kind in ("su", "yarn") and rope.raw.get("long_factor") is not None:
        kind = "longrope"  # its names in the first files of Phi-3
    if kind not in _KINDS:
        raise rope.error(
            key, f"must be one of {', '.join(_KINDS)}", "choose a model without this scaling"
        )
    if kind != "longrope":
        for name in ("short_factor", "long_factor"):
            if rope.raw.get(name):
                raise rope.error(name, "is of longrope alone", f"correct the file's {key}")
    if kind in _UNSCALED:
        return NO_SCALING
    if kind == "longrope":
        return _longrope_scaling(source, rope, max_position)
    if kind == "proportional":
        return RopeScaling(
            kind="proportional",
            factor=rope.positive_float("factor", 1.0),
            partial_rotary_factor=_part(rope, 1.0),
        )
    factor = rope.positive_float("factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    original = _original(source, rope, max_position)
    if kind == "llama3":
        return _llama3_scaling(rope, factor, original)
    return _yarn_scaling(rope, factor, original)


def _original(source: Fields, rope: Fields, max_position: int) -> int:
    """Return the context length of the first training; Phi-3 has it outside of `rope_scaling`."""
    name = "original_max_position_embeddings"
    return source.positive_int(name, rope.positive_int(name, max_position))


def _longrope_scaling(source: Fields, rope: Fields, max_position: int) -> RopeScaling:
    """Return LongRoPE (arXiv 2402.13753), with the attention factor of `transformers`."""
    original = _original(source, rope, max_position)
    factor = rope.positive_float("factor", max_position / original)
    attention = rope.optional_float("attention_factor")
    if attention is None:
        scaled = factor > 1 and original > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if scaled else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=attention,
        short_factor=rope.positive_floats("short_factor"),
        long_factor=rope.positive_floats("long_factor"),
    )


def check_factors(source: Fields, scaling: RopeScaling, rotated: int) -> None:
    """Raise `ModelError` unless LongRoPE has one factor for each frequency."""
    for name in ("short_factor", "long_factor"):
        count = len(getattr(scaling, name))
        if scaling.kind == "longrope" and count != rotated // 2:
            raise ModelError(
                f"{source.where}: {name} must have {rotated // 2} numbers, one for two dimensions "
                f"that are rotated, got {count}; correct the file"
            )


def _llama3_scaling(rope: Fields, factor: float, original: int) -> RopeScaling:
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if high <= low:
        raise rope.error(
            "high_freq_factor", f"must be greater than low_freq_factor ({low})", "correct the file"
        )
    return RopeScaling(
        kind="llama3",
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_scaling(rope: Fields, factor: float, original: int) -> RopeScaling:
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.positive_float("beta_fast", 32.0),
        beta_slow=rope.positive_float("beta_slow", 1.0),
        attention_factor=rope.optional_float("attention_factor"),
        mscale=rope.optional_float("mscale"),
        mscale_all_dim=rope.optional_float("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def rope_dict(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return the `rope_scaling` object that `read_rope` reads, None without scaling."""
    if scaling == NO_SCALING:
        return None
    default = NO_SCALING
    kind = "default" if scaling.kind == "none" else scaling.kind
    raw: dict[str, Any] = {"rope_type": kind, "factor": scaling.factor}
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        always = scaling.kind == "llama3" and field.name in ("low_freq_factor", "high_freq_factor")
        if field.name not in ("kind", "factor", "original_max_position", "long") and (
            always or value != getattr(default, field.name)
        ):
            raw[field.name] = value
    if scaling.original_max_position:
        raw["original_max_position_embeddings"] = scaling.original_max_position
    return raw
