"""Outputs of cut matmuls, read in place: every operation that takes panels, cut anywhere."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.memory import HostBuffer, Panels, Tensor, new_tensor
from hetero.backends.ops import OUTPUT_PORTS, Op, describe
from hetero.backends.protocol import Device, Operand, takes_panels
from tests.backends.cases import (
    TOLERANCE,
    execute,
    expected,
    make_tensors,
    make_weights,
    snapshot,
)
from tests.support.helpers import assert_close

ROPE = ops.Rope(heads=4, kv_heads=2, head_dim=16, theta=10000.0, max_position=64)
OPERATIONS: list[Op] = [
    ops.RMSNorm(d=96, eps=1e-5),
    ops.RMSNorm(d=172, eps=1e-5, add=True),
    ops.LayerNorm(d=100, eps=1e-5),
    ops.LayerNorm(d=96, eps=1e-5, add=True),
    ROPE,
    dataclasses.replace(ROPE, head_dim=24, qk_norm_eps=1e-6, rotary_dim=16),
    dataclasses.replace(ROPE, head_dim=24, qk_norm_eps=1e-6, gated=True),
    ops.GatedAct(f=90),
    ops.SigmoidGate(d=90, first=33, width=130),
    ops.GatedInput(d=90, first=33, width=130),
    ops.Add(d=90, scaled=True),
    ops.GatedAdd(d=90),
    ops.GatedDelta(k_heads=1, v_heads=2, k_dim=16, v_dim=32, eps=1e-6, width=90),
    ops.ShortConv(d=33, taps=3, gated=True),
    ops.ShortConv(d=99, taps=4, activation="silu", width=120),
    ops.Act(f=99, activation="gelu"),
    ops.Add(d=97),
]


def cut(tensor: Tensor, cuts: tuple[int, ...], device: Device) -> Panels:
    """The tensor's values in panels of one buffer of the device, behind some other bytes."""
    m, width = tensor.shape
    edges = (0, *cuts, width)
    buffer = device.allocate(4 * (m * width + 16))
    device.map(buffer)
    parts, at = [], 64
    for start, stop in itertools.pairwise(edges):
        part = Tensor(buffer, (m, stop - start), offset_bytes=at)
        part.array[:] = tensor.array[:, start:stop]
        parts.append(part)
        at += part.nbytes
    return Panels(tuple(parts))


@pytest.mark.parametrize("cuts", [(), (32,), (1, 2, 3), (16, 80), (47,), (33, 34, 64)])
@pytest.mark.parametrize("op", OPERATIONS, ids=describe)
def test_panels_are_read_where_they_lie(device: Device, op: Op, cuts: tuple[int, ...]) -> None:
    if not device.capabilities.reads_panels:
        pytest.skip("this device takes whole tensors")
    rng = np.random.default_rng(len(cuts))
    weights = make_weights(op, rng)
    kernel = device.prepare(op, weights)
    for m in (1, 3, 33):
        tensors = make_tensors(op, m, rng, position=5, spare_rows=1, device=device)
        wanted = expected(op, weights, snapshot(tensors), m)
        operands: dict[str, Operand] = dict(tensors)
        for port in op.ports:
            if takes_panels(op, port):
                operands[port] = cut(tensors[port], cuts, device)
                tensors[port].array[:] = np.nan  # must not be read
        execute(device, kernel.bind(operands, m))
        for port in set(op.ports) & OUTPUT_PORTS:
            assert_close(tensors[port].array[:m], wanted[port][:m], TOLERANCE, f"{port} {m=}")


def test_panels_are_refused_where_they_are_not_taken(device: Device) -> None:
    op = ops.Attention(heads=2, kv_heads=1, head_dim=8, capacity=9)
    tensors = make_tensors(op, 1, np.random.default_rng(0), device=device)
    operands: dict[str, Operand] = {**tensors, "qkv": cut(tensors["qkv"], (8,), device)}
    with pytest.raises(ValueError, match="takes qkv as one tensor here"):
        device.prepare(op, {}).bind(operands, 1)


def test_panels_are_side_by_side() -> None:
    buffer = HostBuffer(4096)
    panels = Panels((Tensor(buffer, (4, 3)), Tensor(buffer, (5, 2), offset_bytes=64)))
    assert (panels.shape, panels.starts, panels.nbytes) == ((4, 5), (0, 3), 4 * 22)
    panels.parts[0].array[:] = 1
    panels.parts[1].array[:] = 2
    np.testing.assert_array_equal(panels.rows(1, 3).gather(2), [[1, 1, 1, 2, 2]] * 2)
    with pytest.raises(ValueError, match="two dimensions"):
        Panels((new_tensor((3,)),))
