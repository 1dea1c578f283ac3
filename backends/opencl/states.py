"""ShortConv: operations whose state has one size whatever the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hetero.backends.checks import vector
from hetero.backends.opencl.calls import Argument, InPanels, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.elementwise import MACROS
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import ShortConv
from hetero.backends.protocol import Operand, WeightValue, whole

TILE_TOKENS = 32  # of a work-item of the convolution, which reads L - 1 rows before them again


def prepare_short_conv(
    device: Resources, op: ShortConv, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare work-items of some channels and some tokens each."""
    tuning = device.tuning
    defines: dict[str, Define] = {
        **tuning.defines,
        "TAPS": op.taps,
        "GATED": int(op.gated),
        "BIAS": int(op.bias),
    }
    before: tuple[str, ...] = ()
    if op.activation:
        defines["ACTIVATION"], before = MACROS[op.activation], ("activations.cl",)
    program = device.programs.get("short_conv.cl", defines, before=before)
    taps = device.constant(vector(weights, "taps"))
    bias = device.constant(vector(weights, "bias") if op.bias else np.zeros(1, np.float32))
    chunk, items = _channels(device, op.d)
    tile = max(TILE_TOKENS, op.taps)

    def launches(tensors: Mapping[str, Operand], m: int) -> Sequence[KernelLaunch]:
        ports = [whole(tensors[port]) for port in ("position", "conv_state", "y")]
        rest = (taps, bias, op.d, chunk, tile)
        args: tuple[Argument, ...] = (m, InPanels(tensors["x"]), *ports, *rest)
        size = items, -(-m // tile)
        return [KernelLaunch(program, "short_conv", size, (tuning.lanes, 1), args)]

    return OpenCLKernel(device, op, launches, keep=(taps, bias))


def _channels(device: Resources, width: int) -> tuple[int, int]:
    """Return the channels of a work-item and the work-items: one for each thread of a processor."""
    vector_width, lanes = device.tuning.vector, device.tuning.lanes
    vectors = -(-width // vector_width)
    if lanes == 1:
        chunk = -(-vectors // device.threads) * vector_width
        return chunk, -(-width // chunk)
    return vector_width, -(-vectors // lanes) * lanes
