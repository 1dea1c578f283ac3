"""Attention: append to the caches, then causal grouped-query attention by blocks of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyopencl as cl

from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import Launch, OpenCLKernel
from hetero.backends.opencl.program import Define
from hetero.backends.ops import Attention
from hetero.backends.protocol import WeightValue

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice

FEW_TOKENS = 4  # up to here packing the keys of the whole context costs more than it saves


def prepare_attention(
    device: OpenCLDevice, op: Attention, _weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Compile for the record's heads, capacity and window."""
    program = device.programs.get("attention_cpu.cl", _defines(device, op))

    def launches(tensors: Mapping[str, Tensor], m: int) -> list[Launch]:
        if m <= FEW_TOKENS:
            return [_attend_few(program, op, tensors, m)]
        return _attend_tiles(device, program, op, tensors, m)

    return OpenCLKernel(device, op, launches)


def head_vector(head_dim: int, widest: int) -> int:
    """Widest vector that divides a head."""
    return next(width for width in (16, 8, 4, 2, 1) if width <= widest and head_dim % width == 0)


def _defines(device: OpenCLDevice, op: Attention) -> dict[str, Define]:
    tuning = device.tuning
    return {
        "VEC": tuning.vector,
        "HV": head_vector(op.head_dim, tuning.vector),
        "HEADS": op.heads,
        "KV_HEADS": op.kv_heads,
        "HEAD_DIM": op.head_dim,
        "CAPACITY": op.capacity,
        "WINDOW": op.window,
        "SCALE": op.softmax_scale * math.log2(math.e),
        "TOKENS": tuning.attention_tokens,
        "KEYS": tuning.attention_keys,
    }


def _attend_few(
    program: cl.Program, op: Attention, tensors: Mapping[str, Tensor], m: int
) -> Launch:
    args = tuple(tensors[port] for port in op.ports)
    return Launch(program, "attend_few", (op.kv_heads,), (1,), (m, *args))


def _attend_tiles(
    device: OpenCLDevice,
    program: cl.Program,
    op: Attention,
    tensors: Mapping[str, Tensor],
    m: int,
) -> list[Launch]:
    block = 2 * device.tuning.vector
    blocks = -(-op.capacity // block)
    tiles = -(-m // device.tuning.attention_tokens)
    packed = device.scratch(4 * op.kv_heads * blocks * block * op.head_dim)
    qkv, position, k_cache, v_cache, out = (tensors[port] for port in op.ports)
    pack_args = (m, qkv, position, k_cache, v_cache, packed)
    args = (m, qkv, position, v_cache, out, packed)
    return [
        Launch(program, "pack_keys", (op.kv_heads, blocks), (1, 1), pack_args),
        Launch(program, "attend_tile", (op.kv_heads, tiles), (1, 1), args),
    ]
