"""SumScores: what sampled rows of attention give to each column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero.backends.opencl.attention import attention_defines, caps, lengths
from hetero.backends.opencl.calls import Argument, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import SumScores
from hetero.backends.protocol import Acceptance, Operand, WeightValue, tensors_of

LONGEST = 1 << 14  # tokens whose scores of several rows are on a worker's stack


def accepts_sum_scores(op: SumScores) -> Acceptance:
    """Return caches whose scores fit a stack."""
    if op.attention.capacity > LONGEST:
        return Acceptance(False, f"columns are added up of at most {LONGEST} tokens")
    return Acceptance(True)


def prepare_sum_scores(
    device: Resources, op: SumScores, _weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare a work-item for each key/value head on a CPU, a work-group on a GPU."""
    tuning, attention = device.tuning, op.attention
    if tuning.lanes > 1:
        return _prepare_group(device, op)
    block = 2 * tuning.vector
    blocks = -(-attention.capacity // block)
    defines = attention_defines(tuning, attention) | {"EVERY": op.every, "LONGEST": LONGEST}
    before = ("caches.cl", *caps(attention), "scores_cpu.cl")
    program = device.programs.get("sum_scores_cpu.cl", defines, before=before)
    heads, packed_bytes = attention.kv_heads, 4 * blocks * block * attention.head_dim

    def launches(operands: Mapping[str, Operand], m: int) -> Sequence[KernelLaunch]:
        tensors = tensors_of(operands)
        packed = device.shared_scratch(heads * packed_bytes)
        qkv, position, k_cache, score_sums = (tensors[port] for port in op.ports)
        pack_args = (m, position, k_cache, packed, *lengths(attention))
        args = (m, qkv, position, score_sums, packed, *lengths(attention))
        return [
            KernelLaunch(program, "pack_columns", (heads, blocks), (1, 1), pack_args),
            KernelLaunch(program, "sum_scores", (heads,), (1,), args),
        ]

    return OpenCLKernel(device, op, launches)


def _prepare_group(device: Resources, op: SumScores) -> OpenCLKernel:
    lanes, attention = device.tuning.lanes, op.attention
    defines = attention_defines(device.tuning, attention) | {"EVERY": op.every}
    program = device.programs.get(
        "sum_scores_group.cl", defines, before=("caches.cl", *caps(attention))
    )

    def launches(operands: Mapping[str, Operand], m: int) -> Sequence[KernelLaunch]:
        tensors = tensors_of(operands)
        weights = device.shared_scratch(4 * attention.kv_heads * attention.capacity)
        ports = (tensors[port] for port in op.ports)
        args: tuple[Argument, ...] = (m, *ports, weights, *lengths(attention))
        return [KernelLaunch(program, "sum_scores", (attention.kv_heads * lanes,), (lanes,), args)]

    return OpenCLKernel(device, op, launches)
