"""The nodes of each operation in a graph of m tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero.backends import checks, ops
from hetero.backends.formats import GROUP_SIZE, StorageFormat
from hetero.backends.onnx_common import staging
from hetero.backends.onnx_common.builder import CONTRIB, GraphBuilder
from hetero.backends.ops import Activation, Op
from hetero.backends.protocol import WeightValue
from hetero.backends.qnn import integer
from hetero.backends.weights import PackedWeight, padded

# Up to here a 1×1 convolution reads a third of what a MatMul reads from VTCM (docs: qnn.md).
CONVOLUTION_ROWS = 32
LOWEST = -65504.0

F32, F16 = np.float32, np.float16
Weights = Mapping[str, WeightValue]


@dataclass(frozen=True)
class NodeRef(ABC):
    """Place of an operation in a graph: the tensors of its ports, and its other inputs.

    `inputs` name the tensors of the ports that it reads, `outputs` those that it writes ("" for a
    fresh name). `context` is the number of cache positions that attention reads. `scaled` lets the
    caller scale a matmul's rows (`ranges`). With `appends`, the keys and values of this call are in
    no cache yet. `peak` is an output for the largest code of a matmul of codes: 1 is the last one.
    """

    graph: GraphBuilder
    m: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    context: int = 0
    scaled: bool = True
    appends: bool = False
    peak: str = ""

    @abstractmethod
    def feed(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> str:
        """Return a tensor that the caller fills before each call."""

    @abstractmethod
    def vector(self, name: str, value: WeightValue | None, width: int) -> str:
        """Return a vector of weights."""


def emit(op: Op, weights: Weights, site: NodeRef) -> dict[str, str]:
    """Append the nodes of an operation; returns the tensors of the ports that it writes."""
    match op:
        case ops.RMSNorm() | ops.LayerNorm():
            return _norm(op, weights, site)
        case ops.Rope():
            return {"out": _rotate(op, weights, site)}
        case ops.Attention():
            return {"out": _attention(op, site)}
        case _:
            return {"y": _simple(op, weights, site)}


def _simple(op: Op, weights: Weights, site: NodeRef) -> str:
    """Return the operations whose result is `y` alone."""
    graph, out = site.graph, site.outputs["y"]
    match op:
        case ops.MatMul():
            result = _matmul(op, weights, site)
        case ops.Embed():
            result = _embed(op, checks.packed(weights), site)
        case ops.GatedAct():
            result = _gated_act(op, site)
        case ops.ShortConv():
            result = _short_conv(op, weights, site)
        case ops.SigmoidGate():
            gates = graph.slice(site.inputs["gates"], op.first, op.first + op.d, axis=1)
            result = graph.node("Mul", site.inputs["x"], graph.node("Sigmoid", gates), out=out)
        case ops.GatedInput():
            own = graph.slice(site.inputs["inputs"], op.first, op.first + op.d, axis=1)
            total = graph.node("Add", site.inputs["residual"], own)
            active = _active(graph, op.activation, site.inputs["x"], "")
            result = graph.node("Mul", active, total, out=out)
        case ops.Act():
            result = _active(graph, op.activation, site.inputs["x"], out)
        case ops.Add():
            both = site.inputs["x"], site.inputs["residual"]
            result = graph.node("Add", *both, out="" if op.scaled else out)
            if op.scaled:
                factor = site.vector("weight", weights.get("weight"), 1)
                result = graph.node("Mul", result, factor, out=out)
        case ops.AddPositions():
            rows = site.feed("rows", F32, (site.m, op.d))
            result = graph.node("Add", site.inputs["x"], rows, out=out)
        case _:
            raise TypeError(f"{type(op).__name__} has no result named y")
    return result


def _matmul(op: ops.MatMul, weights: Weights, site: NodeRef) -> str:
    """Return `y = x · Wᵀ + unit · bias`, then the soft cap of `lift · y`.

    `unit` and `lift` [m, 1], fed if there is a bias or a cap, undo the scaling of x (`ranges`).
    """
    graph, m, weight = site.graph, site.m, checks.packed(weights)
    if op.weight_format.activations.static:
        return _static_matmul(op, weights, site)
    x = graph.cast(site.inputs["x"], F16)
    if not op.weight_format.storage.quantised:
        product = _float_product(graph, op, m, x, weight)
    else:
        product = _quantized_product(graph, op, m, x, weight)
    if op.bias:
        bias = graph.constant(checks.vector(weights, "bias").astype(F16)[None, :])
        if site.scaled:
            bias = graph.node("Mul", graph.cast(site.feed("unit", F32, (m, 1)), F16), bias)
        product = graph.node("Add", product, bias)
    if not op.softcap:
        return graph.cast(product, F32, out=site.outputs["y"])
    whole = graph.cast(product, F32)
    if site.scaled:
        whole = graph.node("Mul", whole, site.feed("lift", F32, (m, 1)))
    return _capped(graph, whole, op.softcap, site.outputs["y"])


def _static_matmul(op: ops.MatMul, weights: Weights, site: NodeRef) -> str:
    """Return a matmul of 8-bit codes inside a group.

    X is rounded by the graph, with its static scale.
    """
    graph, scale = site.graph, float(checks.vector(weights, "x_scale")[0])
    graph.output(site.peak, F32, (1, 1))
    product = integer.emit_static(
        graph, site.inputs["x"], scale, checks.packed(weights), site.m, peak=site.peak
    )
    if op.bias:
        product = graph.node(
            "Add", product, graph.constant(checks.vector(weights, "bias")[None, :])
        )
    if op.softcap:
        product = _capped(graph, product, op.softcap)
    return graph.node("Identity", product, out=site.outputs["y"])


def _capped(graph: GraphBuilder, values: str, cap: float, out: str = "") -> str:
    """Return cap · tanh(values / cap)."""
    small = graph.node("Tanh", graph.node("Mul", values, graph.scalar(1 / cap)))
    return graph.node("Mul", small, graph.scalar(cap), out=out)


def _quantized_product(
    graph: GraphBuilder, op: ops.MatMul, m: int, x: str, weight: PackedWeight
) -> str:
    """Return MatMulNBits on [1, m, K]: the provider takes no other rank. K is padded with zeros.

    A single row gives zeros (2.7.0), so it is computed with the row of padding after it.
    """
    staged = staging.stage(weight)
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


def _embed(op: ops.Embed, weight: PackedWeight, site: NodeRef) -> str:
    """Rows gathered from the table in fp16, scaled before it is rounded."""
    graph = site.graph
    table = graph.constant((weight.dequantize() * F32(op.scale)).astype(F16))
    return graph.cast(
        graph.node("Gather", table, site.inputs["tokens"]), F32, out=site.outputs["y"]
    )


def _short_conv(op: ops.ShortConv, weights: Weights, site: NodeRef) -> str:
    """Return the convolution as a product for each tap, whose vectors all layers' graphs share.

    Fed: `before` [L - 1, d], the rows before the call's first.
    """
    graph, m, d, x, out = site.graph, site.m, op.d, site.inputs["x"], site.outputs["y"]
    rows = graph.slice(x, 0, d, axis=1)
    if op.gated:
        rows = graph.node("Mul", rows, graph.slice(x, 2 * d, 3 * d, axis=1))
    rows = graph.node("Concat", site.feed("before", F32, (op.taps - 1, d)), rows, axis=0)
    vector = site.vector("taps", weights.get("taps"), op.taps * d)
    taps = graph.node("Reshape", vector, graph.ints(op.taps, d))
    total = ""
    for j in range(op.taps):
        tap = graph.slice(taps, j, j + 1, axis=0)
        term = graph.node("Mul", graph.slice(rows, j, j + m, axis=0), tap)
        total = graph.node("Add", total, term) if total else term
    if op.bias:
        total = graph.node("Add", total, site.vector("bias", weights.get("bias"), d))
    if op.activation:
        total = _active(graph, op.activation, total)
    if op.gated:
        return graph.node("Mul", total, graph.slice(x, d, 2 * d, axis=1), out=out)
    return graph.node("Identity", total, out=out)


def _norm(op: ops.RMSNorm | ops.LayerNorm, weights: Weights, site: NodeRef) -> dict[str, str]:
    """Return the normalisations; with `add` the sum of the residual stream is an output too."""
    graph, x, results = site.graph, site.inputs["x"], {}
    names = ("weight", "bias") if isinstance(op, ops.LayerNorm) else ("weight",)
    vectors = [site.vector(name, weights.get(name), op.d) for name in names]
    if op.add:
        x = graph.node("Add", x, site.inputs["residual"], out=site.outputs["sum"])
        results["sum"] = x
    kind = "RMSNormalization" if isinstance(op, ops.RMSNorm) else "LayerNormalization"
    normed = graph.node(kind, x, *vectors, out=site.outputs["y"], axis=-1, epsilon=op.eps)
    return {**results, "y": normed}


def _rotate(op: ops.Rope, weights: Weights, site: NodeRef) -> str:
    """Return the rotation of queries and keys; values are copied.

    Fed: `cos` and `sin` [m, R / 2] of this call's positions, with scaled queries `query_cos` and
    `query_sin`; vectors `q_norm` and `k_norm` with `qk_norm_eps`.
    """
    graph, m, qkv = site.graph, site.m, site.inputs["qkv"]
    half, turned = op.rotated // 2, op.heads + op.kv_heads
    if op.gated:
        queries = graph.slice(qkv, 0, op.gates, axis=1)
        rest = graph.slice(qkv, 2 * op.gates, op.width + op.gates, axis=1)
        qkv = graph.node("Concat", queries, rest, axis=1)
    parts = [(0, turned, "")]
    if op.scales_queries:
        parts = [(0, op.heads, "query_"), (op.heads, turned, "")]
    heads = graph.node(
        "Reshape",
        graph.slice(qkv, 0, turned * op.head_dim, axis=1),
        graph.ints(m, turned, op.head_dim),
    )
    if op.qk_norm_eps is not None and not op.qk_norm_after:
        heads = _normed_heads(op, weights, site, heads)
    rotated = []
    for start, stop, prefix in parts:
        tables = [
            graph.node("Reshape", site.feed(prefix + x, F32, (m, half)), graph.ints(m, 1, half))
            for x in ("cos", "sin")
        ]
        part = graph.slice(heads, start, stop, axis=1) if len(parts) > 1 else heads
        rotated.append(_rotated(graph, op, part, tables))
    heads = graph.node("Concat", *rotated, axis=1) if len(rotated) > 1 else rotated[0]
    if op.qk_norm_eps is not None and op.qk_norm_after:
        heads = _normed_heads(op, weights, site, heads)
    flat = graph.node("Reshape", heads, graph.ints(m, -1))
    values = graph.slice(qkv, turned * op.head_dim, op.width, axis=1)
    if op.v_norm_eps is not None:
        ones = graph.constant(np.ones(op.head_dim, np.float32))
        rows = graph.node("Reshape", values, graph.ints(-1, op.head_dim))
        normed = graph.node("RMSNormalization", rows, ones, axis=-1, epsilon=op.v_norm_eps)
        values = graph.node("Reshape", normed, graph.ints(m, -1))
    return graph.node("Concat", flat, values, axis=1, out=site.outputs["out"])


def _rotated(graph: GraphBuilder, op: ops.Rope, heads: str, tables: list[str]) -> str:
    """Map (a, b) to (a·cos - b·sin, b·cos + a·sin) on the first R of D dimensions.

    The halves of those dimensions are a and b.
    """
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


def _normed_heads(op: ops.Rope, weights: Weights, site: NodeRef, heads: str) -> str:
    """Return RMSNorm of the heads [m, H + G, D] of queries and keys, as rows.

    Of rank 3 with D ≤ 16 it corrupts memory (2.7.0).
    """
    graph, turned, normed = site.graph, op.heads + op.kv_heads, []
    for name, start, stop in (("q_norm", 0, op.heads), ("k_norm", op.heads, turned)):
        width = op.norm_width(name)
        weight = site.vector(name, weights.get(name), width)
        part = graph.slice(heads, start, stop, axis=1)
        rows = graph.node("Reshape", part, graph.ints(-1, width))
        y = graph.node("RMSNormalization", rows, weight, axis=-1, epsilon=op.qk_norm_eps)
        normed.append(graph.node("Reshape", y, graph.ints(-1, stop - start, op.head_dim)))
    return graph.node("Concat", *normed, axis=1)


def _attention(op: ops.Attention, site: NodeRef) -> str:
    """Return the attention of m queries over the first `context` positions of the caches.

    Fed: `k0` … and `v0` … [context, D], the caches head by head, so that a part of a cache is an
    input without a copy; `visible` bool [m, context]; `written` bool [context, 1]. Positions that
    are not written may hold anything, NaN included: they are replaced before they enter a product.
    Where the call appends, its own keys and values follow the cached ones: `visible` has m columns
    more.
    """
    graph, m, context = site.graph, site.m, site.context
    seen = context + m if site.appends else context
    visible = site.feed("visible", np.bool_, (m, seen))
    written = site.feed("written", np.bool_, (context, 1))
    group = op.heads // op.kv_heads
    zero = graph.scalar(0.0)
    mixed = []
    for head in range(op.kv_heads):
        cached = [site.feed(f"{kind}{head}", F32, (context, op.head_dim)) for kind in "kv"]
        clean = [graph.node("Where", written, part, zero) for part in cached]
        if site.appends:
            clean = [
                graph.node(
                    "Concat", part, _own(op, site, op.heads + i * op.kv_heads + head), axis=0
                )
                for i, part in enumerate(clean)
            ]
        first = head * group * op.head_dim
        part = graph.slice(site.inputs["qkv"], first, first + group * op.head_dim, axis=1)
        by_head = graph.node("Reshape", part, graph.ints(m, group, op.head_dim))
        queries = graph.node("Transpose", by_head, perm=[1, 0, 2])  # [group, m, D]
        weighted = _weighted(graph, op, queries, clean, visible)
        by_token = graph.node("Transpose", weighted, perm=[1, 0, 2])  # [m, group, D]
        mixed.append(graph.node("Reshape", by_token, graph.ints(m, group * op.head_dim)))
    if len(mixed) == 1:
        return graph.node("Identity", mixed[0], out=site.outputs["out"])
    return graph.node("Concat", *mixed, axis=1, out=site.outputs["out"])


def _own(op: ops.Attention, site: NodeRef, head: int) -> str:
    """Return a head of this call's keys or values, [m, D]."""
    first = head * op.head_dim
    return site.graph.slice(site.inputs["qkv"], first, first + op.head_dim, axis=1)


