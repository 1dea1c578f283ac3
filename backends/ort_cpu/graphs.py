"""The ONNX graph of every operation. m is symbolic, so one graph serves all graph sizes.

Weights of the small operations are inputs, bound like activations: all layers share one session.
Only a matmul's weight is an initializer, because ONNX Runtime packs initializers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import (
    CHANNEL_ROWS,
    GROUP_SIZE,
    CacheFormat,
    StorageFormat,
    WeightFormat,
)
from hetero.backends.host.processor import cpu_flags, is_arm64
from hetero.backends.onnx_common.builder import CONTRIB, GraphBuilder
from hetero.backends.ops import Activation
from hetero.backends.weights import ROW_BLOCK, padded

ActivationPath: TypeAlias = Literal["split", "fp32", "both"]

FLOAT_LEVEL = 0  # levels 0 to 3 are the same kernel on x86 (measured): fp32 arithmetic
INT8_LEVEL = 4

F32, F16 = np.float32, np.float16


def matmul(op: ops.MatMul, *, split: bool) -> bytes:
    """Return MatMulNBits for quantised weights, Gemm for floating-point ones.

    `split` (for `a16` formats): the int8 kernel is two to five times as fast as the fp32 one for
    one token, so x is written as `high + low`, high being x rounded to int8 steps of its block of
    32 and low the remainder, and both planes go through the int8 kernel as twice the tokens. The
    kernel quantises high without loss and low with 1/254 of high's step: the error is at most 2⁻¹⁶
    of the block's largest activation (fp16 activations: 2⁻¹²).
    """
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.k))
    bias = graph.input("bias", F32, (op.n,)) if op.bias else ""
    graph.output("y", F32, ("m", op.n))
    out = "uncapped" if op.softcap else "y"
    if not op.weight_format.storage.quantised:
        weight = graph.weight("weight", F32, (op.n, op.k))
        graph.node("Gemm", *filter(None, (x, weight, bias)), out=out, transB=1)
    elif split:
        _split_matmul(graph, op, x, bias, out)
    else:
        level = INT8_LEVEL if op.weight_format is WeightFormat.W4A8 else FLOAT_LEVEL
        if level == INT8_LEVEL and not kernel_rounds():
            x = _rounded_features(graph, op, x)
        _matmul_nbits(graph, op, x, level=level, bias=bias, out=out)
    if op.softcap:
        softcapped(graph, out, op.softcap, "y")
    return graph.model()


def static_matmul(op: ops.MatMul, codes: npt.DTypeLike) -> bytes:
    """Return x rounded to codes of one scale, and integer sums over all of k (`w8a8`).

    `codes` is what the weights are given as, [k, n]: int8, or uint8 with zero at 128 where ONNX
    Runtime's kernel for the former is not exact (`integers`). The inputs `x_scale` [1] and
    `scales` [n] meet the sum as one number, their product.
    """
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.k))
    x_scale = graph.input("x_scale", F32, (1,))
    bias = graph.input("bias", F32, (op.n,)) if op.bias else ""
    graph.output("y", F32, ("m", op.n))
    out = "uncapped" if op.softcap else "y"
    weight = graph.weight("weight", codes, (op.k, op.n))
    scales = graph.weight("scales", F32, (op.n,))
    zero = graph.constant(np.array(128, np.uint8))
    rounded = graph.node("QuantizeLinear", x, x_scale, zero)
    weight_zero = zero if weight_is_unsigned(codes) else ""
    graph.node(
        "MatMulIntegerToFloat",
        *(rounded, weight, x_scale, scales, zero, weight_zero, bias),
        out=out,
        domain=CONTRIB,
    )
    if op.softcap:
        softcapped(graph, out, op.softcap, "y")
    return graph.model()


def weight_is_unsigned(codes: npt.DTypeLike) -> bool:
    """Return whether codes are uint8, with zero at 128."""
    return np.dtype(codes) == np.uint8


def softcapped(graph: GraphBuilder, x: str, cap: float, out: str = "") -> str:
    """Return cap · tanh(x / cap)."""
    small = graph.node("Tanh", graph.node("Mul", x, graph.scalar(1 / cap)))
    return graph.node("Mul", small, graph.scalar(cap), out=out)


def _matmul_nbits(
    graph: GraphBuilder, op: ops.MatMul, x: str, *, level: int, bias: str = "", out: str = ""
) -> str:
    bits = 4 if op.weight_format.storage is StorageFormat.Q4 else 8
    groups = padded(op.k, GROUP_SIZE) // GROUP_SIZE
    weight = graph.weight("weight", np.uint8, (op.n, groups, GROUP_SIZE * bits // 8))
    scales = graph.weight("scales", F32, (op.n, groups))
    return graph.node(
        "MatMulNBits",
        *((x, weight, scales, "", "", bias) if bias else (x, weight, scales)),
        out=out,
        domain=CONTRIB,
        K=op.k if level == FLOAT_LEVEL or op.weight_format is WeightFormat.W4A8 else groups * 32,
        N=op.n,
        bits=bits,
        block_size=GROUP_SIZE,
        accuracy_level=level,
    )


def _split_matmul(graph: GraphBuilder, op: ops.MatMul, x: str, bias: str, out: str) -> None:
    width = padded(op.k, GROUP_SIZE)
    blocks = graph.node("Reshape", padded_features(graph, op, x), graph.ints(-1, GROUP_SIZE))
    high = rounded(graph, blocks)
    low = graph.node("Sub", blocks, high)
    planes = graph.node("Concat", high, low, axis=0)  # [2m · k/32, 32]
    product = _matmul_nbits(
        graph, op, graph.node("Reshape", planes, graph.ints(-1, width)), level=INT8_LEVEL
    )
    graph.node("Split", product, out=("of_high", "of_low"), axis=0, num_outputs=2)
    if bias:
        graph.node("Add", graph.node("Add", "of_high", "of_low"), bias, out=out)
    else:
        graph.node("Add", "of_high", "of_low", out=out)


def _rounded_features(graph: GraphBuilder, op: ops.MatMul, x: str) -> str:
    blocks = graph.node("Reshape", padded_features(graph, op, x), graph.ints(-1, GROUP_SIZE))
    width = padded(op.k, GROUP_SIZE)
    whole = graph.node("Reshape", rounded(graph, blocks), graph.ints(-1, width))
    return graph.slice(whole, 0, op.k, axis=1) if width != op.k else whole


def rounded(graph: GraphBuilder, blocks: str, size: int = GROUP_SIZE) -> str:
    """Return blocks [count, size] rounded to int8 steps, by the int8 kernel itself.

    The product of a block and 1. (One node for seven of written-out arithmetic.) 1 is 7 · 1/7:
    codes count from 8, and what they are offset by cancels out with a smaller part of the result.
    """
    if not kernel_rounds():
        return _rounded_by_nodes(graph, blocks)
    codes = np.full((size, 1, size), 8, np.uint8)
    codes[np.arange(size), 0, np.arange(size)] = 8 + 7
    return graph.node(
        "MatMulNBits",
        blocks,
        graph.constant(codes[..., ::2] | (codes[..., 1::2] << 4)),
        graph.constant(np.full((size, 1), 1 / 7, F32)),
        domain=CONTRIB,
        K=size,
        N=size,
        bits=4,
        block_size=size,
        accuracy_level=INT8_LEVEL,
    )


def kernel_rounds() -> bool:
    """Return whether accuracy level 4 of MatMulNBits rounds activations here.

    On Arm without dot products (Cortex-A53, A72) ONNX Runtime takes its float kernel instead.
    """
    flags = cpu_flags() if is_arm64() else frozenset()
    return not flags or "asimddp" in flags


def _rounded_by_nodes(graph: GraphBuilder, blocks: str) -> str:
    largest = graph.node("ReduceMax", graph.node("Abs", blocks), graph.ints(1), keepdims=1)
    step = graph.node("Mul", largest, graph.scalar(1 / 127))
    step = graph.node("Max", step, graph.scalar(float(np.finfo(F32).tiny)))  # of zeros
    return graph.node("Mul", graph.node("Round", graph.node("Div", blocks, step)), step)


def padded_features(graph: GraphBuilder, op: ops.MatMul, x: str) -> str:
    missing = -op.k % GROUP_SIZE
    return graph.node("Pad", x, graph.ints(0, 0, 0, missing)) if missing else x


def embed(op: ops.Embed, storage: StorageFormat) -> bytes:
    """Return rows gathered in place from the packed layout: the table is an input, never copied.

    Inputs `tokens` [m], `data` and `scales` (flat views of the `PackedWeight`), output `y` [m, d].
    """
    graph = GraphBuilder()
    graph.output("y", F32, ("m", op.d))
    graph.input("tokens", np.int32, ("m",))
    tokens = graph.node("Unsqueeze", graph.cast("tokens", np.int64), graph.ints(1))  # [m, 1]
    width = padded(op.d, GROUP_SIZE)
    match storage:
        case StorageFormat.Q4:
            words = rows_of(graph, tokens, "data", np.uint32, np.arange(width // 8) * ROW_BLOCK)
            values = _scaled(graph, tokens, _nibbles(graph, words), width)
        case StorageFormat.Q8:
            values = _scaled(graph, tokens, _codes8_of(graph, tokens, width), width)
        case StorageFormat.Q8R:
            codes = _codes8_of(graph, tokens, width)
            scales = rows_of(graph, tokens, "scales", F32, np.arange(1))
            values = graph.node("Mul", codes, scales)
        case StorageFormat.F16 | StorageFormat.F32:
            dtype = F16 if storage is StorageFormat.F16 else F32
            rows = rows_of(graph, tokens, "data", dtype, np.arange(op.d) * ROW_BLOCK)
            values = graph.cast(rows, F32)
    if width != op.d and storage.quantised:
        values = graph.slice(values, 0, op.d, axis=1)
    graph.node("Mul", values, graph.scalar(op.scale), out="y")
    return graph.model()


def _codes8_of(graph: GraphBuilder, tokens: str, width: int) -> str:
    """Return 8-bit codes of rows `tokens` as floats, [m, width]."""
    features = np.arange(width)
    offsets = features // 4 * (4 * ROW_BLOCK) + features % 4
    return graph.cast(rows_of(graph, tokens, "data", np.int8, offsets, lane_stride=4), F32)


def rows_of(
    graph: GraphBuilder,
    tokens: str,
    name: str,
    dtype: type[np.generic],
    offsets: npt.NDArray[np.int64],
    *,
    lane_stride: int = 1,
    block: int = 0,
) -> str:
    """Return the elements of rows `tokens` of a flat packed array, [m, len(offsets)].

    An element of row r is at `r // 16 · block + r % 16 · lane_stride + offset`, where a block of
    16 rows has `block` elements, by default 16 for each offset.
    """
    flat = name if name in graph.input_names else graph.input(name, dtype, (f"{name}_count",))
    sixteen = graph.ints(ROW_BLOCK)
    size = graph.ints(block or 16 * len(offsets))
    start = graph.node("Mul", graph.node("Div", tokens, sixteen), size)
    lane = graph.node("Mul", graph.node("Mod", tokens, sixteen), graph.ints(lane_stride))
    first = graph.node("Add", start, lane)
    places = graph.constant(offsets.astype(np.int64)[None, :])
    return graph.node("Gather", flat, graph.node("Add", first, places))


def _nibbles(graph: GraphBuilder, words: str) -> str:
    """Return [m, width / 8] words to [m, width / 8, 8] values."""
    shifts = graph.constant(np.arange(0, 32, 4, dtype=np.uint32))
    wide = graph.node("Unsqueeze", words, graph.ints(2))
    shifted = graph.node("BitShift", wide, shifts, direction="RIGHT")
    nibbles = graph.node("BitwiseAnd", shifted, graph.constant(np.array(15, dtype=np.uint32)))
    return graph.node("Sub", graph.cast(nibbles, F32), graph.scalar(8.0))


def _scaled(graph: GraphBuilder, tokens: str, values: str, width: int) -> str:
    """Return values times the scale of their group, [m, width]."""
    groups = width // GROUP_SIZE
    gathered = rows_of(graph, tokens, "scales", F16, np.arange(groups) * ROW_BLOCK)
    scales = graph.node("Unsqueeze", graph.cast(gathered, F32), graph.ints(2))
    grouped = graph.node("Reshape", values, graph.ints(-1, groups, GROUP_SIZE))
    return graph.node("Reshape", graph.node("Mul", grouped, scales), graph.ints(-1, width))


def norm(op: ops.RMSNorm | ops.LayerNorm) -> bytes:
    """Return the normalisations, with ONNX Runtime's fused residual addition if `add`."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.d))
    graph.output("y", F32, ("m", op.d))
    vectors = [graph.input("weight", F32, (op.d,))]
    if isinstance(op, ops.LayerNorm):
        vectors.append(graph.input("bias", F32, (op.d,)))
    if op.add:
        residual = graph.input("residual", F32, ("m", op.d))
        graph.output("sum", F32, ("m", op.d))
        simple = "Simplified" if isinstance(op, ops.RMSNorm) else ""
        graph.node(
            f"Skip{simple}LayerNormalization",
            x,
            residual,
            *vectors,
            out=("y", "", "", "sum"),
            domain=CONTRIB,
            epsilon=op.eps,
        )
    else:
        simple = "Simplified" if isinstance(op, ops.RMSNorm) else ""
        graph.node(f"{simple}LayerNormalization", x, *vectors, out="y", axis=-1, epsilon=op.eps)
    return graph.model()


