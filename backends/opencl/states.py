"""ShortConv and GatedDelta: operations whose state has one size whatever the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hetero.backends.checks import vector
from hetero.backends.opencl.attention import head_vector
from hetero.backends.opencl.calls import Argument, InPanels, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.elementwise import MACROS
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.tuning import Tuning
from hetero.backends.ops import L2_EPS, GatedDelta, ShortConv, weight_names
from hetero.backends.protocol import Operand, WeightValue, whole

BLOCK_VECTORS = 4  # of a state's row that pass through the first cache together
PRIVATE_ROWS = 64  # of a state's column that a lane has in registers
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


def prepare_gated_delta(
    device: Resources, op: GatedDelta, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare a work-item for each value head on a CPU, work-groups over its columns on a GPU."""
    tuning = device.tuning
    group = tuning.lanes > 1
    file = "gated_delta_group.cl" if group else "gated_delta_cpu.cl"
    sizes: dict[str, Define] = {"DK": op.k_dim, "DV": op.v_dim, "L2_EPS": L2_EPS}
    sizes |= _parts(op, tuning.lanes) if group else _blocks(op, tuning)
    before = ("activations.cl", "gated_delta_gates.cl")
    defines = {**tuning.defines, "ACTIVATION": MACROS["silu"], **sizes}
    program = device.programs.get(file, defines, before=before)
    gates_at = op.gates_width - op.values - 2 * op.v_heads
    decay, dt_bias, norm = (device.constant(vector(weights, name)) for name in weight_names(op))

    def launches(tensors: Mapping[str, Operand], m: int) -> Sequence[KernelLaunch]:
        gates, y = InPanels(tensors["gates"]), whole(tensors["y"])
        ports = (whole(tensors["x"]), gates, whole(tensors["position"]))
        args: tuple[Argument, ...] = (m, *ports, whole(tensors["delta_state"]), y, decay, dt_bias)
        args += (op.k_heads, op.v_heads, gates_at, op.k_dim**-0.5)
        if not group:
            size: tuple[int, ...] = (op.v_heads,)
            return [KernelLaunch(program, "gated_delta", size, (1,), (*args, norm, float(op.eps)))]
        lanes, columns = tuning.lanes, tuning.lanes // int(sizes["PARTS"])
        size = -(-op.v_dim // columns) * lanes, op.v_heads
        norms = op.v_heads * lanes, m
        return [
            KernelLaunch(program, "gated_delta", size, (lanes, 1), args),
            KernelLaunch(
                program,
                "gated_norm",
                norms,
                (lanes, 1),
                (m, gates, y, norm, op.v_heads, gates_at, float(op.eps)),
            ),
        ]

    return OpenCLKernel(device, op, launches, keep=(decay, dt_bias, norm))


def _blocks(op: GatedDelta, tuning: Tuning) -> dict[str, Define]:
    """Return the vector of a head and the vectors of a block: both divide a state's row."""
    width = head_vector(math.gcd(op.k_dim, op.v_dim), tuning.vector)
    vectors = head_vector(op.v_dim // width, BLOCK_VECTORS)
    return {"HV": width, "BV": vectors}


def _parts(op: GatedDelta, lanes: int) -> dict[str, Define]:
    """Return among how many lanes a column is divided, and the rows of each."""
    parts = 1
    while parts < lanes // 2 and -(-op.k_dim // parts) > PRIVATE_ROWS:
        parts *= 2
    return {"PARTS": parts, "ROWS": -(-op.k_dim // parts)}
