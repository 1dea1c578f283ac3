"""The ONNX graph of every operation, for a fixed token count m, as QNN's HTP compiler takes it.

Inputs and outputs are float32, the pool's type; the Hexagon computes in fp16, so every graph begins
and ends with a conversion and values beyond ±65504 saturate (`kernels` guards against that). A
matmul's weight is a constant: the compiler lays it out for the matrix unit; as an input it would be
repacked on every run (measured: 25 times the traffic). Weights of norms are inputs, so that all
layers share a graph.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.onnx_common import packing
from hetero.backends.onnx_common.builder import CONTRIB, GraphBuilder
from hetero.backends.ops import StorageFormat
from hetero.backends.weights import GROUP_SIZE, PackedWeight, padded

OPSET = 23  # the first with RMSNormalization
# Up to here a 1×1 convolution reads a third of what a MatMul reads from VTCM (bench/qnn.py).
CONVOLUTION_ROWS = 32
LOWEST = -65504.0

F32, F16 = np.float32, np.float16
Array = npt.NDArray[np.generic]


def matmul(op: ops.MatMul, m: int, weight: PackedWeight, bias: Array | None) -> bytes:
    """`y = x · Wᵀ + unit · bias`: MatMulNBits for quantised weights, else a convolution or MatMul.

    `unit` [m, 1], an input if there is a bias, scales it along with x (`ranges`).
    """
    graph = GraphBuilder()
    x = graph.cast(graph.input("x", F32, (m, op.k)), F16)
    graph.output("y", F32, (m, op.n))
    if op.weight_format.storage in (StorageFormat.F16, StorageFormat.F32):
        product = _float_product(graph, op, m, x, weight)
    else:
        product = _quantized_product(graph, op, m, x, weight)
    if bias is not None:
        unit = graph.cast(graph.input("unit", F32, (m, 1)), F16)
        scaled = graph.node("Mul", unit, graph.constant(bias.astype(F16)[None, :]))
        product = graph.node("Add", product, scaled)
    graph.cast(product, F32, out="y")
    return graph.model(OPSET)


def _quantized_product(
    graph: GraphBuilder, op: ops.MatMul, m: int, x: str, weight: PackedWeight
) -> str:
    """MatMulNBits on [1, m, K]: the provider takes no other rank. K is padded with zeros.

    A single row gives zeros (2.7.0), so it is computed with the row of padding behind it.
    """
    staged = packing.stage(weight)
    width, rows = padded(op.k, GROUP_SIZE), max(op.n, 2)
    if width != op.k:
        x = graph.node("Concat", x, graph.constant(np.zeros((m, width - op.k), F16)), axis=1)
    product = graph.node(
        "MatMulNBits",
        graph.node("Reshape", x, graph.ints(1, m, width)),
        graph.constant(staged["weight"].padded[:rows]),
        graph.constant(staged["scales"].padded[:rows].astype(F16)),
        domain=CONTRIB,
        K=width,
        N=rows,
        bits=4 if weight.storage is StorageFormat.Q4 else 8,
        block_size=GROUP_SIZE,
    )
    flat = graph.node("Reshape", product, graph.ints(m, rows))
    return flat if rows == op.n else graph.slice(flat, 0, op.n, axis=1)


def _float_product(
    graph: GraphBuilder, op: ops.MatMul, m: int, x: str, weight: PackedWeight
) -> str:
    values = weight.dequantize().astype(F16)  # [n, k]
    if not 1 < m <= CONVOLUTION_ROWS:
        return graph.node("MatMul", x, graph.constant(np.ascontiguousarray(values.T)))
    image = graph.node("Reshape", x, graph.ints(1, 1, m, op.k))
    channels = graph.node("Transpose", image, perm=[0, 3, 1, 2])  # [1, k, 1, m]
    kernel = graph.constant(values[:, :, None, None])
    product = graph.node("Conv", channels, kernel, kernel_shape=[1, 1])
    rows = graph.node("Transpose", product, perm=[0, 2, 3, 1])
    return graph.node("Reshape", rows, graph.ints(m, op.n))


def embed(op: ops.Embed, m: int, weight: PackedWeight) -> bytes:
    """Rows gathered from the table in fp16, scaled before it is rounded."""
    graph = GraphBuilder()
    graph.input("tokens", np.int32, (m,))
    graph.output("y", F32, (m, op.d))
    table = (weight.dequantize() * F32(op.scale)).astype(F16)
    graph.cast(graph.node("Gather", graph.constant(table), "tokens"), F32, out="y")
    return graph.model(OPSET)


def norm(op: ops.RMSNorm | ops.LayerNorm, m: int) -> bytes:
    """The normalisations; with `add` the sum of the residual stream is an output too."""
    graph = GraphBuilder()
    x = graph.input("x", F32, (m, op.d))
    graph.output("y", F32, (m, op.d))
    vectors = [graph.input("weight", F32, (op.d,))]
    if isinstance(op, ops.LayerNorm):
        vectors.append(graph.input("bias", F32, (op.d,)))
    if op.add:
        residual = graph.input("residual", F32, (m, op.d))
        x = graph.node("Add", x, residual, out=graph.output("sum", F32, (m, op.d)))
    kind = "RMSNormalization" if isinstance(op, ops.RMSNorm) else "LayerNormalization"
    graph.node(kind, x, *vectors, out="y", axis=-1, epsilon=op.eps)
    return graph.model(OPSET)


def rotate(op: ops.Rope, m: int) -> bytes:
    """Rotation of queries and keys; values are copied.

    Inputs besides `qkv` [m, width]: `cos` and `sin` [m, R / 2] of this call's positions, `q_norm`
    and `k_norm` [D] with `qk_norm_eps`. Output `out` [m, width].
    """
    graph = GraphBuilder()
    graph.input("qkv", F32, (m, op.width))
    graph.output("out", F32, (m, op.width))
    half = op.rotated // 2
    tables = [
        graph.node("Reshape", graph.input(name, F32, (m, half)), graph.ints(m, 1, half))
        for name in ("cos", "sin")
    ]
    turned = op.heads + op.kv_heads
    heads = graph.node(
        "Reshape",
        graph.slice("qkv", 0, turned * op.head_dim, axis=1),
        graph.ints(m, turned, op.head_dim),
    )
    if op.qk_norm_eps is not None:
        queries = _normed(graph, op, heads, "q_norm", 0, op.heads)
        keys = _normed(graph, op, heads, "k_norm", op.heads, turned)
        heads = graph.node("Concat", queries, keys, axis=1)
    rotated = graph.node("Reshape", _rotated(graph, op, heads, tables), graph.ints(m, -1))
    values = graph.slice("qkv", turned * op.head_dim, op.width, axis=1)
    graph.node("Concat", rotated, values, axis=1, out="out")
    return graph.model(OPSET)


def _rotated(graph: GraphBuilder, op: ops.Rope, heads: str, tables: list[str]) -> str:
    """(a, b) to (a·cos - b·sin, b·cos + a·sin) on the halves of the first R of D dimensions."""
    cos, sin = tables
    half = op.rotated // 2
    first = graph.slice(heads, 0, half, axis=2)
    second = graph.slice(heads, half, op.rotated, axis=2)
    turned = [
        graph.node("Sub", graph.node("Mul", first, cos), graph.node("Mul", second, sin)),
        graph.node("Add", graph.node("Mul", second, cos), graph.node("Mul", first, sin)),
    ]
    if op.rotated != op.head_dim:
        turned.append(graph.slice(heads, op.rotated, op.head_dim, axis=2))
    return graph.node("Concat", *turned, axis=2)


def _normed(graph: GraphBuilder, op: ops.Rope, heads: str, name: str, start: int, stop: int) -> str:
    """RMSNorm of heads [start, stop), as rows: of rank 3 with D ≤ 16 it corrupts memory (2.7.0)."""
    weight = graph.input(name, F32, (op.head_dim,))
    part = graph.slice(heads, start, stop, axis=1)
    rows = graph.node("Reshape", part, graph.ints(-1, op.head_dim))
    normed = graph.node("RMSNormalization", rows, weight, axis=-1, epsilon=op.qk_norm_eps)
    return graph.node("Reshape", normed, graph.ints(-1, stop - start, op.head_dim))


def attention(op: ops.Attention, m: int, context: int) -> bytes:
    """Attention of m queries over the first `context` positions of the caches.

    Inputs: `qkv` [m, width]; `k0` … and `v0` … [context, D], the caches head by head, so that a
    part of a cache is an input without a copy; `visible` bool [m, context]; `written` bool
    [context, 1]. Positions that are not written may hold anything, NaN included: they are
    replaced before they enter a product. Output `out` [m, H · D].
    """
    graph = GraphBuilder()
    graph.input("qkv", F32, (m, op.width))
    graph.input("visible", np.bool_, (m, context))
    graph.input("written", np.bool_, (context, 1))
    graph.output("out", F32, (m, op.heads * op.head_dim))
    group = op.heads // op.kv_heads
    zero, lowest = graph.scalar(0.0), graph.scalar(LOWEST)
    mixed = []
    for head in range(op.kv_heads):
        cached = [graph.input(f"{kind}{head}", F32, (context, op.head_dim)) for kind in "kv"]
        keys, values = (graph.node("Where", "written", part, zero) for part in cached)
        first = head * group * op.head_dim
        part = graph.slice("qkv", first, first + group * op.head_dim, axis=1)
        by_head = graph.node("Reshape", part, graph.ints(m, group, op.head_dim))
        queries = graph.node("Transpose", by_head, perm=[1, 0, 2])  # [group, m, D]
        scaled = graph.node("Mul", queries, graph.scalar(op.softmax_scale))
        scores = graph.node("MatMul", scaled, graph.node("Transpose", keys, perm=[1, 0]))
        masked = graph.node("Where", "visible", scores, lowest)  # [group, m, context]
        weighted = graph.node("MatMul", graph.node("Softmax", masked, axis=-1), values)
        by_token = graph.node("Transpose", weighted, perm=[1, 0, 2])  # [m, group, D]
        mixed.append(graph.node("Reshape", by_token, graph.ints(m, group * op.head_dim)))
    if len(mixed) == 1:
        graph.node("Identity", mixed[0], out="out")
    else:
        graph.node("Concat", *mixed, axis=1, out="out")
    return graph.model(OPSET)


def gated_act(op: ops.GatedAct, m: int) -> bytes:
    """act(gate) · up."""
    graph = GraphBuilder()
    x = graph.input("x", F32, (m, 2 * op.f))
    graph.output("y", F32, (m, op.f))
    gate = graph.slice(x, 0, op.f, axis=1)
    match op.activation:
        case "silu":
            active = graph.node("Mul", gate, graph.node("Sigmoid", gate))
        case "gelu":
            active = graph.node("Gelu", gate)
        case "gelu_tanh":
            active = graph.node("Gelu", gate, approximate="tanh")
    graph.node("Mul", active, graph.slice(x, op.f, 2 * op.f, axis=1), out="y")
    return graph.model(OPSET)


def add(op: ops.Add, m: int) -> bytes:
    """x + residual."""
    graph = GraphBuilder()
    x = graph.input("x", F32, (m, op.d))
    residual = graph.input("residual", F32, (m, op.d))
    graph.output("y", F32, (m, op.d))
    graph.node("Add", x, residual, out="y")
    return graph.model(OPSET)
