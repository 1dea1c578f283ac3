"""float64 numpy twins of the kernels, and tensors with fresh inputs and poisoned outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends import ops, rope_tables
from hetero.backends.kv_rows import CacheRows, random_rows
from hetero.backends.memory import Tensor, new_tensor
from hetero.backends.protocol import FIXED_PORTS, port_dtype, port_shape

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


def tensors_for(
    op: ops.Op, m: int, rng: np.random.Generator, *, position: int = 0, extra_rows: int = 0
) -> dict[str, Tensor]:
    """Random inputs, NaN in outputs and in cache rows that must not be read.

    Tensors start 3 rows into their buffers, and may have more rows than m.
    """
    made = {}
    for port in op.ports:
        shape = port_shape(op, port, m)
        fixed = port in FIXED_PORTS
        lead = 0 if fixed else 3
        whole = new_tensor(
            (shape[0] + lead + extra_rows * (not fixed), *shape[1:]), port_dtype(op, port)
        )
        tensor = whole if fixed else whole.rows(lead, whole.shape[0])
        if tensor.dtype.kind == "f":
            tensor.array[:] = rng.standard_normal(tensor.shape)
        if port in ("y", "sum", "out"):
            tensor.array[:] = np.nan
        if port in ("k_cache", "v_cache"):
            assert isinstance(op, ops.Attention)
            rows = CacheRows(tensor.array, op.kv, op.head_dim)
            random_rows(rows, position, rng, keys=port == "k_cache")
        if port == "position":
            tensor.array[:] = position
        if port == "tokens":
            assert isinstance(op, ops.Embed)
            tensor.array[:] = rng.integers(0, op.vocab, tensor.shape)
        made[port] = tensor
    return made


def expected(op: ops.Op, inputs: Arrays, weights: Mapping[str, Any], m: int) -> Arrays:
    """Outputs of `op` in float64 by port."""
    match op:
        case ops.Add():
            return {"y": _wide(inputs, "x", m) + _wide(inputs, "residual", m)}
        case ops.GatedAct():
            x = _wide(inputs, "x", m)
            return {"y": activation(op.activation, x[:, : op.f]) * x[:, op.f :]}
        case ops.GatedDelta():
            return _gated_delta(op, inputs, weights, m)
        case ops.ShortConv():
            return _short_conv(op, inputs, weights, m)
        case ops.RMSNorm() | ops.LayerNorm():
            return _norm(op, inputs, weights, m)
        case ops.Rope():
            return {"out": _rope(op, inputs, weights, m)}
        case ops.Attention():
            return attention(op, inputs, weights, m)
        case ops.Embed():
            table = weights["weight"].dequantize().astype(np.float64)
            return {"y": op.scale * table[inputs["tokens"][:m]]}
        case _:
            raise NotImplementedError(op)


def _short_conv(op: ops.ShortConv, inputs: Arrays, weights: Mapping[str, Any], m: int) -> Arrays:
    """Each feature correlated with its taps, after the rows of the state."""
    x, gate, d = _wide(inputs, "x", m), np.ones((m, op.d)), op.d
    if op.gated:
        x, gate = x[:, :d] * x[:, 2 * d : 3 * d], x[:, d : 2 * d]
    state = inputs["conv_state"].astype(np.float64) * (inputs["position"][0] > 0)
    rows = np.concatenate([state, x[:, :d]])
    taps = np.reshape(weights["taps"], (op.taps, d)).astype(np.float64)
    sums = np.stack([np.correlate(rows[:, i], taps[:, i], "valid") for i in range(d)], axis=1)
    sums = sums + weights.get("bias", 0)
    y = gate * (activation(op.activation, sums) if op.activation else sums)
    return {"y": y, "conv_state": rows[m:]}


def _gated_delta(op: ops.GatedDelta, inputs: Arrays, weights: Mapping[str, Any], m: int) -> Arrays:
    """Head by head and token by token, as the products of matrices I - beta k k^T."""
    x, gates, keys = _wide(inputs, "x", m), _wide(inputs, "gates", m), op.k_heads * op.k_dim
    z, b, a = np.split(gates[:, -op.values - 2 * op.v_heads :], [op.values, -op.v_heads], axis=1)
    y = np.zeros((m, op.v_heads, op.v_dim))
    states = inputs["delta_state"].astype(np.float64) * (inputs["position"][0] > 0)
    for head in range(op.v_heads):
        at, own = head % op.k_heads * op.k_dim, slice(head * op.v_dim, (head + 1) * op.v_dim)
        for t in range(m):
            q, k = x[t, at : at + op.k_dim], x[t, keys + at : keys + at + op.k_dim]
            q, k = q / np.sqrt(q @ q + 1e-6), k / np.sqrt(k @ k + 1e-6)
            beta = 1 / (1 + np.exp(-b[t, head]))
            steps = np.log1p(np.exp(a[t, head] + weights["dt_bias"][head]))
            kept = np.exp(weights["decay"][head] * steps) * states[head]
            erased = (np.eye(op.k_dim) - beta * np.outer(k, k)) @ kept
            states[head] = erased + beta * np.outer(k, x[t, 2 * keys :][own])
            y[t, head] = states[head].T @ q / np.sqrt(op.k_dim)
    normed = (rms_norm(y, op.eps) * weights["norm"]).reshape(m, -1)
    return {"y": normed * activation("silu", z), "delta_state": states}


def activation(name: str, x: Array) -> Array:
    """silu, gelu, gelu_tanh and relu."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    from scipy.special import erfc

    return 0.5 * x * erfc(-x / np.sqrt(2))


