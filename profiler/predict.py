"""Evaluation of fitted predictors with numpy alone: thousands of shapes in milliseconds.

Notation: S shapes, F features, T knots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.ops import Op
from hetero.profiler.records import (
    DECODE_TOKENS,
    DeviceRecord,
    Knots,
    MatMulPredictor,
    NonMatmulPredictor,
    ShapeRange,
    Tree,
)

Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

TINY_S: Final = 1e-9
FEATURES: Final = (
    "log_m", "log_n", "log_k", "row_tiles", "token_tiles", "padding", "log_flops",
    "log_bytes", "n_over_k", "m_over_n", "m_over_k", "intensity",
)  # fmt: skip


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


def features(
    device: DeviceRecord, weight_format: WeightFormat, m: Floats, n: Floats, k: Floats
) -> Floats:
    """Return [S, F] columns of `FEATURES` for the trees; m, n, k are sizes before padding, [S]."""
    rows, tokens = padded_rows(device, n), padded_tokens(device, m)
    row_unit = max(device.row_stage, device.capabilities.row_alignment)
    flops = 2.0 * tokens * rows * k
    nbytes = weight_bytes(weight_format, rows, k) + 4.0 * tokens * (rows + k)
    columns = (
        np.log2(tokens),
        np.log2(rows),
        np.log2(k),
        np.ceil(rows / row_unit),
        np.ceil(tokens / max(device.token_stage, 1)),
        tokens * rows / (m * n),
        np.log2(flops),
        np.log2(nbytes),
        np.log2(rows / k),
        np.log2(tokens / rows),
        np.log2(tokens / k),
        np.log2(flops / nbytes),
    )
    return np.stack(columns, axis=1)


def evaluate_knots(knots: Knots, m: Floats, n: Floats, k: Floats) -> Floats:
    """Return [S] seconds; see `Knots`."""
    tokens, coefficients = _knot_arrays(knots)
    per_size = np.stack((np.ones_like(n), n, k, n * k), axis=1)
    if len(tokens) == 1:
        only = per_size @ coefficients[0] * (m / tokens[0])
        return np.asarray(np.maximum(only, TINY_S))
    at = np.clip(np.searchsorted(tokens, m, side="right") - 1, 0, len(tokens) - 2)
    low = np.einsum("sf,sf->s", per_size, coefficients[at])
    high = np.einsum("sf,sf->s", per_size, coefficients[at + 1])
    share = (m - tokens[at]) / (tokens[at + 1] - tokens[at])
    # Outside the knots the outer segments go on, but never below a tenth of the outer knot.
    return np.asarray(np.maximum(low + share * (high - low), np.maximum(0.1 * low, TINY_S)))


def knots_table(knots: Knots, m: Floats, n: Floats, k: float) -> Floats:
    """Return [M, N] seconds of all pairs of m [M] and n [N].

    `evaluate_knots` at a fraction of its cost, because time is linear in n at fixed m and k.
    """
    tokens, coefficients = _knot_arrays(knots)
    fixed = coefficients[:, 0] + coefficients[:, 2] * k
    slope = coefficients[:, 1] + coefficients[:, 3] * k
    if len(tokens) == 1:
        share = (m / tokens[0])[:, None]
        return np.asarray(np.maximum((fixed[0] + slope[0] * n)[None, :] * share, TINY_S))
    at = np.clip(np.searchsorted(tokens, m, side="right") - 1, 0, len(tokens) - 2)
    share = (m - tokens[at]) / (tokens[at + 1] - tokens[at])
    start = fixed[at] + share * (fixed[at + 1] - fixed[at])
    rise = slope[at] + share * (slope[at + 1] - slope[at])
    seconds = start[:, None] + rise[:, None] * n
    beyond = (share > 1) | (share < 0) | (fixed[at + 1] < fixed[at]) | (slope[at + 1] < slope[at])
    if beyond.any():
        low = fixed[at[beyond]][:, None] + slope[at[beyond]][:, None] * n
        seconds[beyond] = np.maximum(seconds[beyond], 0.1 * low)
    return np.asarray(np.maximum(seconds, TINY_S, out=seconds))


@lru_cache(maxsize=256)
def _knot_arrays(knots: Knots) -> tuple[Floats, Floats]:
    return np.asarray(knots.tokens, dtype=np.float64), np.asarray(knots.coefficients)


@dataclass(frozen=True)
class _Forest:
    """Trees of one predictor: arrays [trees, nodes]; leaves point to themselves."""

    feature: npt.NDArray[np.intp]
    threshold: Floats
    left: npt.NDArray[np.intp]
    right: npt.NDArray[np.intp]
    value: Floats
    depth: int


def evaluate_trees(trees: tuple[Tree, ...], columns: Floats) -> Floats:
    """Return [S] mean answer of the trees for [S, F] features."""
    if not trees:
        return np.zeros(len(columns))
    forest = _forest(trees)
    flat = columns.ravel()
    base = np.arange(len(columns)) * columns.shape[1]
    total = np.zeros(len(columns))
    for i in range(len(trees)):
        node = np.zeros(len(columns), dtype=np.intp)
        for _ in range(forest.depth):
            goes_left = flat[base + forest.feature[i][node]] <= forest.threshold[i][node]
            node = np.where(goes_left, forest.left[i][node], forest.right[i][node])
        total += forest.value[i][node]
    return total / len(trees)


@lru_cache(maxsize=64)
def _forest(trees: tuple[Tree, ...]) -> _Forest:
    nodes = max(len(tree.feature) for tree in trees)
    shape = (len(trees), nodes)
    feature, left, right = (np.zeros(shape, dtype=np.intp) for _ in range(3))
    threshold, value = np.zeros(shape), np.zeros(shape)
    for i, tree in enumerate(trees):
        for node, column in enumerate(tree.feature):
            leaf = column < 0
            feature[i, node] = 0 if leaf else column
            left[i, node] = node if leaf else tree.left[node]
            right[i, node] = node if leaf else tree.right[node]
            threshold[i, node] = tree.threshold[node]
            value[i, node] = tree.value[node]
    return _Forest(feature, threshold, left, right, value, max(map(_depth, trees)))


def _depth(tree: Tree) -> int:
    depth = [0] * len(tree.feature)
    for node, column in enumerate(tree.feature):
        if column >= 0:
            depth[tree.left[node]] = depth[tree.right[node]] = depth[node] + 1
    return max(depth)


def predict(
    predictor: MatMulPredictor, device: DeviceRecord, m: Floats, n: Floats, k: Floats
) -> Floats:
    """Return [S] seconds of one kernel."""
    tokens, rows = padded_tokens(device, m), padded_rows(device, n)
    if predictor.model is not None:
        seconds = predictor.model.seconds(tokens, rows, k)
    else:
        seconds = evaluate_knots(predictor.knots, tokens, rows, k)
    if predictor.trees and predictor.model is None:
        columns = features(device, predictor.weight_format, m, n, k)
        seconds = seconds * np.exp(evaluate_trees(predictor.trees, columns))
    return seconds * _scale(predictor, tokens) if predictor.scale else seconds


def predict_table(
    predictor: MatMulPredictor, device: DeviceRecord, m: Floats, n: Floats, k: float
) -> Floats:
    """Return [M, N] seconds of one kernel for all pairs of token counts m [M] and rows n [N]."""
    tokens, rows = padded_tokens(device, m), padded_rows(device, n)
    if predictor.model is not None:
        seconds = predictor.model.seconds(tokens[:, None], rows, np.asarray(k))
    else:
        seconds = knots_table(predictor.knots, tokens, rows, k)
    if predictor.trees and predictor.model is None:
        every_m, every_n = (x.ravel() for x in np.meshgrid(m, n, indexing="ij"))
        ks = np.full(len(every_m), k)
        columns = features(device, predictor.weight_format, every_m, every_n, ks)
        seconds *= np.exp(evaluate_trees(predictor.trees, columns)).reshape(seconds.shape)
    return seconds * _scale(predictor, tokens)[:, None] if predictor.scale else seconds


def _scale(predictor: MatMulPredictor, tokens: Floats) -> Floats:
    """Return [S] the factors of the seconds of these token counts, as the device pads them."""
    of = predictor.scale
    return np.where(tokens <= DECODE_TOKENS, of.get("decode", 1.0), of.get("prefill", 1.0))


def outside(measured: ShapeRange, device: DeviceRecord, m: Floats, n: Floats, k: Floats) -> Bools:
    """Return [S] whether a shape is outside the measured range; padding counts for m."""
    tokens = padded_tokens(device, m)
    inside = (tokens >= measured.m[0]) & (tokens <= measured.m[1])
    inside &= (n >= measured.n[0]) & (n <= measured.n[1])
    return np.asarray(~(inside & (k >= measured.k[0]) & (k <= measured.k[1])))


def other_s(predictor: NonMatmulPredictor, op: Op, tokens: int, context: int) -> float:
    """Return the seconds of an operation that is not a matmul, for `tokens` with padding."""
    weights = predictor.coefficients
    if predictor.decode is not None and tokens <= DECODE_TOKENS:
        weights = predictor.decode
    terms = work(op, tokens, context).items()
    return max(sum([weights.get(name, 0.0) * amount for name, amount in terms]), TINY_S)


def work(op: Op, m: int, context: int = 0) -> dict[str, float]:
    """Return the work terms of an operation that is not a matmul, by name.

    An `NonMatmulPredictor` weighs them.

    calls 1; tokens m; elements of the widest tensor; for attention also pairs (query, key, head
    feature) and the cached elements that are read, counted as float32 by their bytes; for outliers
    products with hot features.
    """
    terms = {"calls": 1.0, "tokens": float(m)}
    match op:
        case ops.AttentionHeads():
            return work(op.alone, m, context)
        case ops.Attention():
            average = context + (m + 1) / 2
            reach = min(average, op.window) if op.window else average
            terms["elements"] = float(m * op.width)
            terms["pairs"] = float(m * reach * op.heads * op.head_dim)
            keys = context + m
            cached = min(keys, op.window + m) if op.window else keys
            floats = op.kv.bytes_per_token(op.head_dim) / 4  # as many as have a token's bytes
            terms["cached"] = float(cached * op.kv_heads * floats)
        case ops.Rope():
            terms["elements"] = float(m * op.width)
        case ops.GatedAct() | ops.Act():
            terms["elements"] = float(m * op.f)
        case ops.MatMul():
            terms["elements"] = float(m * (op.n + op.k))
        case ops.ColumnMass():
            terms["elements"] = float(m * op.attention.width)
        case ops.DecodeChunks():
            terms["elements"] = float(m * op.values)
        case ops.Outliers():
            terms["elements"] = float(m * (op.n + op.excess * op.k))
            terms["products"] = float(m * op.n * op.hot)
        case _:
            terms["elements"] = float(m * op.d)
    return terms


def op_name(op: Op) -> str:
    """Name under which an operation's kernel is measured.

    Its class, `+add` if it is fused, `+f16` or `+q8` by the caches that attention reads. Some heads
    of an attention are an attention.
    """
    if isinstance(op, ops.AttentionHeads):
        return op_name(op.alone)
    if isinstance(op, ops.Attention) and op.kv is not CacheFormat.F32:
        return f"{type(op).__name__}+{op.kv}"
    fused = isinstance(op, ops.RMSNorm | ops.LayerNorm) and op.add
    return type(op).__name__ + ("+add" if fused else "")
