"""MatMul on OpenCL: kernels for a CPU's vector unit (PoCL) and for real GPUs.

Both read the packed weights in place (`hetero.backends.weights`). On a CPU a work-item packs x into
tiles of a few tokens (int8 codes for `w4a8` and `w8a8`, int16 for `w4a16` where that is faster
than floats; one token of floats needs none of it) and multiplies its share of the rows. On a GPU a
work-group reduces 16 rows along k for up to 8 tokens and computes local-memory tiles above.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from hetero.backends.checks import packed, vector
from hetero.backends.formats import GROUP_SIZE, StorageFormat
from hetero.backends.memory import Tensor
from hetero.backends.opencl.calls import Argument, KernelLaunch, OpenCLKernel
from hetero.backends.opencl.gpu_capabilities import WEIGHT_FORMATS
from hetero.backends.opencl.matmul_tuning import (
    BlockFormat,
    CpuTuning,
    Kind,
    SimtTuning,
    WorkTile,
    kind_of,
    matmul_tuning,
)
from hetero.backends.opencl.pointwise import softcap_launch
from hetero.backends.opencl.resources import Resources
from hetero.backends.ops import MatMul
from hetero.backends.protocol import Acceptance, Operand, WeightValue, tensors_of, whole
from hetero.backends.weights import ROW_BLOCK, PackedWeight, padded

Launches: TypeAlias = Callable[[Mapping[str, Operand], int], list[KernelLaunch]]
SIMT_LANES, SIMT_TILE_BLOCKS, SIMT_TILE_TOKENS = 64, 4, 64  # as in matmul_simt.cl
IN_PLACE, PACK_HERE, PACKED = 0, 1, 2  # as in matmul_cpu.cl


def accepts_matmul(op: MatMul) -> Acceptance:
    """Return whether `prepare_matmul` takes the record: every format, shape and operand order."""
    return Acceptance(op.weight_format in WEIGHT_FORMATS)


def prepare_matmul(
    device: Resources, op: MatMul, weights: Mapping[str, WeightValue]
) -> OpenCLKernel:
    """Compile a matmul on its packed weight, which is mapped where memory is unified.

    A mixed weight takes launches for each of its parts.
    """
    weight = packed(weights)
    plans = [
        MatMulPlan(
            device,
            op,
            matmul_operands(device, part, weights, first),
            kind_of(op.weight_format, part.storage),
            first,
            part.n,
        )
        for first, part in weight.spans()
    ]
    launches: Launches = partial(_all_launches, plans, matmul_tuning(device.tuning.family))
    copied = 0 if device.capabilities.unified_memory else weight.nbytes
    if op.softcap:
        launches = partial(_capped, device, op, launches)
    keep = (*(plan.operands for plan in plans), *weights.values())
    return OpenCLKernel(device, op, launches, keep=keep, nbytes=copied)


def _all_launches(
    plans: Sequence[MatMulPlan],
    tuning: CpuTuning | SimtTuning,
    operands: Mapping[str, Operand],
    m: int,
) -> list[KernelLaunch]:
    """Return the launches of every part, which write to columns of their own."""
    tensors = tensors_of(operands)
    launches = []
    for plan in plans:
        if isinstance(tuning, CpuTuning):
            launches += cpu_launches(plan, tuning, tensors, m)
        else:
            launches += simt_launches(plan, tuning, tensors, m)
    return launches


@dataclass(frozen=True)
class MatMulOperands:
    """Constant kernel arguments, in order: weights, scales and bias with their offsets.

    `x_scale` is the last argument of kernels for formats with a static one, else empty.
    """

    args: tuple[Argument, ...]
    has_bias: int
    x_scale: tuple[float, ...]


@dataclass(frozen=True)
class MatMulPlan:
    """Rows [first, first + n) of the operation's, of one kind."""

    device: Resources
    op: MatMul
    operands: MatMulOperands
    kind: Kind
    first: int
    n: int

    @property
    def k(self) -> int:
        """Return features as the weights store them."""
        return padded(self.op.k, GROUP_SIZE) if self.kind.storage.quantised else self.op.k

    def columns(self, y: Tensor) -> Tensor:
        """Return where its columns of the first token are; the other tokens are `op.n` apart."""
        return Tensor(
            y.buffer, (1, self.n), y.dtype, y.offset_bytes + y.dtype.itemsize * self.first
        )