def attention(op: ops.Attention, inputs: Arrays, weights: Mapping[str, Any], m: int) -> Arrays:
    """The m × context scores in full."""
    sinks = weights.get("sinks", np.full(op.heads, -np.inf)).astype(np.float64)
    position = int(inputs["position"][0])
    heads = _wide(inputs, "qkv", m).reshape(m, -1, op.head_dim)
    new_k, new_v = heads[:, op.heads : op.heads + op.kv_heads], heads[:, op.heads + op.kv_heads :]
    caches = {"k_cache": inputs["k_cache"].copy(), "v_cache": inputs["v_cache"].copy()}
    end = position + m
    wide = []
    for cache, new in zip(caches.values(), (new_k, new_v), strict=True):
        if op.kv.coded:
            wide.append(codes_appended(op, cache, position, new.swapaxes(0, 1)))
        else:
            cache[:, position:end] = new.swapaxes(0, 1)  # rounded to its type
            wide.append(cache.astype(np.float64))
    k, v = wide
    at, key = position + np.arange(m)[:, None], np.arange(end)[None]
    seen = (key <= at) & ((key > at - op.window) if op.window else True)
    out = np.zeros((m, op.heads, op.head_dim))
    for head in range(op.heads):
        group = head * op.kv_heads // op.heads
        scores = heads[:, head] @ k[group, :end].T * op.softmax_scale
        scores = op.softcap * np.tanh(scores / op.softcap) if op.softcap else scores
        scores = np.where(seen, scores, -np.inf)
        top = np.maximum(scores.max(axis=1, keepdims=True), sinks[head])
        weight = np.exp(scores - top)
        total = weight.sum(axis=1, keepdims=True) + np.exp(sinks[head] - top)
        out[:, head] = weight / total @ v[group, :end]
    return {"out": out.reshape(m, -1), **caches}


def codes_appended(op: ops.Attention, cache: Array, position: int, new: Array) -> Array:
    """What a cache of codes holds, once `new` tokens are in it: token by token, value by value."""
    size, capacity = op.head_dim, op.capacity
    found = np.full((op.kv_heads, capacity, size), np.nan)
    for g in range(op.kv_heads):
        channels = cache[g, capacity:].tobytes()[: 4 * size]
        scales = np.frombuffer(channels, np.float32)
        for t, values in enumerate(new[g].astype(np.float32)):
            scaled = values / scales
            most = np.abs(scaled).max()
            half = np.float16(most)
            amplitude = np.float32(half if half >= most else np.nextafter(half, np.float16(np.inf)))
            codes = ((scaled / (amplitude or np.float32(1)) + np.float32(1)) * 128).astype(int)
            row = cache[g, position + t]
            row[:size] = np.minimum(codes, 255) - 128
            row[-4:] = np.frombuffer((amplitude / np.float32(128)).tobytes(), np.int8)
        for t in range(position + new.shape[1]):
            step = np.frombuffer(cache[g, t, -4:].tobytes(), np.float32)[0]
            found[g, t] = (cache[g, t, :size] + 0.5) * step.astype(np.float64) * scales
    return found


def relative_error(got: Array, want: Array) -> float:
    """Largest difference over the largest wanted magnitude; NaN in `got` is infinite."""
    same = np.isnan(got) & np.isnan(want)
    difference = np.abs(np.where(same, 0, got - want))
    return float(np.nan_to_num(difference, nan=np.inf).max() / np.nanmax(np.abs(want)))


def _norm(
    op: ops.RMSNorm | ops.LayerNorm, inputs: Arrays, weights: Mapping[str, Array], m: int
) -> Arrays:
    x = _wide(inputs, "x", m)
    outputs = {}
    if op.add:
        x = outputs["sum"] = x + _wide(inputs, "residual", m)
    if isinstance(op, ops.RMSNorm):
        return {**outputs, "y": rms_norm(x, op.eps) * weights["weight"]}
    centred = x - x.mean(axis=-1, keepdims=True)
    return {**outputs, "y": rms_norm(centred, op.eps) * weights["weight"] + weights["bias"]}


def rms_norm(x: Array, eps: float) -> Array:
    """Rows divided by their root mean square."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def _rope(op: ops.Rope, inputs: Arrays, weights: Mapping[str, Array], m: int) -> Array:
    position = int(inputs["position"][0])
    x = _wide(inputs, "qkv", m).reshape(m, -1, op.head_dim)
    if op.qk_norm_eps is not None:
        last = op.heads + op.kv_heads
        x[:, : op.heads] = rms_norm(x[:, : op.heads], op.qk_norm_eps) * weights["q_norm"]
        x[:, op.heads : last] = rms_norm(x[:, op.heads : last], op.qk_norm_eps) * weights["k_norm"]
    cosines, sines = (table[position : position + m, None] for table in rope_tables.tables(op))
    half = op.rotated // 2
    out = x.copy()
    turned = x[:, : op.heads + op.kv_heads]
    low, high = turned[..., :half], turned[..., half : op.rotated]
    out[:, : op.heads + op.kv_heads, :half] = low * cosines - high * sines
    out[:, : op.heads + op.kv_heads, half : op.rotated] = high * cosines + low * sines
    return out.reshape(m, -1)


def _wide(inputs: Arrays, port: str, m: int) -> Array:
    return inputs[port][:m].astype(np.float64)
