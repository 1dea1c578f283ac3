"""Attention: append to the caches, then causal grouped-query attention by blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyopencl as cl

from hetero.backends.checks import vector
from hetero.backends.formats import CacheFormat
from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import Argument, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.tuning import Tuning
from hetero.backends.ops import Attention, AttentionHeads
from hetero.backends.protocol import Operand, WeightValue, tensors_of

FEW_TOKENS = 8  # up to here packing the keys of the whole context costs more than it saves
SPLIT_TOKENS = 4  # up to here a GPU's work-groups share the context, too
CACHE_DEFINES: Final[dict[CacheFormat, dict[str, int]]] = {
    CacheFormat.F32: {},
    CacheFormat.F16: {"CACHE_HALF": 1},
    CacheFormat.Q8: {"CACHE_CODES": 1},
}
BUSY_AT_LEAST = 0.8  # of the workers' time, or contexts are split
MAX_SPLITS = 16
GROUP_ROWS = 4  # rows of a work-group of the GPU kernel: private sums of HEAD_DIM / lanes each


def prepare_attention(
    device: Resources, op: Attention, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Compile for the record's heads; its capacity and window are arguments."""
    return prepare_attention_heads(
        device, AttentionHeads(attention=op, first=0, count=op.kv_heads), weights, op
    )


def prepare_attention_heads(
    device: Resources,
    heads: AttentionHeads,
    weights: Mapping[str, WeightValue],
    whole: Attention | None = None,
) -> OpenCLKernel:
    """Prepare the program of all heads, launched for some.

    The program is that of the operation `whole`.
    """
    op, sinks = heads.attention, _sinks(device, weights)
    if device.tuning.lanes > 1:
        return _prepare_group(device, heads, whole, sinks)
    parts = splits(heads.count, device.threads)
    program = device.programs.get(
        "attention_cpu.cl",
        attention_defines(device.tuning, op) | {"MAX_PARTS": MAX_SPLITS},
        before=("caches.cl", *caps(op), "scores_cpu.cl"),
    )

    def launches(operands: Mapping[str, Operand], m: int) -> Sequence[KernelLaunch]:
        tensors = tensors_of(operands)
        if m <= FEW_TOKENS:
            return _attend_few(device, program, heads, tensors, m, parts, sinks)
        return _attend_tiles(device, program, heads, tensors, m, sinks)

    return OpenCLKernel(device, whole or heads, launches, keep=sinks)


def _sinks(device: Resources, weights: Mapping[str, WeightValue]) -> tuple[cl.Buffer, ...]:
    """Return the sinks of all query heads, as scores are: in base 2; none without."""
    if "sinks" not in weights:
        return ()
    return (device.constant(vector(weights, "sinks") * np.float32(math.log2(math.e))),)


