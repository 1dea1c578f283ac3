"""The ONNX graph of the gated delta rule for the tokens of one chunk, as matmuls.

Notation (`ops.GatedDelta`): c tokens of the chunk, K key heads, R = v_heads / K value heads that
use each. Value head j is [j div K, j mod K], so that keys and queries are broadcast over R.

With G = cumsum(g), D[i, j] = exp(G[i] - G[j]) for j <= i and A = tril(β k kᵀ ∘ D, -1):

    U = (I + A)⁻¹ (β v - β e^G k S);  o = (q e^G) S + tril(q kᵀ ∘ D) U
    S ← e^(G of the last) S + (k e^(G of the last - G))ᵀ U
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from hetero.backends import ops
from hetero.backends.onnx_common.block_inverse import unit_inverse
from hetero.backends.onnx_common.builder import CONTRIB, GraphBuilder

CHUNK = 16  # tokens: half the time of 64, whose inverses are ten matmuls of 64 x 64
F32 = np.float32


def gated_delta(op: ops.GatedDelta, *, one: bool) -> bytes:
    """Return the graph of a chunk of up to `CHUNK` tokens, or of `one`.

    Inputs besides the ports: `decay` and `dt_bias` [R, K, 1], `norm` [dv]; `delta_state` is [R, K,
    dk, dv]. The output `next_state` may be the memory of `delta_state`.
    """
    graph, group = GraphBuilder(), op.v_heads // op.k_heads
    keys, state = op.k_heads * op.k_dim, (group, op.k_heads, op.k_dim, op.v_dim)
    graph.input("x", F32, ("m", op.columns))
    graph.input("gates", F32, ("m", op.gates_width))
    graph.output("y", F32, ("m", op.values))
    graph.output("next_state", F32, state)
    q = _unit(graph, _heads(graph, "x", 0, (1, op.k_heads, op.k_dim)), op.k_dim**-0.5)
    k = _unit(graph, _heads(graph, "x", keys, (1, op.k_heads, op.k_dim)))
    v = _heads(graph, "x", 2 * keys, (group, op.k_heads, op.v_dim))  # [R, K, c, dv]
    first = op.gates_width - op.values - 2 * op.v_heads
    z = graph.slice("gates", first, first + op.values, axis=1)
    beta, g = _beta_and_g(graph, first + op.values, group, op.k_heads)
    known = _known(graph, state)
    rule = _one_token if one else _chunk
    out = rule(graph, q, k, v, beta, g, known)  # [R, K, c, dv]
    by_token = graph.node("Transpose", out, perm=[2, 0, 1, 3])
    norm = graph.input("norm", F32, (op.v_dim,))
    normed = graph.node("SimplifiedLayerNormalization", by_token, norm, axis=-1, epsilon=op.eps)
    flat = graph.node("Reshape", normed, graph.ints(-1, op.values))
    graph.node("Mul", flat, graph.node("QuickGelu", z, domain=CONTRIB, alpha=1.0), out="y")
    return graph.model()


def _heads(graph: GraphBuilder, source: str, first: int, shape: tuple[int, int, int]) -> str:
    """Return columns from `first` on as [R, K, c, dim]."""
    part = graph.slice(source, first, first + math.prod(shape), axis=1)
    return graph.node(
        "Transpose", graph.node("Reshape", part, graph.ints(-1, *shape)), perm=[1, 2, 0, 3]
    )


def _unit(graph: GraphBuilder, heads: str, factor: float = 1.0) -> str:
    """Return heads divided by their L2 norms, times a factor."""
    squares = graph.node("ReduceSumSquare", heads, graph.ints(-1), keepdims=1)
    length = graph.node("Sqrt", graph.node("Add", squares, graph.scalar(ops.L2_EPS)))
    return graph.node("Mul", heads, graph.node("Div", graph.scalar(factor), length))


def _beta_and_g(graph: GraphBuilder, first: int, group: int, k_heads: int) -> tuple[str, str]:
    """Return beta and g, [R, K, c]."""
    b, a = (
        graph.node("Squeeze", _heads(graph, "gates", at, (group, k_heads, 1)), graph.ints(-1))
        for at in (first, first + group * k_heads)
    )
    decay, dt_bias = (graph.input(x, F32, (group, k_heads, 1)) for x in ("decay", "dt_bias"))
    shifted = graph.node("Add", a, dt_bias)
    # softplus, whose own operator in ONNX Runtime loses digits of small results
    small = graph.node("Exp", graph.node("Neg", graph.node("Abs", shifted)))
    rest = graph.node(
        "Mul",
        graph.node("Atanh", graph.node("Div", small, graph.node("Add", small, graph.scalar(2.0)))),
        graph.scalar(2.0),
    )
    softplus = graph.node("Add", graph.node("Relu", shifted), rest)
    return graph.node("Sigmoid", b), graph.node("Mul", decay, softplus)


def _known(graph: GraphBuilder, shape: tuple[int, ...]) -> str:
    state = graph.input("delta_state", F32, shape)
    position = graph.input("position", np.int32, (1,))
    later = graph.node("Greater", position, graph.constant(np.zeros(1, np.int32)))
    return graph.node("Where", later, state, graph.scalar(0.0))


def _one_token(graph: GraphBuilder, q: str, k: str, v: str, beta: str, g: str, known: str) -> str:
    """Return o of one token by the recurrence, and write the state."""
    last = graph.ints(-1)
    kept = graph.node("Unsqueeze", graph.node("Exp", g), last)  # [R, K, 1, 1]
    state = graph.node("Mul", known, kept)
    error = graph.node("Sub", v, graph.node("MatMul", k, state))
    u = graph.node("Mul", graph.node("Unsqueeze", beta, last), error)
    column = graph.node("Transpose", k, perm=[0, 1, 3, 2])
    graph.node("Add", state, graph.node("Mul", column, u), out="next_state")
    return graph.node("MatMul", q, "next_state")


def _chunk(graph: GraphBuilder, q: str, k: str, v: str, beta: str, g: str, known: str) -> str:
    """Return o of a chunk, and write the state."""
    last = graph.ints(-1)
    count = graph.node("Shape", "x", start=0, end=1)
    total = graph.node("CumSum", g, graph.constant(np.array(2, np.int64)))  # G
    column = graph.node("Unsqueeze", total, last)  # [R, K, c, 1]
    gap = graph.node("Sub", column, graph.node("Unsqueeze", total, graph.ints(2)))
    lower = _square(graph, np.tril(np.ones((CHUNK, CHUNK), bool)), count)
    gap = graph.node("Where", lower, gap, graph.scalar(-np.inf))
    pairs = graph.node("Exp", gap)  # D
    factor = graph.node("Unsqueeze", beta, last)
    turned = graph.node("Transpose", k, perm=[0, 1, 3, 2])
    between = graph.node("Mul", graph.node("MatMul", k, turned), pairs)
    a = graph.node("Mul", factor, between)
    inverse = unit_inverse(graph, a, CHUNK, partial(_square, graph, count=count))
    grown = graph.node("Exp", column)  # e^G
    seen = graph.node("MatMul", graph.node("Mul", k, grown), known)
    u = graph.node("MatMul", inverse, graph.node("Mul", factor, graph.node("Sub", v, seen)))
    scores = graph.node("Mul", graph.node("MatMul", q, turned), pairs)
    earlier = graph.node("MatMul", graph.node("Mul", q, grown), known)
    out = graph.node("Add", earlier, graph.node("MatMul", scores, u))
    end = graph.slice(column, -1, np.iinfo(np.int64).max, axis=2)  # [R, K, 1, 1]
    left = graph.node("Mul", k, graph.node("Exp", graph.node("Sub", end, column)))
    update = graph.node("MatMul", graph.node("Transpose", left, perm=[0, 1, 3, 2]), u)
    kept = graph.node("Mul", known, graph.node("Exp", end))
    graph.node("Add", kept, update, out="next_state")
    return out


def _square(graph: GraphBuilder, value: np.ndarray, count: str) -> str:
    """Return the first c rows and columns of a constant."""
    ends = graph.node("Concat", count, count, axis=0)
    return graph.node("Slice", graph.constant(value), graph.ints(0, 0), ends)