def rotate(op: ops.Rope) -> bytes:
    """Return RotaryEmbedding over queries and keys; values are copied.

    Inputs besides `qkv` [1, m, width]: `first` int64 [1], `cos` and `sin` [max_position, R / 2],
    with scaled queries `query_cos` and `query_sin`, with `qk_norm_eps` `q_norm` and `k_norm`.
    """
    graph = GraphBuilder()
    qkv = graph.input("qkv", F32, (1, "m", op.width + op.gates))
    graph.output("out", F32, (1, "m", op.width))
    graph.input("first", np.int64, (1,))
    if op.gated:
        first = graph.slice(qkv, 0, op.gates, axis=2)
        rest = graph.slice(qkv, 2 * op.gates, op.width + op.gates, axis=2)
        qkv = graph.node("Concat", first, rest, axis=2)
    turned = op.heads + op.kv_heads
    apart = op.scales_queries
    for table in ("cos", "sin", *(("query_cos", "query_sin") if apart else ())):
        graph.input(table, F32, (op.max_position, op.rotated // 2))
    queries, keys = graph.slice(qkv, 0, turned * op.head_dim, axis=2), ""
    if op.kv_heads and (apart or op.qk_norm_eps is not None):
        queries = graph.slice(qkv, 0, op.heads * op.head_dim, axis=2)
        keys = graph.slice(qkv, op.heads * op.head_dim, turned * op.head_dim, axis=2)
    if op.qk_norm_eps is not None and not op.qk_norm_after:
        queries, keys = _normed(graph, op, queries, keys)
    if apart:
        queries = _turned(graph, op, queries, op.heads, "query_")
        if op.kv_heads:
            keys = _turned(graph, op, keys, op.kv_heads)
        rotated = graph.node("Concat", queries, *([keys] if keys else []), axis=2)
    else:
        both = graph.node("Concat", queries, keys, axis=2) if keys else queries
        rotated = _turned(graph, op, both, turned)
    if op.qk_norm_eps is not None and op.qk_norm_after:
        queries = graph.slice(rotated, 0, op.heads * op.head_dim, axis=2)
        keys = graph.slice(rotated, op.heads * op.head_dim, turned * op.head_dim, axis=2)
        parts = _normed(graph, op, queries, keys if op.kv_heads else "")
        rotated = graph.node("Concat", *(x for x in parts if x), axis=2)
    if not op.kv_heads:
        graph.node("Identity", rotated, out="out")
        return graph.model()
    values = graph.slice(qkv, turned * op.head_dim, op.width, axis=2)
    if op.v_norm_eps is not None:
        rows = graph.node("Reshape", values, graph.ints(0, 0, op.kv_heads, op.head_dim))
        ones = graph.constant(np.ones(op.head_dim, np.float32))
        normed = graph.node(
            "SimplifiedLayerNormalization", rows, ones, axis=-1, epsilon=op.v_norm_eps
        )
        values = graph.node("Reshape", normed, graph.ints(0, 0, -1))
    graph.node("Concat", rotated, values, axis=2, out="out")
    return graph.model()


def _turned(graph: GraphBuilder, op: ops.Rope, x: str, heads: int, tables: str = "") -> str:
    """Return the rotation of heads [1, m, heads · D] by the tables of that prefix."""
    return graph.node(
        "RotaryEmbedding",
        x,
        "first",
        f"{tables}cos",
        f"{tables}sin",
        domain=CONTRIB,
        num_heads=heads,
        rotary_embedding_dim=op.rotated if op.rotated != op.head_dim else 0,
    )


def _normed(graph: GraphBuilder, op: ops.Rope, queries: str, keys: str) -> tuple[str, str]:
    """Return RMSNorm of each head of queries and keys, [1, m, heads · D], or of their rows.

    Without keys there are none.
    """
    normed = []
    parts = ((queries, "q_norm", op.heads), (keys, "k_norm", op.kv_heads))
    for part, name, heads in parts[: len(ops.weight_names(op))]:
        width = op.norm_width(name)
        weight = graph.input(name, F32, (width,))
        rows = graph.ints(0, 0, heads * op.head_dim // width, width)
        shaped = graph.node("Reshape", part, rows)
        y = graph.node(
            "SimplifiedLayerNormalization", shaped, weight, axis=-1, epsilon=op.qk_norm_eps
        )
        normed.append(graph.node("Reshape", y, graph.ints(0, 0, -1)))
    return normed[0], normed[1] if keys else ""


def fused_attention(op: ops.Attention) -> bytes:
    """Return GroupQueryAttention, which appends in place when past and present are the same memory.

    Inputs `qkv` [1, m, width], `past_k` and `past_v` [1, G, C, D], `last` int32 [1] (position of
    the last token), `length` int32 [] (tokens in the cache after the call); outputs `out`,
    `present_k`, `present_v`. Head sizes are multiples of 8. With sinks there is the input `sinks`.
    """
    graph = GraphBuilder()
    cache = (1, op.kv_heads, op.capacity, op.head_dim)
    graph.input("qkv", F32, (1, "m", op.width))
    graph.input("past_k", F32, cache)
    graph.input("past_v", F32, cache)
    graph.input("last", np.int32, (1,))
    graph.input("length", np.int32, ())
    graph.output("out", F32, (1, "m", op.heads * op.head_dim))
    graph.output("present_k", F32, cache)
    graph.output("present_v", F32, cache)
    sinks = ("", "", "", "", graph.input("sinks", F32, (op.heads,))) if op.sinks else ()
    graph.node(
        "GroupQueryAttention",
        *("qkv", "", "", "past_k", "past_v", "last", "length", *sinks),
        out=("out", "present_k", "present_v"),
        domain=CONTRIB,
        num_heads=op.heads,
        kv_num_heads=op.kv_heads,
        scale=op.softmax_scale,
        local_window_size=op.window or -1,
        softcap=op.softcap,
    )
    return graph.model()


def composed_attention(op: ops.Attention) -> bytes:
    """Return attention of standard operations, where the fused one refuses.

    It refuses some head sizes and caches.

    The caller has appended keys and values. Inputs `qkv` [m, width], `k_cache` and `v_cache` as
    `Attention` has them, `first` int64 [1]; output `out` [m, H · D]. Of codes there are also
    `k_words` and `v_words`: the same memory as float32. With sinks there is the input `sinks`.
    """
    graph = GraphBuilder()
    graph.input("qkv", F32, ("m", op.width))
    graph.input("first", np.int64, (1,))
    graph.output("out", F32, ("m", op.heads * op.head_dim))
    m = graph.node("Shape", "qkv", start=0, end=1)
    end = graph.node("Add", "first", m)
    visible = _visible(graph, end, op.window)  # [m, end]
    part = graph.slice("qkv", 0, op.heads * op.head_dim, axis=1)
    group = op.heads // op.kv_heads
    split = graph.node("Reshape", part, graph.ints(0, op.kv_heads, group, op.head_dim))
    queries = graph.node("Transpose", split, perm=[1, 2, 0, 3])  # [G, H/G, m, D]
    used_keys, used_values = _cached(graph, op, "k", end), _cached(graph, op, "v", end)
    if op.kv.coded:
        queries = graph.node("Mul", queries, _channels(graph, op))
    keys = graph.node("Transpose", used_keys, perm=[0, 1, 3, 2])
    scores = graph.node("MatMul", queries, keys)  # [G, H/G, m, end]
    scaled = graph.node("Mul", scores, graph.scalar(op.softmax_scale))
    capped = softcapped(graph, scaled, op.softcap) if op.softcap else scaled
    masked = graph.node("Where", visible, capped, graph.scalar(-np.inf))
    if op.sinks:
        sinks = graph.node(
            "Reshape", graph.input("sinks", F32, (op.heads,)), graph.ints(op.kv_heads, group, 1, 1)
        )
        rows = graph.node("Concat", graph.ints(1, 1), m, graph.ints(1), axis=0)
        masked = graph.node("Concat", masked, graph.node("Expand", sinks, rows), axis=-1)
    weights = graph.node("Softmax", masked, axis=-1)
    if op.sinks:
        weights = graph.slice(weights, 0, -1, axis=3)
    mixed = graph.node("MatMul", weights, used_values)
    by_token = graph.node("Transpose", mixed, perm=[2, 0, 1, 3])  # [m, G, H/G, D]
    graph.node("Reshape", by_token, graph.ints(-1, op.heads * op.head_dim), out="out")
    return graph.model()


def _cached(graph: GraphBuilder, op: ops.Attention, kind: str, end: str) -> str:
    """Return positions [0, end) of a cache in float32, [G, 1, end, D].

    Codes without their channels.
    """
    shape = op.kv.shape(op.kv_heads, op.capacity, op.head_dim)
    cache = graph.input(f"{kind}_cache", op.kv.dtype, shape)
    used = graph.node("Slice", cache, graph.ints(0), end, graph.ints(1))
    if op.kv.coded:
        codes = graph.cast(graph.slice(used, 0, op.head_dim, axis=2), F32)
        words = graph.input(f"{kind}_words", F32, (*shape[:2], shape[2] // 4))
        last = graph.slice(words, shape[2] // 4 - 1, shape[2] // 4, axis=2)
        steps = graph.node("Slice", last, graph.ints(0), end, graph.ints(1))
        used = graph.node("Mul", graph.node("Add", codes, graph.scalar(0.5)), steps)
    elif op.kv is not CacheFormat.F32:
        used = graph.cast(used, F32)
    return graph.node("Unsqueeze", used, graph.ints(1))


def _channels(graph: GraphBuilder, op: ops.Attention) -> str:
    """Return scales of the keys' channels, [G, 1, 1, D], which are stored after their codes."""
    tail = graph.slice("k_words", op.capacity, op.capacity + CHANNEL_ROWS, axis=1)
    flat = graph.node("Reshape", tail, graph.ints(op.kv_heads, 1, 1, -1))
    return graph.slice(flat, 0, op.head_dim, axis=3)


def _visible(graph: GraphBuilder, end: str, window: int) -> str:
    """Return which keys each query attends to, bool [m, end]."""
    zero, one = graph.constant(np.array(0, np.int64)), graph.constant(np.array(1, np.int64))
    stop = graph.node("Squeeze", end)
    start = graph.node("Squeeze", "first")
    keys = graph.node("Range", zero, stop, one)
    queries = graph.node("Unsqueeze", graph.node("Range", start, stop, one), graph.ints(1))
    visible = graph.node("LessOrEqual", keys, queries)
    if window:
        oldest = graph.node("Sub", queries, graph.ints(window))
        visible = graph.node("And", visible, graph.node("Greater", keys, oldest))
    return visible


def short_conv(op: ops.ShortConv) -> bytes:
    """Return L products of shifted rows, added up.

    Inputs besides the ports: `taps` [L, d], `bias` [d]. The output `next_state` may be the memory
    of `conv_state`, which is read into the rows first.
    """
    graph, back = GraphBuilder(), op.taps - 1
    x = graph.input("x", F32, ("m", max(op.width, op.columns)))
    graph.output("y", F32, ("m", op.d))
    taps = graph.input("taps", F32, (op.taps, op.d))
    parts = [graph.slice(x, s, s + op.d, axis=1) for s in range(0, op.columns, op.d)]
    u = graph.node("Mul", parts[0], parts[2]) if op.gated else parts[0]
    state = known_state(graph, "conv_state", (back, op.d))
    rows = graph.node("Concat", state, u, axis=0)  # [L - 1 + m, d]
    stop = np.iinfo(np.int64).max
    graph.output("next_state", F32, (back, op.d))
    kept = graph.slice(rows, -back, stop, axis=0)
    graph.node("Identity", kept, out="next_state")
    total = graph.input("bias", F32, (op.d,)) if op.bias else ""
    for j in range(op.taps):
        shifted = graph.slice(rows, j, j - back if j < back else stop, axis=0)
        product = graph.node("Mul", shifted, graph.slice(taps, j, j + 1, axis=0))
        total = graph.node("Add", product, total) if total else product
    if op.activation:
        total = activated(graph, op.activation, total)
    graph.node("Mul", total, parts[1], out="y") if op.gated else graph.node(
        "Identity", total, out="y"
    )
    return graph.model()


def known_state(graph: GraphBuilder, name: str, shape: tuple[int, ...]) -> str:
    """Return a state as a call begins with it: zeros at `position` 0."""
    state = graph.input(name, F32, shape)
    position = graph.input("position", np.int32, (1,))
    later = graph.node("Greater", position, graph.constant(np.zeros(1, np.int32)))
    return graph.node("Where", later, state, graph.scalar(0.0))


def gated_act(op: ops.GatedAct) -> bytes:
    """Return act(gate) · up."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", 2 * op.f))
    graph.output("y", F32, ("m", op.f))
    gate = graph.slice(x, 0, op.f, axis=1)
    up = graph.slice(x, op.f, 2 * op.f, axis=1)
    graph.node("Mul", activated(graph, op.activation, gate), up, out="y")
    return graph.model()


def sigmoid_gate(op: ops.SigmoidGate) -> bytes:
    """Return x · sigmoid(gates)."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.d))
    gates = graph.input("gates", F32, ("m", op.width))
    graph.output("y", F32, ("m", op.d))
    own = graph.slice(gates, op.first, op.first + op.d, axis=1)
    graph.node("Mul", x, graph.node("Sigmoid", own), out="y")
    return graph.model()


def gated_input(op: ops.GatedInput) -> bytes:
    """Return act(x) · (residual + inputs)."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.d))
    residual = graph.input("residual", F32, ("m", op.d))
    inputs = graph.input("inputs", F32, ("m", op.width))
    graph.output("y", F32, ("m", op.d))
    own = graph.slice(inputs, op.first, op.first + op.d, axis=1)
    total = graph.node("Add", residual, own)
    graph.node("Mul", activated(graph, op.activation, x), total, out="y")
    return graph.model()


def gated_add(op: ops.GatedAdd) -> bytes:
    """Return residual + sigmoid(gates · weight) · x; `weight` [d, 1] is an input."""
    graph = GraphBuilder()
    x, gates, residual = (graph.input(name, F32, ("m", op.d)) for name in op.ports[:3])
    graph.output("y", F32, ("m", op.d))
    gate = graph.node("MatMul", gates, graph.input("weight", F32, (op.d, 1)))
    shared = graph.node("Mul", x, graph.node("Sigmoid", gate))
    graph.node("Add", residual, shared, out="y")
    return graph.model()


def act(op: ops.Act) -> bytes:
    """Return act(x)."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.f))
    graph.output("y", F32, ("m", op.f))
    activated(graph, op.activation, x, "y")
    return graph.model()


def activated(graph: GraphBuilder, activation: Activation, x: str, out: str = "") -> str:
    """Return act(x)."""
    match activation:
        case "silu":
            return graph.node("QuickGelu", x, domain=CONTRIB, alpha=1.0, out=out)
        case "gelu":
            return graph.node("Gelu", x, domain=CONTRIB, out=out)
        case "gelu_tanh":
            return graph.node("FastGelu", x, domain=CONTRIB, out=out)
        case "relu":
            return graph.node("Relu", x, out=out)


def add_positions(op: ops.AddPositions) -> bytes:
    """Return x plus rows of the table. Inputs besides `x`: `first` int64 [1], `table` [rows, d]."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.d))
    graph.input("first", np.int64, (1,))
    graph.input("table", F32, (op.rows, op.d))
    graph.output("y", F32, ("m", op.d))
    zero, one = graph.constant(np.array(0, np.int64)), graph.constant(np.array(1, np.int64))
    count = graph.node("Squeeze", graph.node("Shape", x, start=0, end=1))
    places = graph.node("Add", graph.node("Range", zero, count, one), "first")
    places = graph.node(
        "Min", graph.node("Add", places, graph.ints(op.offset)), graph.ints(op.rows - 1)
    )
    graph.node("Add", x, graph.node("Gather", "table", places), out="y")
    return graph.model()


def add(op: ops.Add) -> bytes:
    """Return x + residual, times an input `weight` [1] if the sum is scaled."""
    graph = GraphBuilder()
    x = graph.input("x", F32, ("m", op.d))
    residual = graph.input("residual", F32, ("m", op.d))
    graph.output("y", F32, ("m", op.d))
    total = graph.node("Add", x, residual, out="" if op.scaled else "y")
    if op.scaled:
        graph.node("Mul", total, graph.input("weight", F32, (1,)), out="y")
    return graph.model()


def outliers(op: ops.Outliers) -> bytes:
    """Return residual + x[:, hot] · slab + excess(x) · (codes · scales).

    Inputs besides the ports: `hot` int32 [hot] and `slab` [hot, n]; `codes` int8 [k, n], `scales`
    [n] and `x_scale` [1]. Of the excess only features are multiplied that have any, in any token,
    and are not hot: codes of these are zero.
    """
    graph = GraphBuilder()
    hot = ""
    x = graph.input("x", F32, ("m", op.k))
    total = graph.input("residual", F32, ("m", op.n))
    graph.output("y", F32, ("m", op.n))
    parts = []
    if op.hot:
        hot = graph.input("hot", np.int32, (op.hot,))
        slab = graph.input("slab", F32, (op.hot, op.n))
        parts.append(graph.node("MatMul", graph.node("Gather", x, hot, axis=1), slab))
    if op.excess:
        parts.append(_excess_product(graph, op, x, hot))
    for part in parts[:-1]:
        total = graph.node("Add", total, part)
    graph.node("Add", total, parts[-1], out="y")
    return graph.model()


def _excess_product(graph: GraphBuilder, op: ops.Outliers, x: str, hot: str) -> str:
    codes = graph.input("codes", np.int8, (op.k, op.n))
    scales = graph.input("scales", F32, (op.n,))
    x_scale = graph.input("x_scale", F32, (1,))
    whole = graph.node("Round", graph.node("Div", x, x_scale))
    clipped = graph.node("Clip", whole, graph.scalar(-128.0), graph.scalar(127.0))
    beyond = graph.node("Sub", whole, clipped)
    most = graph.node("ReduceMax", graph.node("Abs", beyond), graph.ints(0), keepdims=0)
    if op.hot:
        none = graph.node("Mul", graph.node("Gather", most, hot), graph.scalar(0.0))
        most = graph.node("ScatterElements", most, hot, none)
    features = graph.node("Squeeze", graph.node("NonZero", most), graph.ints(0))
    some = graph.node("Mul", graph.node("Gather", beyond, features, axis=1), x_scale)
    rows = graph.cast(graph.node("Gather", codes, features, axis=0), F32)
    return graph.node("Mul", graph.node("MatMul", some, rows), scales)
