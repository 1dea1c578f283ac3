"""AddPositions, and the soft cap of a matmul's output."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.backends.checks import vector
from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import KernelLaunch, OpenCLKernel
from hetero.backends.opencl.elementwise import split_floats
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import AddPositions
from hetero.backends.protocol import Operand, WeightValue, tensors_of

ACTIVATIONS = "activations.cl"


def prepare_add_positions(
    device: Resources, op: AddPositions, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare `y = x + rows of the table`: one row of items per token."""
    tuning = device.tuning
    program = device.programs.get("positions.cl", {**tuning.defines, "D": op.d})
    table = device.constant(vector(weights, "table"))

    def launches(operands: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        tensors = tensors_of(operands)
        chunk, items = split_floats(tuning, op.d)
        ports = (tensors["x"], tensors["position"], tensors["y"])
        args = (m, *ports, table, op.offset, op.rows, chunk)
        return [KernelLaunch(program, "add_positions", (items, m), (tuning.lanes, 1), args)]

    return OpenCLKernel(device, op, launches, keep=(table,))


def softcap_launch(device: Resources, cap: float, y: Tensor, m: int) -> KernelLaunch:
    """Return `y = cap · tanh(y / cap)` in place, on the first m tokens."""
    tuning = device.tuning
    defines: dict[str, Define] = {
        **tuning.defines, "ACTIVATION": "SOFTCAP", "CAP": float(cap)
    }  # fmt: skip
    program = device.programs.get("pointwise.cl", defines, before=(ACTIVATIONS,))
    count = m * y.shape[1]
    chunk, items = split_floats(tuning, count)
    return KernelLaunch(program, "act_in_place", (items,), (tuning.lanes,), (count, y, chunk))
