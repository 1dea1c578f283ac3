"""DecodeChunks: codes of keys and values into caches."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.backends.checks import vector
from hetero.backends.opencl.attention import CACHE_DEFINES, head_vector
from hetero.backends.opencl.calls import Argument, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.program_source import Define
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import DecodeChunks
from hetero.backends.protocol import Acceptance, Operand, WeightValue, tensors_of

CODES_PER_BYTE = 4  # codes of two bits in a byte: what a vector is a multiple of
GROUPS = 32  # of a GPU, for each head's keys or values: fixed, so that one launch is warmed up


def accepts_decode_chunks(op: DecodeChunks) -> Acceptance:
    """Return heads whose rows are whole vectors."""
    if op.head_dim % CODES_PER_BYTE:
        return Acceptance(False, f"heads of {op.head_dim} values do not fill bytes of four codes")
    return Acceptance(True)


def prepare_decode_chunks(
    device: Resources, op: DecodeChunks, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Prepare a kernel with a work-item for each head of the keys and of the values.

    That is on a CPU; on a GPU it has work-groups.
    """
    tuning = device.tuning
    lanes = tuning.lanes
    defines: dict[str, Define] = {
        **tuning.defines,
        "HV": head_vector(
            op.head_dim, max(CODES_PER_BYTE, tuning.vector if lanes == 1 else CODES_PER_BYTE)
        ),
        "KV_HEADS": op.kv_heads,
        "HEAD_DIM": op.head_dim,
        "TOKENS": op.tokens,
        "BY_TOKEN": int(op.by_token),
        "KEYS_BY_TOKEN": int(op.keys_by_token),
    }
    defines |= CACHE_DEFINES[op.kv]
    program = device.programs.get("chunks.cl", defines, before=("caches.cl",))
    channels = device.constant(vector(weights, "channels"))
    size = (1 if lanes == 1 else lanes * GROUPS, 2 * op.kv_heads)

    def launches(operands: Mapping[str, Operand], m: int) -> list[KernelLaunch]:
        tensors = tensors_of(operands)
        ports = (tensors[port] for port in ("table", "codes", "k_cache", "v_cache"))
        args: tuple[Argument, ...] = (m, *ports, channels, op.capacity)
        return [KernelLaunch(program, "decode_chunks", size, (lanes, 1), args)]

    return OpenCLKernel(device, op, launches)
