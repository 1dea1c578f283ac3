"""Embed: rows of a packed weight, dequantised."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.backends.checks import packed
from hetero.backends.formats import GROUP_SIZE
from hetero.backends.opencl.calls import KernelLaunch, OpenCLKernel
from hetero.backends.opencl.matmul import block_defines
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import Embed
from hetero.backends.protocol import Operand, WeightValue, tensors_of


def prepare_embed(device: Resources, op: Embed, weights: Mapping[str, WeightValue]) -> OpenCLKernel:
    """Prepare a work-item per token on a CPU, per token and group of 32 features on a GPU."""
    _, weight = next(packed(weights).spans())  # a table is one tensor
    lanes, blocks = device.tuning.lanes, weight.storage.scales == "block"
    storage = "IN_BLOCKS" if blocks else weight.storage.value.upper()
    program = device.programs.get(
        "embed.cl",
        {
            "D": op.d,
            "STORAGE": storage,
            "SCALE": float(op.scale),
            **(block_defines(weight.storage) if blocks else {}),
        },
        before=("blocks.cl",) * blocks,
    )
    data = device.constant(weight.data)
    scales = data if weight.scales is None else device.constant(weight.scales)
    total = -(-op.d // GROUP_SIZE)
    groups = total if lanes == 1 else 1
    items = 1 if lanes == 1 else -(-total // lanes) * lanes

    def launches(operands: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        tensors = tensors_of(operands)
        args = (m, tensors["tokens"], tensors["y"], data, scales, groups)
        return [KernelLaunch(program, "embed", (items, m), (lanes, 1), args)]

    copied = 0 if device.capabilities.unified_memory else weight.nbytes
    return OpenCLKernel(device, op, launches, nbytes=copied)
