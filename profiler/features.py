"""Sizes of a matmul as a device computes them, and the columns that trees see of it.

Notation: S shapes, F features.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import OperandOrder
from hetero.profiler.records import DECODE_TOKENS, DeviceRecord

Floats: TypeAlias = npt.NDArray[np.float64]

# Profiles name the columns of their trees: what is here once stays.
FEATURES: Final = (
    "log_m", "log_n", "log_k", "row_tiles", "token_tiles", "padding", "log_flops",
    "log_bytes", "n_over_k", "m_over_n", "m_over_k", "intensity",
    "decode", "log_roofline", "launches", "log_launch_m", "row_alignment",
    "feature_alignment", "transposed",
)  # fmt: skip
FINEST_ALIGNMENT: Final = 256  # a power of two; multiples of more are as fast


def weight_bytes(weight_format: WeightFormat, n: Any, k: Any) -> Any:
    """Return the bytes of an n × k weight as stored, scales included."""
    return weight_format.storage.bytes_per_weight * n * k


def padded_tokens(device: DeviceRecord, m: Floats) -> Floats:
    """Return token counts as the device computes them.

    The next graph size, or (prefill) its next stage.

    Above the largest graph size m stays as it is (several calls; an extrapolation).
    """
    sizes = device.capabilities.graph_sizes
    if device.capabilities.static_shapes and sizes:
        table = np.asarray(sorted(sizes), dtype=np.float64)
        at = np.minimum(np.searchsorted(table, m), len(table) - 1)
        return np.maximum(table[at], m)
    stages = np.ceil(m / device.token_stage) * float(device.token_stage)
    return np.where(m > DECODE_TOKENS, stages, m)


def padded_count(device: DeviceRecord, m: int) -> int:
    """Return `padded_tokens` of one token count."""
    sizes = device.capabilities.graph_sizes
    if device.capabilities.static_shapes and sizes:
        return min((g for g in sizes if g >= m), default=m)
    stage = device.token_stage
    return m if m <= DECODE_TOKENS else -(-m // stage) * stage


def padded_rows(device: DeviceRecord, n: Floats) -> Floats:
    """Return rows after padding to the device's stage."""
    return np.ceil(n / device.row_stage).astype(np.float64) * float(device.row_stage)


def launches(
    device: DeviceRecord, weight_format: WeightFormat, tokens: Floats, k: Floats | float
) -> Floats:
    """Return [S] how many launches a call of so many (padded) tokens runs."""
    limits = device.capabilities.launch_tokens.get(weight_format)
    if limits is None:
        return np.ones_like(tokens)
    starts, most = np.asarray(sorted(limits), dtype=np.float64).T
    at = np.searchsorted(starts, k, side="right") - 1
    return np.where(at < 0, 1.0, np.ceil(tokens / most[np.maximum(at, 0)]))


def columns(
    device: DeviceRecord,
    weight_format: WeightFormat,
    order: OperandOrder,
    sizes: tuple[Floats, Floats, Floats],
    roofline_s: Floats,
    names: tuple[str, ...] = FEATURES,
) -> Floats:
    """Return [S, F] columns of these names; `sizes` are m, n, k before padding, [S] each.

    `roofline_s` is what the knots predict of the call.
    """
    m, n, k = sizes
    rows, tokens = padded_rows(device, n), padded_tokens(device, m)
    row_unit = max(device.row_stage, device.capabilities.row_alignment)
    flops = 2.0 * tokens * rows * k
    nbytes = weight_bytes(weight_format, rows, k) + 4.0 * tokens * (rows + k)
    count = launches(device, weight_format, tokens, k)
    made = {
        "log_m": np.log2(tokens),
        "log_n": np.log2(rows),
        "log_k": np.log2(k),
        "row_tiles": np.ceil(rows / row_unit),
        "token_tiles": np.ceil(tokens / max(device.token_stage, 1)),
        "padding": tokens * rows / (m * n),
        "log_flops": np.log2(flops),
        "log_bytes": np.log2(nbytes),
        "n_over_k": np.log2(rows / k),
        "m_over_n": np.log2(tokens / rows),
        "m_over_k": np.log2(tokens / k),
        "intensity": np.log2(flops / nbytes),
        "decode": (tokens <= DECODE_TOKENS).astype(np.float64),
        "log_roofline": np.log2(roofline_s),
        "launches": count,
        "log_launch_m": np.log2(tokens / count),
        "row_alignment": _alignment(rows),
        "feature_alignment": _alignment(k),
        "transposed": np.full_like(m, order == "transposed"),
    }
    return np.stack([made[name] for name in names], axis=1)


def _alignment(sizes: Floats) -> Floats:
    """Return log2 of the largest power of two that divides each size, of `FINEST_ALIGNMENT`."""
    whole = sizes.astype(np.int64)
    least = np.minimum(whole & -whole, FINEST_ALIGNMENT).astype(np.float64)
    return np.asarray(np.log2(least))