def splits(heads: int, workers: int) -> int:
    """Return the parts of the context in decode.

    There are as many as give each worker the same number of parts of heads, where whole heads would
    leave some idle for a fifth of the time or more.
    """
    rounds = -(-heads // workers)
    if heads >= BUSY_AT_LEAST * rounds * workers:
        return 1
    return min(workers // math.gcd(heads, workers), MAX_SPLITS)


def _attend_few(
    device: Resources,
    program: cl.Program,
    heads: AttentionHeads,
    tensors: Mapping[str, Tensor],
    m: int,
    parts: int,
    sinks: tuple[cl.Buffer, ...],
) -> list[KernelLaunch]:
    op = heads.attention
    qkv, position, k_cache, v_cache, out = (tensors[port] for port in op.ports)
    partial = device.map(out.buffer)  # not touched where there is one part
    if parts > 1:
        partial = device.shared_scratch(4 * parts * m * op.heads * (op.head_dim + 2))
    rest: tuple[Argument, ...] = (heads.first, partial, parts, *lengths(op), *sinks)
    args: tuple[Argument, ...] = (m, qkv, position, k_cache, v_cache, out, *rest)
    launches = [KernelLaunch(program, "attend_few", (heads.count, parts), (1, 1), args)]
    if parts > 1:
        combined = (m, partial, out, heads.first, parts)
        launches.append(KernelLaunch(program, "combine_few", (heads.count,), (1,), combined))
    return launches


def head_vector(head_dim: int, widest: int) -> int:
    """Return the widest vector that divides a head."""
    return next(width for width in (16, 8, 4, 2, 1) if width <= widest and head_dim % width == 0)


def lengths(op: Attention) -> tuple[int, int]:
    """Return the last arguments of most kernels.

    How many tokens a head of the caches has room for, and the window. They are no part of programs,
    which take seconds to compile.
    """
    return op.capacity, op.window


def caps(op: Attention) -> tuple[str, ...]:
    """Return what scores that have a soft cap need."""
    return ("activations.cl",) if op.softcap else ()


def attention_defines(tuning: Tuning, op: Attention) -> dict[str, Define]:
    """Return what the kernels of attention want to know."""
    shape: dict[str, Define] = {
        **tuning.defines,
        "HV": head_vector(op.head_dim, tuning.vector),
        "HEADS": op.heads,
        "KV_HEADS": op.kv_heads,
        "HEAD_DIM": op.head_dim,
        "SCALE": op.softmax_scale * math.log2(math.e),
    }
    shape |= CACHE_DEFINES[op.kv] | ({"SINKS": 1} if op.sinks else {})
    shape |= {"READS": 1} if op.reads else {}
    if op.softcap:  # scores are in base 2
        shape |= {"ACTIVATION": "SOFTCAP", "CAP": op.softcap * math.log2(math.e)}
    if tuning.lanes > 1:
        return {**shape, "HV": head_vector(op.head_dim, 4), "ROWS": GROUP_ROWS}
    return {
        **shape,
        "TOKENS": tuning.attention_tokens,
        "KEYS": tuning.attention_keys,
        "FEW_TOKENS": FEW_TOKENS,
    }


def _attend_tiles(
    device: Resources,
    program: cl.Program,
    heads: AttentionHeads,
    tensors: Mapping[str, Tensor],
    m: int,
    sinks: tuple[cl.Buffer, ...],
) -> list[KernelLaunch]:
    op = heads.attention
    block = 2 * device.tuning.vector
    blocks = -(-op.capacity // block)
    tiles = -(-m // device.tuning.attention_tokens)
    packed = device.shared_scratch(4 * op.kv_heads * blocks * block * op.head_dim)
    qkv, position, k_cache, v_cache, out = (tensors[port] for port in op.ports)
    pack_args = (m, qkv, position, k_cache, v_cache, packed, heads.first, *lengths(op))
    tail: tuple[Argument, ...] = (heads.first, *lengths(op), *sinks)
    args: tuple[Argument, ...] = (m, qkv, position, v_cache, out, packed, *tail)
    return [
        KernelLaunch(program, "pack_keys", (heads.count, blocks), (1, 1), pack_args),
        KernelLaunch(program, "attend_tile", (heads.count, tiles), (1, 1), args),
    ]


def _prepare_group(
    device: Resources,
    heads: AttentionHeads,
    whole: Attention | None,
    sinks: tuple[cl.Buffer, ...],
) -> OpenCLKernel:
    """Return work-groups over rows.

    Decode also splits the context, where all heads are computed.
    """
    op, lanes = heads.attention, device.tuning.lanes
    program = device.programs.get(
        "attention_group.cl",
        attention_defines(device.tuning, op),
        before=("caches.cl", *caps(op)),
    )

    def flat(name: str, count: int, args: tuple[Tensor | cl.Buffer | int, ...]) -> KernelLaunch:
        size = -(-count // lanes) * lanes
        return KernelLaunch(program, name, (size,), (lanes,), (count, *args))

    def launches(operands: Mapping[str, Operand], m: int) -> Sequence[KernelLaunch]:
        tensors = tensors_of(operands)
        few = m <= SPLIT_TOKENS and heads.count == op.kv_heads
        splits = device.tuning.decode_splits if few else 1
        qkv, position, k_cache, v_cache, out = (tensors[port] for port in op.ports)
        partial = device.shared_scratch(4 * splits * m * op.heads * (op.head_dim + 2))
        blocks = -(-m * (op.heads // op.kv_heads) // GROUP_ROWS)
        appended = m * heads.count * (1 if op.kv.coded else op.head_dim)
        rest: tuple[Argument, ...] = (partial, splits, heads.first, *lengths(op), *sinks)
        args: tuple[Argument, ...] = (m, qkv, position, k_cache, v_cache, out, *rest)
        some = (heads.first, heads.count, op.capacity)
        appending = flat("append", appended, (qkv, position, k_cache, v_cache, *some))
        steps = [
            *([] if op.reads else [appending]),
            KernelLaunch(
                program,
                "attend_group",
                (blocks * lanes, heads.count, splits),
                (lanes, 1, 1),
                args,
            ),
        ]
        if splits > 1:
            steps.append(flat("combine", m * op.heads * op.head_dim, (partial, out, splits)))
        return steps

    return OpenCLKernel(device, whole or heads, launches, keep=sinks)
