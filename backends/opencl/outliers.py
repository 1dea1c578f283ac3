"""Outliers: what integers of one scale leave out, added to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetero.backends import checks
from hetero.backends.opencl.calls import InPanels, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import Outliers
from hetero.backends.protocol import Operand, WeightValue, whole

TOKENS = 4  # of a work-item on a processor: halves of a weight are converted once for all of them


def prepare_outliers(
    device: Resources, op: Outliers, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare one launch; with excess, one before it that lists what codes cannot hold."""
    lanes = device.tuning.lanes
    tokens = TOKENS if lanes == 1 else 1
    sizes = {"N": op.n, "K": op.k, "HOT": op.hot, "EXCESS": int(op.excess)}
    defines = {**device.tuning.defines, **sizes, "TOKENS": tokens}
    program = device.programs.get("outliers.cl", defines)
    absent = device.constant(np.zeros(1, np.int32))
    hot = slab = codes = scales = x_scale = absent
    copied = 0
    if op.hot:
        features, columns = checks.slab(weights)
        hot, slab = device.constant(features), device.constant(columns.data)
        copied += columns.nbytes
    if op.excess:
        packed = checks.packed(weights)
        assert packed.scales is not None
        codes, scales = device.constant(packed.data), device.constant(packed.scales)
        x_scale = device.constant(checks.vector(weights, "x_scale"))
        copied += packed.nbytes

    def launches(operands: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        made = []
        listed = absent
        if op.excess:
            listed = device.shared_scratch(4 * m * (1 + 2 * op.k))
            args = (m, whole(operands["x"]), listed, x_scale, hot)
            made.append(KernelLaunch(program, "list_excess", (lanes, m), (lanes, 1), args))
        rows = 1 if lanes == 1 else -(-op.n // lanes) * lanes
        ports = (whole(operands["x"]), InPanels(operands["residual"]), whole(operands["y"]))
        operand_args = (m, *ports, hot, slab, listed, codes, scales)
        size = (rows, -(-m // tokens))
        made.append(KernelLaunch(program, "add_outliers", size, (lanes, 1), operand_args))
        return made

    return OpenCLKernel(
        device, op, launches, nbytes=0 if device.capabilities.unified_memory else copied
    )