def _capped(
    device: Resources, op: MatMul, launches: Launches, operands: Mapping[str, Operand], m: int
) -> list[KernelLaunch]:
    """Return the matmul, then the soft cap on its output in place."""
    cap = softcap_launch(device, op.softcap, whole(operands["y"]), m)
    return [*launches(operands, m), cap]


def cpu_launches(
    plan: MatMulPlan, tuning: CpuTuning, tensors: Mapping[str, Tensor], m: int
) -> list[KernelLaunch]:
    """Return one launch.

    Where several threads share the rows of many tokens, one before it packs x for all of them. Of
    few tokens each packs its own: that is sooner done than threads are woken.
    """
    op, device, x = plan.op, plan.device, tensors["x"]
    tile = tuning.tile(plan.kind, m)
    program = cpu_program(plan, tuning, tile)
    tiles, token_tiles = -(-plan.n // (tuning.rows * tile.vectors)), -(-m // tile.tokens)
    groups = min(tiles, work_items(device, 2 if m == 1 else 4))
    group_words = tuning.group_words(plan.kind, tile)
    launches = []
    packing, packed = IN_PLACE, device.shared_scratch(4)
    if group_words != GROUP_SIZE or tile.tokens > 1 or plan.k != op.k:
        words = padded(plan.k, GROUP_SIZE) // GROUP_SIZE * group_words + 1
        packing = PACK_HERE if groups == 1 or m == 1 else PACKED
        places = groups if packing == PACK_HERE else 1
        packed = device.shared_scratch(4 * words * token_tiles * tile.tokens * places)
    if packing == PACKED:
        shape: tuple[Argument, ...] = (
            token_tiles,
            x,
            packed,
            m,
            op.k,
            plan.k,
            *plan.operands.x_scale,
        )
        launches.append(KernelLaunch(program, "pack", (token_tiles,), (1,), shape))
    m_panel, k_panel = tuning.panels(plan.kind, m, plan.k, tile)
    sizes = (m, plan.n, op.n, op.k, plan.k, m_panel, k_panel, -(-tiles // groups))
    flags = (plan.operands.has_bias, packing, *plan.operands.x_scale)
    args = (tiles, *plan.operands.args, x, packed, plan.columns(tensors["y"]), *sizes, *flags)
    launches.append(KernelLaunch(program, "matmul", (groups,), (1,), args))
    return launches


def cpu_program(plan: MatMulPlan, tuning: CpuTuning, tile: WorkTile, *files: str) -> cl.Program:
    """Return the program of matmul_cpu.cl, or of `files` that follow it."""
    defines = {
        **kind_defines(plan.kind),
        "TOKENS": tile.tokens,
        "VECTORS": tile.vectors,
        "VEC": tuning.rows,
        "PREFETCH": tile.prefetch,
        "WIDEN": tile.widen,
    }
    planes = tuning.planes(plan.kind, tile)
    if planes:
        defines["PLANES"] = planes
    if planes or plan.kind.activations.static:
        defines["DOT"] = tuning.dot
    sources = ("matmul_pack.cl", "matmul_cpu.cl", *files)
    return plan.device.programs.get(sources[-1], defines, before=sources[:-1])


def kind_defines(kind: Kind) -> dict[str, int]:
    """Return the macros by which kernels know the layout of weights."""
    return block_defines(kind.storage) if isinstance(kind, BlockFormat) else {kind.name: 1}


def block_defines(storage: StorageFormat) -> dict[str, int]:
    """Return the same of a storage in blocks."""
    blocks = storage.blocks
    return {
        "BLOCKS": 1,
        "BITS": blocks.bits,
        "GROUPS": blocks.groups,
        "HALVES": blocks.halves,
        "MINIMUM": int(blocks.minimum),
        "ZERO": blocks.zero,
        "E2M1": int(blocks.e2m1),
    }


def work_items(device: Resources, each: int = 4) -> int:
    """Return the work-items that share a matmul's rows.

    Several per thread, which even out their delays.
    """
    return 1 if device.threads == 1 else each * device.threads


def simt_launches(
    plan: MatMulPlan, tuning: SimtTuning, tensors: Mapping[str, Tensor], m: int
) -> list[KernelLaunch]:
    """Round x if the format says so, then reduce (few tokens) or compute tiles."""
    op, splits = plan.op, tuning.splits
    tokens = next((t for t in (1, 2, 4, 8) if m <= t), 1)
    program = simt_program(plan, tokens=tokens, splits=splits)
    launches: list[KernelLaunch] = []
    x_args: tuple[Argument, ...] = (tensors["x"],)
    if not plan.kind.activations.are_floats:
        rounding, x_args = simt_rounding(plan, program, tensors["x"], m)
        launches.append(rounding)
    sizes = (m, plan.n, op.k, plan.operands.has_bias)
    last = plan.operands.x_scale or (op.n,)
    tail = (*x_args, plan.columns(tensors["y"]), *sizes, *last)
    blocks, local = -(-plan.n // ROW_BLOCK), (ROW_BLOCK, splits)
    if m <= tokens:
        args = (blocks, *plan.operands.args, *tail)
        launches.append(KernelLaunch(program, "gemv", (ROW_BLOCK, splits * blocks), local, args))
    else:
        tiles, token_tiles = -(-blocks // SIMT_TILE_BLOCKS), -(-m // SIMT_TILE_TOKENS)
        args = (tiles, *plan.operands.args, *tail)
        size = (ROW_BLOCK * tiles, splits * token_tiles)
        launches.append(KernelLaunch(program, "gemm", size, local, args))
    return launches


def simt_program(plan: MatMulPlan, *files: str, tokens: int, splits: int) -> cl.Program:
    """Return the program of matmul_simt.cl, or of `files` that follow it."""
    device, kind = plan.device, plan.kind
    defines = {"TOKENS": tokens, "SPLITS": splits}
    if kind.activations.static:
        return device.programs.get(
            "matmul_simt_w8a8.cl",
            defines | {"ROUNDED_DIVISION": int(device.rounded_division)},
            options=("-cl-fp32-correctly-rounded-divide-sqrt",) * device.rounded_division,
        )
    half = device.half if kind.half_is_enough else 0
    sources = (*("blocks.cl",) * isinstance(kind, BlockFormat), "matmul_simt.cl", *files)
    macros = defines | kind_defines(kind) | {"HALF": half}
    return device.programs.get(sources[-1], macros, before=sources[:-1])


def simt_rounding(
    plan: MatMulPlan, program: cl.Program, x: Tensor, m: int
) -> tuple[KernelLaunch, tuple[Argument, ...]]:
    """Return the launch that rounds x, and the arguments that stand for x then."""
    op, device = plan.op, plan.device
    args: tuple[Argument, ...]
    x_args: tuple[Argument, ...]
    if plan.operands.x_scale:
        count = m * plan.k // 4  # words of four codes
        codes = device.shared_scratch(4 * count)
        scale = np.float32(plan.operands.x_scale[0])
        args = (count, x, codes, op.k, float(scale), float(np.float32(1) / scale))
        name, x_args = "round_codes", (codes,)
    else:
        count = m * padded(op.k, GROUP_SIZE) // GROUP_SIZE
        rounded = device.shared_scratch(4 * m * op.k)
        args = (count, x, rounded, op.k)
        name, x_args = "round_activations", (rounded, 0)
    return KernelLaunch(program, name, (padded(count, SIMT_LANES),), (SIMT_LANES,), args), x_args


def matmul_operands(
    device: Resources, weight: PackedWeight, weights: Mapping[str, WeightValue], first: int
) -> MatMulOperands:
    """Map weights, scales and bias of rows from `first` on.

    What is absent is stood in for by the weights.
    """
    data = _mapped(device, weight.data, itemsize=4 if weight.storage.bits == 8 else None)
    scales = data if weight.scales is None else _mapped(device, weight.scales)
    bias = data
    if "bias" in weights:
        bias = _mapped(device, vector(weights, "bias")[first : first + weight.n])
    x_scale = (float(vector(weights, "x_scale")[0]),) if "x_scale" in weights else ()
    return MatMulOperands((*data, *scales, *bias), int("bias" in weights), x_scale)


def _mapped(
    device: Resources, array: npt.NDArray[Any], *, itemsize: int | None = None
) -> tuple[cl.Buffer, int]:
    """Return a buffer over the array and the offset of its first element.

    The offset is in the kernel's item size.

    A view of a mapped file is aligned to 64 bytes; a driver that wants more gets the memory from
    the aligned address before it (of the same page, so that it exists).
    """
    align = int(device.context.devices[0].mem_base_addr_align) // 8
    address = array.ctypes.data
    before = address % align
    if before == 0 or not device.capabilities.unified_memory or not array.flags.c_contiguous:
        return device.constant(array), 0
    whole = (ctypes.c_uint8 * (before + array.nbytes)).from_address(address - before)
    return device.constant(np.frombuffer(memoryview(whole), dtype=np.uint8)), before // (
        itemsize or array.itemsize
    )
