"""Add and GatedAct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import Launch, OpenCLKernel
from hetero.backends.opencl.tuning import Tuning
from hetero.backends.ops import Add, GatedAct
from hetero.backends.protocol import WeightValue

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice

_MACROS = {"silu": "SILU", "gelu": "GELU", "gelu_tanh": "GELU_TANH"}


def prepare_add(device: OpenCLDevice, op: Add, _weights: Mapping[str, WeightValue]) -> OpenCLKernel:
    """`y = x + residual`: a flat loop over m·d floats."""
    tuning = device.tuning
    program = device.programs.get("elementwise.cl", {"VEC": tuning.vector})

    def launches(tensors: Mapping[str, Tensor], m: int) -> list[Launch]:
        count = m * op.d
        chunk, items = _split(tuning, count)
        args = (count, tensors["x"], tensors["residual"], tensors["y"], chunk)
        return [Launch(program, "add", (items,), (tuning.lanes,), args)]

    return OpenCLKernel(device, op, launches)


def prepare_gated_act(
    device: OpenCLDevice, op: GatedAct, _weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """`y = act(gate) · up`: one row of items per token."""
    tuning = device.tuning
    program = device.programs.get(
        "elementwise.cl",
        {"VEC": tuning.vector, "F": op.f, "ACTIVATION": _MACROS[op.activation]},
    )

    def launches(tensors: Mapping[str, Tensor], m: int) -> list[Launch]:
        chunk, items = _split(tuning, op.f)
        args = (m, tensors["x"], tensors["y"], chunk)
        return [Launch(program, "gated_act", (items, m), (tuning.lanes, 1), args)]

    return OpenCLKernel(device, op, launches)


def _split(tuning: Tuning, count: int) -> tuple[int, int]:
    """Floats per work-item and number of work-items, a multiple of the lanes."""
    if tuning.lanes == 1:
        return count, 1
    items = -(-count // tuning.vector)
    return tuning.vector, -(-items // tuning.lanes) * tuning.lanes
