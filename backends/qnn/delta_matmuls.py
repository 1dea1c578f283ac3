"""The gated delta rule on the Hexagon: a graph of matmuls for a chunk, whose state the host keeps.

The formulas are those of `ort_cpu.delta_graph`. Here heads are [H, c, d], H = v_heads: QNN's
MatMul repeats no heads. What fp16 would lose:

- Sums of g lie far from zero, and their differences, which are exponents, would be off by 2⁻¹¹ of
  the sums. The gap between two tokens is a product of g with a matrix of ones and zeros instead.
- Queries keep their norm of 1: without sqrt(dk), o is larger by it, and so eps by dk.
- The squares' 1e-6 is less than fp16 has: queries and keys come times `KEY_FACTOR`.
- Small values lose digits below 6e-5: values, and so the state, come times `VALUE_FACTOR`.
- beta and g are computed on the host, which so gives padding 0: it changes no state.
"""

from __future__ import annotations

import numpy as np

from hetero.backends import ops
from hetero.backends.onnx_common.block_inverse import unit_inverse
from hetero.backends.onnx_common.builder import GraphBuilder

F32 = np.float32
KEY_FACTOR = 64.0
VALUE_FACTOR = 16.0
LEAST_EXPONENT = -20.0  # whose power rounds to zero in fp16


def gated_delta(op: ops.GatedDelta, rows: int, opset: int) -> bytes:
    """Return the graph of a chunk of `rows` tokens.

    Inputs: `x` [rows, columns], keys and queries times `KEY_FACTOR`, values times `VALUE_FACTOR`;
    `z` [rows, values], `beta` [H, rows, 1], `g` [H, rows], `norm` [dv], and `delta_state` [H, dk,
    dv] times `VALUE_FACTOR`. Outputs: `y` [rows, values], `next_state` with the factor, and `peak`
    [1, 1], the largest magnitude between its matmuls.
    """
    made, heads, keys = GraphBuilder(), op.v_heads, op.k_heads * op.k_dim
    state_shape = (heads, op.k_dim, op.v_dim)
    x = made.input("x", F32, (rows, op.columns))
    z = made.input("z", F32, (rows, op.values))
    beta = made.input("beta", F32, (heads, rows, 1))
    g = made.input("g", F32, (heads, rows))
    norm = made.input("norm", F32, (op.v_dim,))
    state = made.input("delta_state", F32, state_shape)
    made.output("y", F32, (rows, op.values))
    made.output("next_state", F32, state_shape)
    made.output("peak", F32, (1, 1))
    q, k = (_unit(made, op, made.slice(x, at, at + keys, axis=1), rows) for at in (0, keys))
    values = made.slice(x, 2 * keys, op.columns, axis=1)
    v = _by_head(made, made.node("Reshape", values, made.ints(rows, heads, op.v_dim)))
    pairs, grown = _decays(made, g, heads, rows)
    turned = made.node("Transpose", k, perm=[0, 2, 1])
    between = made.node("Mul", made.node("MatMul", k, turned), pairs)
    a = made.node("Mul", beta, between)
    seen = made.node("MatMul", made.node("Mul", k, grown), state)
    errors = made.node("Mul", beta, made.node("Sub", v, seen))
    u = errors
    if rows > 1:
        inverse = unit_inverse(made, a, rows, lambda matrix: made.constant(matrix[None]))
        u = made.node("MatMul", inverse, errors)
    scores = made.node("Mul", made.node("MatMul", q, turned), pairs)
    earlier = made.node("MatMul", made.node("Mul", q, grown), state)
    out = made.node("Add", earlier, made.node("MatMul", scores, u))
    last = made.slice(pairs, rows - 1, rows, axis=1)  # [H, 1, c]: from each token to the last
    left = made.node("MatMul", made.node("Mul", turned, last), u)
    kept = made.node("Mul", state, made.slice(grown, rows - 1, rows, axis=1))
    made.node("Add", kept, left, out="next_state")
    both = made.node("Abs", made.node("Concat", seen, u, out, axis=1))
    made.node(
        "Reshape",
        made.node("ReduceMax", both, made.ints(0, 1, 2), keepdims=1),
        made.ints(1, 1),
        out="peak",
    )
    flat = made.node("Reshape", _by_head(made, out), made.ints(rows * heads, op.v_dim))
    eps = op.eps * op.k_dim * VALUE_FACTOR**2
    normed = made.node("RMSNormalization", flat, norm, axis=-1, epsilon=eps)
    gate = made.node("Mul", z, made.node("Sigmoid", z))
    made.node("Mul", made.node("Reshape", normed, made.ints(rows, op.values)), gate, out="y")
    return made.model(opset)


def _by_head(graph: GraphBuilder, value: str) -> str:
    """Return [a, b, d] as [b, a, d]."""
    return graph.node("Transpose", value, perm=[1, 0, 2])


def _unit(graph: GraphBuilder, op: ops.GatedDelta, part: str, rows: int) -> str:
    """Return the key heads divided by their L2 norms, one for each value head, [H, c, dk]."""
    flat = graph.node("Reshape", part, graph.ints(rows * op.k_heads, op.k_dim))
    factor = graph.constant(np.full(op.k_dim, op.k_dim**-0.5, F32))
    eps = ops.L2_EPS * KEY_FACTOR**2 / op.k_dim
    unit = graph.node("RMSNormalization", flat, factor, axis=-1, epsilon=eps)
    heads = _by_head(graph, graph.node("Reshape", unit, graph.ints(rows, op.k_heads, op.k_dim)))
    group = op.v_heads // op.k_heads
    return graph.node("Concat", *[heads] * group, axis=0) if group > 1 else heads


def _decays(graph: GraphBuilder, g: str, heads: int, rows: int) -> tuple[str, str]:
    """Return D [H, c, c], and e^G [H, c, 1]."""
    at = np.arange(rows)
    i, j, between = at[:, None], at, at[:, None, None]
    gaps = ((between > j) & (between <= i)).reshape(rows, rows * rows)
    gap = graph.node("MatMul", g, graph.constant(gaps.astype(F32)))
    gap = graph.node("Reshape", _exp(graph, gap), graph.ints(heads, rows, rows))
    pairs = graph.node("Mul", gap, graph.constant(np.tril(np.ones((1, rows, rows), F32))))
    total = graph.node("MatMul", g, graph.constant(np.triu(np.ones((rows, rows), F32))))
    return pairs, graph.node("Reshape", _exp(graph, total), graph.ints(heads, rows, 1))


def _exp(graph: GraphBuilder, value: str) -> str:
    """Return e^value, of which the Hexagon's own is wrong where fp16 has no such number."""
    return graph.node("Exp", graph.node("Max", value, graph.scalar(LEAST_EXPONENT)))
