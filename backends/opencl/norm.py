"""RMSNorm and LayerNorm, with and without a fused residual."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.backends.checks import vector
from hetero.backends.opencl.calls import Argument, InPanels, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import LayerNorm, RMSNorm
from hetero.backends.protocol import Operand, WeightValue, takes_panels, whole


def prepare_norm(
    device: Resources, op: RMSNorm | LayerNorm, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare one work-group per token."""
    tuning = device.tuning
    program = device.programs.get(
        "norm.cl",
        {
            **tuning.defines,
            "D": op.d,
            "ADD": int(op.add),
            "EPS": float(op.eps),
        },
    )
    names = ("weight", "bias") if isinstance(op, LayerNorm) else ("weight",)
    constants = [device.constant(vector(weights, name)) for name in names]
    kernel = "layer_norm" if isinstance(op, LayerNorm) else "rms_norm"

    def launches(tensors: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        ports = [
            InPanels(tensors[port]) if takes_panels(op, port) else whole(tensors[port])
            for port in op.ports
        ]
        args: tuple[Argument, ...] = (m, *ports, *constants)
        return [KernelLaunch(program, kernel, (m * tuning.lanes,), (tuning.lanes,), args)]

    return OpenCLKernel(device, op, launches)
