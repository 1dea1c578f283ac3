"""Add, GatedAct, SigmoidGate, GatedInput, GatedAdd and Act."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.backends.checks import vector
from hetero.backends.opencl.calls import Argument, InPanels, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.tuning import Tuning
from hetero.backends.ops import (
    Act,
    Add,
    GatedAct,
    GatedAdd,
    GatedInput,
    SigmoidGate,
    weight_names,
)
from hetero.backends.protocol import Operand, WeightValue, whole

MACROS = {"silu": "SILU", "gelu": "GELU", "gelu_tanh": "GELU_TANH", "relu": "RELU"}


def prepare_add(device: Resources, op: Add, weights: Mapping[str, WeightValue]) -> OpenCLKernel:
    """Prepare `y = x + residual`: one row of items per token."""
    tuning = device.tuning
    program = device.programs.get("elementwise.cl", tuning.defines)
    name = "add_scaled" if op.scaled else "add"
    scale = [device.constant(vector(weights, x)) for x in weight_names(op)]

    def launches(tensors: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        chunk, items = split_floats(tuning, op.d)
        args: tuple[Argument, ...] = (
            m,
            InPanels(tensors["x"]),
            InPanels(tensors["residual"]),
            whole(tensors["y"]),
            op.d,
            chunk,
            *scale,
        )
        return [KernelLaunch(program, name, (items, m), (tuning.lanes, 1), args)]

    return OpenCLKernel(device, op, launches)


def prepare_gated_act(
    device: Resources, op: GatedAct, _weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare `y = act(gate) · up`: one row of items per token."""
    return _activation(device, op, "gated_act")


def prepare_act(device: Resources, op: Act, _weights: Mapping[str, WeightValue]) -> OpenCLKernel:
    """Prepare `y = act(x)`: one row of items per token."""
    return _activation(device, op, "act")


def prepare_sigmoid_gate(
    device: Resources, op: SigmoidGate, _weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare `y = x · sigmoid(gates)`: one row of items per token."""
    tuning = device.tuning
    defines: dict[str, Define] = {**tuning.defines, "ACTIVATION": "SIGMA"}
    program = device.programs.get("elementwise.cl", defines, before=("activations.cl",))

    def launches(tensors: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        chunk, items = split_floats(tuning, op.d)
        x, gates = InPanels(tensors["x"]), InPanels(tensors["gates"])
        args = (m, x, gates, whole(tensors["y"]), op.d, op.first, chunk)
        return [KernelLaunch(program, "gate", (items, m), (tuning.lanes, 1), args)]

    return OpenCLKernel(device, op, launches)


def prepare_gated_input(
    device: Resources, op: GatedInput, _weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare `y = act(x) · (residual + inputs)`: one row of items per token."""
    tuning = device.tuning
    program = device.programs.get(
        "elementwise.cl",
        {**tuning.defines, "ACTIVATION": MACROS[op.activation]},
        before=("activations.cl",),
    )

    def launches(tensors: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        chunk, items = split_floats(tuning, op.d)
        x, residual = InPanels(tensors["x"]), InPanels(tensors["residual"])
        inputs, y = whole(tensors["inputs"]), whole(tensors["y"])
        args = (m, x, residual, inputs, y, op.d, op.first, op.width, chunk)
        return [KernelLaunch(program, "gated_input", (items, m), (tuning.lanes, 1), args)]

    return OpenCLKernel(device, op, launches)


def prepare_gated_add(
    device: Resources, op: GatedAdd, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare `y = residual + sigmoid(gates · weight) · x`: one work-group per token."""
    lanes = device.tuning.lanes
    program = device.programs.get("gated_add.cl", {**device.tuning.defines, "D": op.d})
    weight = device.constant(vector(weights, "weight"))

    def launches(tensors: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        rest = (whole(tensors[port]) for port in ("gates", "residual", "y"))
        args: tuple[Argument, ...] = (m, InPanels(tensors["x"]), *rest, weight)
        return [KernelLaunch(program, "gated_add", (m * lanes,), (lanes,), args)]

    return OpenCLKernel(device, op, launches, keep=(weight,))


def _activation(device: Resources, op: GatedAct | Act, kernel: str) -> OpenCLKernel:
    tuning = device.tuning
    program = device.programs.get(
        "elementwise.cl",
        {**tuning.defines, "ACTIVATION": MACROS[op.activation]},
        before=("activations.cl",),
    )

    def launches(tensors: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        chunk, items = split_floats(tuning, op.f)
        args = (m, InPanels(tensors["x"]), whole(tensors["y"]), op.f, chunk)
        return [KernelLaunch(program, kernel, (items, m), (tuning.lanes, 1), args)]

    return OpenCLKernel(device, op, launches)


def split_floats(tuning: Tuning, count: int) -> tuple[int, int]:
    """Return floats per work-item and number of work-items, a multiple of the lanes."""
    if tuning.lanes == 1:
        return count, 1
    items = -(-count // tuning.vector)
    return tuning.vector, -(-items // tuning.lanes) * tuning.lanes
