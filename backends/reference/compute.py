"""Every operation in numpy float64: what each backend's result is compared with.

`program(op, weights)` gives a function that takes the tensors of one call as arrays, cut to m
tokens, and writes its outputs. Inputs are widened to float64, outputs are rounded once.

Notation (`hetero.backends.ops`): m tokens, n rows, k features, H query heads, G key/value heads,
D head size, C cache capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends import checks, ops, rope_tables
from hetero.backends.checks import packed, vector
from hetero.backends.formats import GROUP_SIZE, INT8_STATIC, activations_of
from hetero.backends.kv_codes import heads_of, write_heads
from hetero.backends.kv_rows import CacheRows
from hetero.backends.ops import Activation, Op, describe, weight_names
from hetero.backends.protocol import CACHE_PORTS, WeightValue
from hetero.backends.weights import PackedWeight, padded

Array: TypeAlias = npt.NDArray[Any]
Float64Array: TypeAlias = npt.NDArray[np.float64]
Arrays: TypeAlias = Mapping[str, Array]
Weights: TypeAlias = Mapping[str, WeightValue]
Program: TypeAlias = Callable[[Arrays], None]


def program(op: Op, weights: Weights) -> tuple[Program, int]:  # noqa: PLR0911, PLR0912
    """Return the function that computes `op`, and the bytes of weights that it holds."""
    match op:
        case ops.MatMul():
            return matmul(op, packed(weights), weights)
        case ops.Embed():
            return embed(op, packed(weights))
        case ops.RMSNorm() | ops.LayerNorm():
            return norm(op, _wide(weights))
        case ops.Rope():
            return rotate(op, _wide(weights))
        case ops.Attention():
            return partial(attention, op, sinks=_wide(weights).get("sinks")), 0
        case ops.AttentionHeads():
            return partial(attention_heads, op, sinks=_wide(weights).get("sinks")), 0
        case ops.SumScores():
            return partial(sum_scores, op), 0
        case ops.DecodeChunks():
            return decode_chunks(op, vector(weights, "channels"))
        case ops.GatedDelta():
            return gated_delta(op, _wide(weights))
        case ops.ShortConv():
            return short_conv(op, _wide(weights))
        case ops.GatedAct():
            return partial(gated_act, op), 0
        case ops.SigmoidGate():
            return partial(sigmoid_gate, op), 0
        case ops.GatedInput():
            return partial(gated_input, op), 0
        case ops.Act():
            return partial(act, op), 0
        case ops.AddPositions():
            return add_positions(op, _wide(weights)["table"])
        case ops.Add():
            return partial(add, float(vector(weights, "weight")[0]) if op.scaled else 1.0), 0
        case ops.GatedAdd():
            return partial(gated_add, _wide(weights)["weight"]), 0
        case ops.Outliers():
            return outliers(op, weights)
        case ops.Router():
            return partial(route, op, _wide(weights)), 0
        case ops.Experts():
            return experts(op, weights)


def matmul(op: ops.MatMul, weight: PackedWeight, weights: Weights) -> tuple[Program, int]:
    """Return x · Wᵀ + bias. Formats of integers round the activations."""
    activations, bias = op.weight_format.activations, _wide(weights).get("bias")
    if activations == INT8_STATIC and weight.storage.scales == "row":
        return _static_matmul(op, weight, vector(weights, "x_scale"), bias)
    if activations.static or activations.granularity not in (None, "group"):
        raise ValueError(f"the reference does not round activations as {op.weight_format} asks")
    parts = [
        (np.ascontiguousarray(part.dequantize().T, dtype=np.float64), _rounds(op, part))  # [k, n]
        for _, part in weight.spans()
    ]

    def run(arrays: Arrays) -> None:
        x = arrays["x"]
        seen = {False: x.astype(np.float64)}
        if any(rounds for _, rounds in parts):
            seen[True] = quantized_activations(x, activations.largest)
        product = np.concatenate([seen[rounds] @ part for part, rounds in parts], axis=1)
        arrays["y"][:] = softcapped(product if bias is None else product + bias, op.softcap)

    return run, sum(part.nbytes for part, _ in parts)


def _rounds(op: ops.MatMul, part: PackedWeight) -> bool:
    """Return whether a part meets rounded activations."""
    activations = op.weight_format.activations
    if op.weight_format.of_file:
        activations = activations_of(activations, part.storage)
    return not activations.are_floats


def _static_matmul(
    op: ops.MatMul, weight: PackedWeight, x_scale: Array, bias: Float64Array | None
) -> tuple[Program, int]:
    """Sum integers without an error (in float64: k · 2¹⁴ is far below 2⁵³), then scale.

    The sum is rounded to float32 and multiplied with x_scale · scale, rounded to float32 as well,
    so that kernels which do the same give the same bits.
    """
    assert weight.scales is not None
    transposed = np.ascontiguousarray(weight.codes().T, dtype=np.float64)  # [k, n]
    scales = x_scale * weight.scales.reshape(-1)[: op.n]

    def run(arrays: Arrays) -> None:
        sums = static_codes(arrays["x"], x_scale[0]).astype(np.float64) @ transposed
        product = (sums.astype(np.float32) * scales).astype(np.float64)
        arrays["y"][:] = softcapped(product if bias is None else product + bias, op.softcap)

    return run, transposed.nbytes


def static_codes(x: Array, scale: float | np.float32) -> npt.NDArray[np.int8]:
    """Return activations as int8 codes of one scale: rint(x / scale) in float32, -128 to 127."""
    codes = np.rint(x.astype(np.float32) / np.float32(scale))
    rounded: npt.NDArray[np.int8] = codes.clip(-128, 127).astype(np.int8)
    return rounded


def softcapped(x: Float64Array, cap: float) -> Float64Array:
    """Return cap · tanh(x / cap); x itself without a cap (0)."""
    return cap * np.tanh(x / cap) if cap > 0 else x


def quantized_activations(x: Array, largest: int = 127) -> Float64Array:
    """Return x [m, k] as the `a8` formats see it.

    Int8 codes times one scale per token and block of 32.

    The scale is max|x| / `largest`, the largest code, and stays float32, as in ONNX Runtime's
    accuracy level 4 (MLAS `QuantizeARow_CompInt8`); llama.cpp's Q8_0 computes the same one and then
    stores it as fp16, which moves a block by up to 2⁻¹¹. Codes are rounded to nearest.
    """
    m, k = x.shape
    full = np.zeros((m, padded(k, GROUP_SIZE)), dtype=np.float32)
    full[:, :k] = x
    blocks = full.reshape(m, -1, GROUP_SIZE)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(largest)
    inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.rint(blocks * inverse)
    rounded: Float64Array = codes.astype(np.float64) * scales
    return rounded.reshape(m, -1)[:, :k]


def embed(op: ops.Embed, weight: PackedWeight) -> tuple[Program, int]:
    """Return the rows of the table, scaled."""
    table = weight.dequantize()

    def run(arrays: Arrays) -> None:
        arrays["y"][:] = op.scale * table[arrays["tokens"]].astype(np.float64)

    return run, table.nbytes


def norm(
    op: ops.RMSNorm | ops.LayerNorm, weights: Mapping[str, Float64Array]
) -> tuple[Program, int]:
    """Return RMSNorm or LayerNorm over the features, with the optional addition before it."""

    def run(arrays: Arrays) -> None:
        x = arrays["x"].astype(np.float64)
        if op.add:
            x = x + arrays["residual"]
            arrays["sum"][:] = x
        if isinstance(op, ops.LayerNorm):
            x = x - x.mean(axis=-1, keepdims=True)
            arrays["y"][:] = rms_normalized(x, op.eps) * weights["weight"] + weights["bias"]
        else:
            arrays["y"][:] = rms_normalized(x, op.eps) * weights["weight"]

    return run, sum(weight.nbytes for weight in weights.values())


def rms_normalized(x: Float64Array, eps: float) -> Float64Array:
    """Return x / sqrt(mean(x²) + eps) over the last axis."""
    normalized: Float64Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return normalized


def rotate(op: ops.Rope, weights: Mapping[str, Float64Array]) -> tuple[Program, int]:
    """Compute norms of queries and keys, before or after "rotate half" of `rotated` dimensions."""
    cos, sin = rope_tables.tables(op)  # [max_position, rotated / 2]
    query_scale = rope_tables.query_scale(op)
    half = op.rotated // 2
    queries = slice(0, op.heads)
    keys = slice(op.heads, op.heads + op.kv_heads)

    def run(arrays: Arrays) -> None:
        qkv = arrays["qkv"].astype(np.float64)
        if op.gated:
            qkv = np.delete(qkv, np.s_[op.gates : 2 * op.gates], axis=1)
        m = len(qkv)
        heads = qkv.reshape(m, -1, op.head_dim)  # [m, H + 2G, D]

        def norm() -> None:
            assert op.qk_norm_eps is not None
            for part, name in zip((queries, keys), weight_names(op), strict=False):
                shape = (m, -1, op.norm_width(name))
                normed = rms_normalized(heads[:, part].reshape(shape), op.qk_norm_eps)
                heads[:, part] = (normed * weights[name]).reshape(m, -1, op.head_dim)

        if op.qk_norm_eps is not None and not op.qk_norm_after:
            norm()
        first = _first_position(arrays, op, m, op.max_position)
        c, s = cos[first : first + m, None], sin[first : first + m, None]  # [m, 1, rotated / 2]
        turned = heads[:, : keys.stop]
        low, high = turned[..., :half].copy(), turned[..., half : 2 * half].copy()
        turned[..., :half] = low * c - high * s
        turned[..., half : 2 * half] = high * c + low * s
        if op.qk_norm_eps is not None and op.qk_norm_after:
            norm()
        heads[:, queries] *= query_scale[first : first + m, None, None]
        if op.v_norm_eps is not None:
            heads[:, keys.stop :] = rms_normalized(heads[:, keys.stop :], op.v_norm_eps)
        arrays["out"][:] = qkv

    return run, cos.nbytes + sin.nbytes


def attention(op: ops.Attention, arrays: Arrays, sinks: Float64Array | None = None) -> None:
    """Append keys and values, then grouped-query causal attention over the cache."""
    m = len(arrays["qkv"])
    heads = arrays["qkv"].reshape(m, -1, op.head_dim).transpose(1, 0, 2)  # [H + 2G, m, D]
    first = _first_position(arrays, op, m, op.capacity)
    end = first + m
    k_rows, v_rows = (CacheRows(arrays[port], op.kv, op.head_dim) for port in CACHE_PORTS)
    if not op.reads:
        k_rows.write(first, heads[op.heads : op.heads + op.kv_heads])
        v_rows.write(first, heads[op.heads + op.kv_heads :])
    keys, values = (rows.read(0, end).astype(np.float64) for rows in (k_rows, v_rows))
    query, key = np.arange(first, end)[:, None], np.arange(end)[None, :]
    visible = key <= query
    if op.window > 0:
        visible &= key > query - op.window
    group = op.heads // op.kv_heads
    for g in range(op.kv_heads):
        q = heads[g * group : (g + 1) * group].astype(np.float64)  # [H/G, m, D]
        scores = softcapped(q @ keys[g].T * op.softmax_scale, op.softcap)
        scores = np.where(visible, scores, -np.inf)  # [H/G, m, end]
        if sinks is not None:
            own = sinks[g * group : (g + 1) * group, None, None]  # [H/G, 1, 1]
            scores = np.concatenate([scores, np.broadcast_to(own, (group, m, 1))], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = weights[..., :end] @ values[g]  # [H/G, m, D]
        columns = slice(g * group * op.head_dim, (g + 1) * group * op.head_dim)
        arrays["out"][:, columns] = mixed.transpose(1, 0, 2).reshape(m, -1)


def attention_heads(
    op: ops.AttentionHeads, arrays: Arrays, sinks: Float64Array | None = None
) -> None:
    """Compute attention of these heads alone, on their part of every tensor."""
    of, (start, stop) = op.attention, op.columns
    keys = (of.heads + op.first) * of.head_dim
    values = keys + of.kv_heads * of.head_dim
    width, qkv = op.count * of.head_dim, arrays["qkv"]
    own = [qkv[:, start:stop]]
    own += [] if of.reads else [qkv[:, x : x + width] for x in (keys, values)]
    caches = {port: arrays[port][op.first : op.first + op.count] for port in ("k_cache", "v_cache")}
    out = arrays["out"][:, start:stop]
    mine = {"qkv": np.concatenate(own, axis=1), "out": out, "position": arrays["position"]}
    attention(op.alone, mine | caches, None if sinks is None else sinks[op.queries])


def sum_scores(op: ops.SumScores, arrays: Arrays) -> None:
    """Compute the sums row by row."""
    of, m = op.attention, len(arrays["qkv"])
    first = _first_position(arrays, op, m, of.capacity)
    group = of.heads // of.kv_heads
    rows = CacheRows(arrays["k_cache"], of.kv, of.head_dim)
    for t in (t for t in range(m) if (first + t + 1) % op.every == 0):
        stop = first + t + 1
        low = max(0, stop - of.window) if of.window > 0 else 0
        queries = arrays["qkv"][t].astype(np.float64).reshape(-1, of.head_dim)
        keys = rows.read(low, stop).astype(np.float64)
        for g in range(of.kv_heads):
            scores = queries[g * group : (g + 1) * group] @ keys[g].T * of.softmax_scale
            scores = softcapped(scores, of.softcap)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            given = weights / weights.sum(axis=-1, keepdims=True) / of.heads
            arrays["score_sums"][g, low:stop] += given.sum(axis=0)


def decode_chunks(op: ops.DecodeChunks, channels: Array) -> tuple[Program, int]:
    """Return value by value as the record says, in float32.

    Codes, scales and products have one rounding, so that every kernel gives the same bits.
    """
    every = channels.reshape(op.kv_heads, 1, op.head_dim)

    def run(arrays: Arrays) -> None:
        for first, bits, start, mask in arrays["table"].tolist():
            if not bits:
                continue
            heads = heads_of(op, mask)
            by_channel, shape = every[heads], (2, len(heads), op.tokens, op.head_dim)
            part = arrays["codes"][start : start + op.chunk_bytes(bits, len(heads))]
            caches = [CacheRows(arrays[port], op.kv, op.head_dim) for port in CACHE_PORTS]
            if bits == 16:
                values_of = (
                    np.frombuffer(part.tobytes(), np.float16).astype(np.float32).reshape(shape)
                )
            else:
                codes, scale = _codes(op, part, bits, len(heads))
                if bits == 8 and op.kv.coded and np.array_equal(caches[0].channels, every[:, 0]):
                    for rows, values, steps in zip(caches, codes, scale, strict=True):
                        stop = first + op.tokens
                        rows.codes[heads, first:stop] = values.astype(np.int16) - 128
                        rows.steps[heads, first:stop] = steps[..., :1]
                    continue
                scale[0] *= by_channel
                centre = np.array([0.5 - 2.0 ** (x - 1) for x in _each(bits)], np.float32)
                values_of = (codes + centre.reshape(2, 1, 1, 1)) * scale
            for rows, values in zip(caches, values_of, strict=True):
                write_heads(rows, heads, first, values)

    return run, channels.nbytes


def _each(bits: int) -> tuple[int, int]:
    """Return the bits of keys and of values."""
    return {3: (4, 2), 6: (8, 4)}.get(bits, (bits, bits))


def _codes(op: ops.DecodeChunks, part: Array, bits: int, heads: int) -> tuple[Array, Array]:
    """Return codes and their scales, float32 [2, heads, T, D], of a chunk's bytes.

    Scales of keys are without the channels'.
    """
    rows, values = op.amplitude_rows, 2 * heads * op.tokens * op.head_dim
    split, quarter = 2 * heads * sum(rows), values // 4
    at = np.arange(values)
    codes = (part[split + at // 4] >> (2 * (at % 4))) & 3
    of_keys = at[: values // 2]
    more = at if bits > 3 else of_keys[: len(of_keys) * (bits > 2)]
    middle = (part[split + quarter + more // 4] >> (2 * (more % 4))) & 3
    codes[: len(more)] = codes[: len(more)] << 2 | middle
    more = at if bits > 6 else of_keys[: len(of_keys) * (bits > 4)]
    lower = (part[split + 2 * quarter + more // 2] >> (4 * (more % 2))) & 15
    codes[: len(more)] = codes[: len(more)] << 4 | lower
    amplitudes = np.frombuffer(part[:split].tobytes(), np.float16).astype(np.float32)
    scale = np.empty((2, heads, op.tokens, op.head_dim), np.float32)
    scale[0] = amplitudes[: heads * rows[0]].reshape(heads, rows[0], 1)
    scale[1] = amplitudes[heads * rows[0] :].reshape(heads, rows[1], 1)
    for kind, own in enumerate(_each(bits)):
        scale[kind] *= np.float32(2.0 ** (1 - own))
    return codes.astype(np.float32).reshape(scale.shape), scale


def short_conv(op: ops.ShortConv, weights: Mapping[str, Float64Array]) -> tuple[Program, int]:
    """Return the convolution over the state's rows and the call's."""
    taps, d, back = weights["taps"].reshape(op.taps, op.d), op.d, op.taps - 1

    def run(arrays: Arrays) -> None:
        x, gate = arrays["x"][:, : op.columns].astype(np.float64), np.ones(d)
        m = len(x)
        if op.gated:
            x, gate = x[:, :d] * x[:, 2 * d :], x[:, d : 2 * d]
        rows = np.concatenate([known_state(arrays, "conv_state"), x])  # [L - 1 + m, d]
        arrays["conv_state"][:] = rows[m:]
        sums = weights.get("bias", 0.0) + sum(taps[j] * rows[j : j + m] for j in range(back + 1))
        arrays["y"][:] = gate * (activate(op.activation, sums) if op.activation else sums)

    return run, sum(weight.nbytes for weight in weights.values())


def gated_delta(op: ops.GatedDelta, weights: Mapping[str, Float64Array]) -> tuple[Program, int]:
    """Return the recurrence, token by token."""
    keys, group = op.k_heads * op.k_dim, op.v_heads // op.k_heads

    def run(arrays: Arrays) -> None:
        x, gates = arrays["x"].astype(np.float64), arrays["gates"].astype(np.float64)
        m = len(x)
        heads = x[:, : 2 * keys].reshape(m, 2, op.k_heads, op.k_dim)
        heads = heads / np.sqrt((heads**2).sum(axis=-1, keepdims=True) + ops.L2_EPS)
        q, k = (np.tile(heads[:, i], (1, group, 1)) for i in range(2))  # [m, v_heads, dk]
        q = q / math.sqrt(op.k_dim)
        v = x[:, 2 * keys :].reshape(m, op.v_heads, op.v_dim)
        z, b, a = np.split(gates[:, -op.values - 2 * op.v_heads :], [op.values, -op.v_heads], 1)
        beta = 0.5 * (1.0 + np.tanh(0.5 * b))
        kept = np.exp(weights["decay"] * np.logaddexp(0.0, a + weights["dt_bias"]))
        state, out = known_state(arrays, "delta_state"), np.empty(v.shape)
        for t in range(m):
            state *= kept[t][:, None, None]
            u = beta[t][:, None] * (v[t] - np.einsum("hij,hi->hj", state, k[t]))
            state += k[t][:, :, None] * u[:, None, :]
            out[t] = np.einsum("hij,hi->hj", state, q[t])
        arrays["delta_state"][:] = state
        normed = rms_normalized(out, op.eps) * weights["norm"]
        arrays["y"][:] = normed.reshape(m, -1) * activate("silu", z)

    return run, sum(weight.nbytes for weight in weights.values())


def known_state(arrays: Arrays, port: str) -> Float64Array:
    """Return what the tokens before a call left in a state: zeros at position 0."""
    if arrays["position"][0] == 0:
        return np.zeros(arrays[port].shape)
    state: Float64Array = arrays[port].astype(np.float64)
    return state


def gated_act(op: ops.GatedAct, arrays: Arrays) -> None:
    """Compute act(gate) · up."""
    x = arrays["x"].astype(np.float64)
    arrays["y"][:] = activate(op.activation, x[:, : op.f]) * x[:, op.f :]


def gated_add(weight: Float64Array, arrays: Arrays) -> None:
    """Add what is gated to the residual."""
    x, gates, residual = (arrays[port].astype(np.float64) for port in ("x", "gates", "residual"))
    share = 1 / (1 + np.exp(-(gates @ weight)))
    arrays["y"][:] = residual + share[:, None] * x


def sigmoid_gate(op: ops.SigmoidGate, arrays: Arrays) -> None:
    """Compute x · sigmoid(gates)."""
    gates = arrays["gates"][:, op.first : op.first + op.d].astype(np.float64)
    arrays["y"][:] = arrays["x"] * (0.5 * (1.0 + np.tanh(0.5 * gates)))


def gated_input(op: ops.GatedInput, arrays: Arrays) -> None:
    """Compute act(x) · (residual + inputs)."""
    own = arrays["inputs"][:, op.first : op.first + op.d].astype(np.float64)
    arrays["y"][:] = activate(op.activation, arrays["x"].astype(np.float64)) * (
        arrays["residual"] + own
    )


def act(op: ops.Act, arrays: Arrays) -> None:
    """Compute act(x)."""
    arrays["y"][:] = activate(op.activation, arrays["x"].astype(np.float64))


def add_positions(op: ops.AddPositions, table: Float64Array) -> tuple[Program, int]:
    """Return x + rows of the table."""
    rows = table.reshape(op.rows, op.d)

    def run(arrays: Arrays) -> None:
        x = arrays["x"]
        at = int(arrays["position"][0]) + op.offset + np.arange(len(x))
        arrays["y"][:] = x.astype(np.float64) + rows[np.minimum(at, op.rows - 1)]

    return run, table.nbytes


def activate(activation: Activation, x: Float64Array) -> Float64Array:
    """Return the activation of x.

    silu is x·σ(x), gelu x·Φ(x), gelu_tanh its tanh approximation (Hendrycks and Gimpel 2016), relu
    max(x, 0).
    """
    match activation:
        case "silu":
            return x * _sigmoid(x)
        case "gelu":
            return x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))
        case "gelu_tanh":
            return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
        case "relu":
            return np.maximum(x, 0.0)


def outliers(op: ops.Outliers, weights: Weights) -> tuple[Program, int]:
    """Return residual + x[:, hot] · W_hotᵀ + excess(x) · Wᵀ."""
    parts: list[Callable[[Array], Float64Array]] = []
    nbytes = 0
    if op.hot:
        hot, columns = checks.slab(weights)
        slab = columns.dequantize().astype(np.float64).T
        nbytes += slab.nbytes
        parts.append(lambda x: x[:, hot].astype(np.float64) @ slab)
    if op.excess:
        dense = packed(weights).dequantize().astype(np.float64).T
        if op.hot:
            dense[hot] = 0
        scale = vector(weights, "x_scale")[0]
        nbytes += dense.nbytes
        parts.append(lambda x: excess(x, scale) @ dense)

    def run(arrays: Arrays) -> None:
        x = arrays["x"]
        arrays["y"][:] = arrays["residual"] + sum(part(x) for part in parts)

    return run, nbytes


def excess(x: Array, scale: float | np.float32) -> Float64Array:
    """Return what of the activations is beyond the codes of `static_codes`."""
    whole = np.rint(x.astype(np.float32) / np.float32(scale)).astype(np.float64)
    beyond: Float64Array = (whole - whole.clip(-128, 127)) * np.float64(scale)
    return beyond


def add(scale: float, arrays: Arrays) -> None:
    """Compute (x + residual) · scale."""
    arrays["y"][:] = (arrays["x"].astype(np.float64) + arrays["residual"]) * scale


def route(op: ops.Router, weights: Mapping[str, Float64Array], arrays: Arrays) -> None:
    """Choose experts and weigh them."""
    logits = arrays["x"].astype(np.float64) @ weights["router"].reshape(op.experts, op.d).T
    logits = logits + weights.get("router_bias", 0.0)
    scores = _sigmoid(logits) if op.scores == "sigmoid" else logits
    if op.scores == "softmax":
        scores = softmax(logits)
    preferred = scores + weights.get("choice_bias", 0.0)
    chosen = np.argsort(-preferred, axis=-1, kind="stable")[:, : op.chosen]
    weighed = np.take_along_axis(scores, chosen, axis=-1)
    if op.scores == "softmax_chosen":
        weighed = softmax(weighed)
    elif op.renormalised:
        weighed = weighed / (weighed.sum(axis=-1, keepdims=True) + op.eps)
    weighed = weighed * op.scale
    if op.expert_scale:
        weighed = weighed * weights["expert_scale"][chosen]
    arrays["y"][:] = np.concatenate([chosen, weighed], axis=-1)


def softmax(x: Float64Array) -> Float64Array:
    """Return the softmax over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Float64Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def experts(op: ops.Experts, weights: Weights) -> tuple[Program, int]:
    """Compute expert by expert, each for the tokens that chose it."""
    products = {
        name: {
            e: matmul(of, packed(own), own)[0]
            for e, own in zip(op.own, checks.expert_weights(op, name, weights), strict=True)
        }
        for name, of in op.matmuls.items()
    }

    def product(name: str, e: int, x: Array) -> Float64Array:
        y = np.empty((len(x), op.matmuls[name].n))
        products[name][e]({"x": x, "y": y})
        return y

    def run(arrays: Arrays) -> None:
        x, y = arrays["x"], np.zeros(arrays["x"].shape)
        chosen = arrays["routes"][:, : op.chosen].astype(np.int64)
        shares = arrays["routes"][:, op.chosen :].astype(np.float64)
        for e in sorted({*np.unique(chosen).tolist()} & {*op.own}):
            tokens, places = np.nonzero(chosen == e)
            gate, up = (product(name, e, x[tokens]) for name in ("experts_gate", "experts_up"))
            hidden = expert_activation(op.activation, gate, up)
            y[tokens] += shares[tokens, places, None] * product("experts_down", e, hidden)
        arrays["y"][:] = y

    return run, 8 * len(op.own) * sum(x.n * x.k for x in op.matmuls.values())


def expert_activation(
    activation: ops.ExpertActivation, gate: Float64Array, up: Float64Array
) -> Float64Array:
    """Return act(gate) · up."""
    if activation != "swiglu_oai":
        return activate(activation, gate) * up
    gate, up = gate.clip(max=ops.SWIGLU_LIMIT), up.clip(-ops.SWIGLU_LIMIT, ops.SWIGLU_LIMIT)
    return (up + 1.0) * gate * _sigmoid(ops.SWIGLU_ALPHA * gate)


def _sigmoid(x: Float64Array) -> Float64Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # without overflow


_erf: Callable[[Float64Array], Float64Array] = np.vectorize(math.erf, otypes=[np.float64])


def _wide(weights: Weights) -> dict[str, Float64Array]:
    """Return the one-dimensional weights as float64."""
    names = [name for name, value in weights.items() if not isinstance(value, PackedWeight)]
    return {name: vector(weights, name).astype(np.float64) for name in names}


def _first_position(arrays: Arrays, op: Op, m: int, limit: int) -> int:
    return checks.first_position("reference", describe(op), arrays["position"], m, limit)