def _weighted(
    graph: GraphBuilder, op: ops.Attention, queries: str, cached: list[str], visible: str
) -> str:
    """Return softmax(cap(scale · q · kᵀ)) · v, [group, m, D]."""
    keys, values = cached
    scaled = graph.node("Mul", queries, graph.scalar(op.softmax_scale))
    scores = graph.node("MatMul", scaled, graph.node("Transpose", keys, perm=[1, 0]))
    if op.softcap:
        scores = _capped(graph, scores, op.softcap)
    masked = graph.node("Where", visible, scores, graph.scalar(LOWEST))  # [group, m, seen]
    return graph.node("MatMul", graph.node("Softmax", masked, axis=-1), values)


def _gated_act(op: ops.GatedAct, site: NodeRef) -> str:
    """Return act(gate) · up."""
    graph, x = site.graph, site.inputs["x"]
    active = _active(graph, op.activation, graph.slice(x, 0, op.f, axis=1))
    up = graph.slice(x, op.f, 2 * op.f, axis=1)
    return graph.node("Mul", active, up, out=site.outputs["y"])


def expert_activation(
    graph: GraphBuilder, activation: ops.ExpertActivation, gate: str, up: str
) -> str:
    """Return act(gate) · up."""
    if activation != "swiglu_oai":
        return graph.node("Mul", _active(graph, activation, gate), up)
    least, most = (graph.scalar(x) for x in (-ops.SWIGLU_LIMIT, ops.SWIGLU_LIMIT))
    gate = graph.node("Min", gate, most)
    up = graph.node("Add", graph.node("Clip", up, least, most), graph.scalar(1.0))
    share = graph.node("Sigmoid", graph.node("Mul", gate, graph.scalar(ops.SWIGLU_ALPHA)))
    return graph.node("Mul", graph.node("Mul", gate, share), up)


def _active(graph: GraphBuilder, activation: Activation, x: str, out: str = "") -> str:
    match activation:
        case "silu":
            return graph.node("Mul", x, graph.node("Sigmoid", x), out=out)
        case "gelu":
            return graph.node("Gelu", x, out=out)
        case "gelu_tanh":
            return graph.node("Gelu", x, out=out, approximate="tanh")
        case "relu":
            return graph.node("Relu", x, out=out)
