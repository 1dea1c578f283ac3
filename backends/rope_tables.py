"""Rotary embedding tables, shared by every backend (float64, converted by each)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.ops import Rope

Float64Array = npt.NDArray[np.float64]


def inverse_frequencies(op: Rope) -> Float64Array:  # noqa: PLR0911
    """Return rotation per position in radians, [rotated / 2], after scaling."""
    dim = op.rotated
    base = op.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    match op.scaling.kind:
        case "none":
            return base
        case "zero":
            return np.zeros_like(base)
        case "linear":
            return base / op.scaling.factor
        case "proportional":
            rotated = int(op.scaling.partial_rotary_factor * dim // 2)
            return np.where(np.arange(dim // 2) < rotated, base / op.scaling.factor, 0.0)
        case "llama3":
            return _llama3(base, op.scaling)
        case "yarn":
            return _yarn(base, op, op.scaling)
        case "longrope":
            scaling = op.scaling
            factors = scaling.long_factor if scaling.long else scaling.short_factor
            return base / np.asarray(factors, dtype=np.float64)


def attention_factor(scaling: RopeScaling) -> float:
    """Return factor on cos and sin (YaRN paper section 3.4, `transformers` defaults; LongRoPE)."""
    if scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def tables(op: Rope) -> tuple[Float64Array, Float64Array]:
    """Return cos and sin, each [max_position, rotated / 2]."""
    angles = np.arange(op.max_position, dtype=np.float64)[:, None] * inverse_frequencies(op)
    factor = attention_factor(op.scaling)
    return np.cos(angles) * factor, np.sin(angles) * factor


def query_scale(op: Rope) -> Float64Array:
    """Return the factor on queries by position, [max_position] (Llama 4, Ministral 3)."""
    scaling = op.scaling
    if not op.scales_queries:
        return np.ones(op.max_position)
    periods = np.arange(op.max_position) // scaling.original_max_position
    factors: Float64Array = 1 + scaling.llama_4_scaling_beta * np.log1p(periods)
    return factors


def _llama3(base: Float64Array, scaling: RopeScaling) -> Float64Array:
    """Return llama 3.1: long wavelengths are stretched, short ones kept, smooth between."""
    wavelength = 2 * math.pi / base
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * base / scaling.factor + smooth * base
    shorter = np.where(wavelength < high, base, blended)
    return np.where(wavelength > low, base / scaling.factor, shorter)


def _yarn(base: Float64Array, op: Rope, scaling: RopeScaling) -> Float64Array:
    """Return YaRN (arXiv 2309.00071, section 3.2): interpolate low frequencies, keep high ones."""
    dim = op.rotated

    def correction(rotations: float) -> float:
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(op.theta))

    low, high = correction(scaling.beta_fast), correction(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = (high - low) or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / span, 0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
