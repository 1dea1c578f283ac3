"""Add (and other elementwise operations)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import Launch, OpenCLKernel
from hetero.backends.ops import Add
from hetero.backends.protocol import WeightValue

if TYPE_CHECKING:
    from hetero.backends.opencl.device import OpenCLDevice


def prepare_add(device: OpenCLDevice, op: Add, _weights: Mapping[str, WeightValue]) -> OpenCLKernel:
    """`y = x + residual`: a flat loop over m·d floats."""
    program = device.programs.get("elementwise.cl", {"VEC": device.tuning.vector})

    def launches(tensors: Mapping[str, Tensor], m: int) -> list[Launch]:
        count = m * op.d
        chunk = count if device.tuning.lanes == 1 else 4 * device.tuning.vector
        items = -(-count // chunk)
        args = (count, tensors["x"], tensors["residual"], tensors["y"], chunk)
        return [Launch(program, "add", (items,), (1,), args)]

    return OpenCLKernel(device, op, launches)
