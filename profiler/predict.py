"""Evaluation of fitted predictors with numpy alone: thousands of shapes in milliseconds.

Notation: S shapes, F features, T knots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.ops import Op
from hetero.profiler.features import columns, launches, padded_rows, padded_tokens
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
    spread: Floats
    depth: int
    answers: bool


def evaluate_trees(trees: tuple[Tree, ...], features: Floats) -> Floats:
    """Return [S] mean answer of the trees for [S, F] features."""
    forest = _forest(trees)
    leaves = _leaves(forest, features)
    return np.asarray(np.take_along_axis(forest.value, leaves, axis=1).mean(axis=0))


def answer(trees: tuple[Tree, ...]) -> bool:
    """Return whether trees answer anything but 0, as they do where the roofline is right."""
    return bool(trees) and _forest(trees).answers


def tree_spread(trees: tuple[Tree, ...], features: Floats) -> Floats:
    """Return [S] relative standard deviation of what the trees answer.

    That of the rows of their leaves, and of the trees among each other. 0 where the trees do not
    know that of their leaves (profiles of older versions).
    """
    forest = _forest(trees)
    leaves = _leaves(forest, features)
    within = np.take_along_axis(forest.spread, leaves, axis=1)
    between = np.take_along_axis(forest.value, leaves, axis=1).std(axis=0)
    return np.asarray(np.hypot(within.mean(axis=0), between))


def _leaves(forest: _Forest, features: Floats) -> npt.NDArray[np.intp]:
    """Return [trees, S] the leaf of each tree."""
    flat, base = features.ravel(), np.arange(len(features)) * features.shape[1]
    nodes = np.zeros((len(forest.feature), len(features)), dtype=np.intp)
    for i, node in enumerate(nodes):
        for _ in range(forest.depth):
            goes_left = flat[base + forest.feature[i][node]] <= forest.threshold[i][node]
            node[:] = np.where(goes_left, forest.left[i][node], forest.right[i][node])
    return nodes


@lru_cache(maxsize=64)
def _forest(trees: tuple[Tree, ...]) -> _Forest:
    nodes = max(len(tree.feature) for tree in trees)
    shape = (len(trees), nodes)
    feature, left, right = (np.zeros(shape, dtype=np.intp) for _ in range(3))
    threshold, value, spread = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for i, tree in enumerate(trees):
        for node, column in enumerate(tree.feature):
            leaf = column < 0
            feature[i, node] = 0 if leaf else column
            left[i, node] = node if leaf else tree.left[node]
            right[i, node] = node if leaf else tree.right[node]
            threshold[i, node] = tree.threshold[node]
            value[i, node] = tree.value[node]
            spread[i, node] = tree.spread[node] if tree.spread else 0.0
    depth = max(map(_depth, trees))
    return _Forest(feature, threshold, left, right, value, spread, depth, bool(value.any()))


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
        seconds = roofline(predictor, device, tokens, rows, k)
    if predictor.model is None and answer(predictor.trees):
        seconds = seconds * np.exp(
            evaluate_trees(predictor.trees, _columns(predictor, device, (m, n, k), seconds))
        )
    return seconds * _scale(predictor, tokens) if predictor.scale else seconds


def roofline(
    predictor: MatMulPredictor, device: DeviceRecord, tokens: Floats, rows: Floats, k: Floats
) -> Floats:
    """Return [S] seconds by the knots alone, of padded sizes."""
    count = launches(device, predictor.weight_format, tokens, k)
    return count * evaluate_knots(predictor.knots, tokens / count, rows, k)


def predict_table(
    predictor: MatMulPredictor, device: DeviceRecord, m: Floats, n: Floats, k: float
) -> Floats:
    """Return [M, N] seconds of one kernel for all pairs of token counts m [M] and rows n [N]."""
    tokens, rows = padded_tokens(device, m), padded_rows(device, n)
    if predictor.model is not None:
        seconds = predictor.model.seconds(tokens[:, None], rows, np.asarray(k))
    else:
        seconds = _roofline_table(predictor, device, tokens, rows, k)
    if predictor.model is None and answer(predictor.trees):
        features = _columns(predictor, device, _pairs(m, n, k), seconds.ravel())
        seconds *= np.exp(evaluate_trees(predictor.trees, features)).reshape(seconds.shape)
    return seconds * _scale(predictor, tokens)[:, None] if predictor.scale else seconds


def spread_table(
    predictor: MatMulPredictor, device: DeviceRecord, m: Floats, n: Floats, k: float
) -> Floats:
    """Return [M, N] by how much `predict_table` may be off (`tree_spread`)."""
    if not predictor.trees or predictor.model is not None:
        return np.zeros((len(m), len(n)))
    tokens, rows = padded_tokens(device, m), padded_rows(device, n)
    seconds = _roofline_table(predictor, device, tokens, rows, k)
    features = _columns(predictor, device, _pairs(m, n, k), seconds.ravel())
    return tree_spread(predictor.trees, features).reshape(seconds.shape)


def _roofline_table(
    predictor: MatMulPredictor, device: DeviceRecord, tokens: Floats, rows: Floats, k: float
) -> Floats:
    count = launches(device, predictor.weight_format, tokens, k)
    return count[:, None] * knots_table(predictor.knots, tokens / count, rows, k)


def _columns(
    predictor: MatMulPredictor,
    device: DeviceRecord,
    sizes: tuple[Floats, Floats, Floats],
    roofline_s: Floats,
) -> Floats:
    kernel = predictor.weight_format, predictor.order
    return columns(device, *kernel, sizes, roofline_s, predictor.features)


def _pairs(m: Floats, n: Floats, k: float) -> tuple[Floats, Floats, Floats]:
    """Return [M · N] sizes of all pairs."""
    every_m, every_n = (x.ravel() for x in np.meshgrid(m, n, indexing="ij"))
    return every_m, every_n, np.full(len(every_m), k)


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
    feature), each of two multiply-adds, and the cached elements that are read, counted as float32
    by their bytes; for a gated delta rule as many pairs as have its multiply-adds, three for each
    element of the state, which is read and written; for outliers products with hot features; for
    experts `expert_work`.
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
        case ops.SumScores():
            terms["elements"] = float(m * op.attention.width)
        case ops.GatedDelta():
            state = op.v_heads * op.k_dim * op.v_dim
            terms["elements"] = float(m * (op.columns + 2 * op.values))
            terms["pairs"] = float(1.5 * m * state)
            terms["cached"] = float(2 * state)
        case ops.DecodeChunks():
            terms["elements"] = float(m * op.values)
        case ops.Router():
            terms["elements"] = float(m * (op.d + op.experts))
        case ops.Experts():
            pairs = m * op.chosen * len(op.own) / op.experts
            return expert_work(op, op.distinct(m), pairs)
        case ops.Outliers():
            terms["elements"] = float(m * (op.n + op.excess * op.k))
            terms["products"] = float(m * op.n * op.hot)
        case _:
            terms["elements"] = float(m * op.d)
    return terms


def expert_work(op: ops.Experts, distinct: float, pairs: float) -> dict[str, float]:
    """Return the work terms of so many experts, for pairs of a token and one that it chose.

    calls 1; the experts; their weights, each read once; and multiply-adds.
    """
    weights = float(sum(x.n * x.k for x in op.matmuls.values()))
    return {
        "calls": 1.0,
        "experts": distinct,
        "streamed": distinct * weights,
        "products": pairs * weights,
    }


def as_matmuls(op: ops.Router | ops.Experts, m: int) -> list[tuple[int, ops.MatMul]]:
    """Return the matmuls that a routed feed-forward of m tokens is, each with its tokens.

    Those of the experts have the rows of as many as m tokens are expected to choose, and the tokens
    that each of these has.
    """
    if isinstance(op, ops.Router):
        return [(m, ops.MatMul(n=op.experts, k=op.d, weight_format=WeightFormat.F32))]
    distinct = op.distinct(m)
    return expert_matmuls(op, distinct, m * op.chosen * len(op.own) / op.experts / distinct)


def experts_s(
    predictor: NonMatmulPredictor, op: ops.Experts, distinct: float, tokens_each: float
) -> float:
    """Return the seconds of so many experts, each with so many tokens, by measured ones."""
    pairs = distinct * tokens_each
    few = predictor.decode is not None and pairs <= DECODE_TOKENS * op.chosen
    weights = predictor.decode if few and predictor.decode else predictor.coefficients
    terms = expert_work(op, distinct, pairs).items()
    return max(sum([weights.get(name, 0.0) * amount for name, amount in terms]), TINY_S)


def expert_matmuls(
    op: ops.Experts, distinct: float, tokens_each: float
) -> list[tuple[int, ops.MatMul]]:
    """Return the matmuls of so many experts, each with so many tokens."""
    tokens = max(round(tokens_each), 1)
    return [(tokens, replace(x, n=max(round(distinct * x.n), 1))) for x in op.matmuls.values()]


def op_name(op: Op) -> str:
    """Return the name under which an operation's kernel is measured.

    It is its class, `+add` if it is fused, `+gated` if a convolution's gates are, `+f16` or `+q8`
    by the caches that attention reads, `+w4a16` and so on by the weights of experts. Some heads of
    an attention are an attention.
    """
    if isinstance(op, ops.AttentionHeads):
        return op_name(op.alone)
    if isinstance(op, ops.Attention) and op.kv is not CacheFormat.F32:
        return f"{type(op).__name__}+{op.kv}"
    if isinstance(op, ops.ShortConv) and op.gated:
        return f"{type(op).__name__}+gated"
    if isinstance(op, ops.Experts):
        return f"{type(op).__name__}+{op.weight_format}"
    fused = isinstance(op, ops.RMSNorm | ops.LayerNorm) and op.add
    return type(op).__name__ + ("+add" if fused else "")
