"""The graph of a mixed weight: a MatMulNBits or Gemm for each part, side by side.

MatMulNBits has one scale a group and codes around one zero. Blocks with a minimum, weights
d · s · q - e · t, are taken as d · s · (q - zero) with the operator's own zero, and what is left of
each group, a `shift`, is multiplied with the group's sum of x: a matmul of k / 32 features. Codes
of 4 bits stay 4 bits; codes of 6 become 8, always split (with float activations ONNX Runtime 1.32
unpacks 8 bits in every call, which takes 100 times as long).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.backends import blocks, ops
from hetero.backends.formats import E2M1, GROUP_SIZE, Blocks, StorageFormat, activations_of
from hetero.backends.host.processor import is_arm64
from hetero.backends.onnx_common.builder import CONTRIB, GraphBuilder
from hetero.backends.onnx_common.staging import Staging, slabs, stage
from hetero.backends.ort_cpu import graphs
from hetero.backends.weights import ROW_BLOCK, PackedWeight, padded

F32 = np.float32


class WeightPart(NamedTuple):
    """Rows of one storage."""

    storage: StorageFormat
    n: int

    @property
    def bits(self) -> int:
        """Return the bits of the operator's codes, 0 for floats."""
        if not self.storage.quantised:
            return 0
        floats = self.storage.scales == "block" and self.storage.blocks.e2m1
        return 4 if self.storage.bits == 4 and not floats else 8

    @property
    def block(self) -> int:
        """Return the features that share a scale."""
        halves = self.storage.blocks.halves if self.storage.scales == "block" else 1
        return GROUP_SIZE // halves

    @property
    def shifted(self) -> bool:
        """Return whether it has a minimum."""
        return self.storage.scales == "block" and self.storage.blocks.minimum


def parts_of(weight: PackedWeight) -> tuple[WeightPart, ...]:
    """Return what `graph` and the probe of packed initializers have to know of a weight."""
    return tuple(WeightPart(part.storage, part.n) for _, part in weight.spans())


def graph(op: ops.MatMul, parts: tuple[WeightPart, ...], *, split: bool) -> bytes:
    """Return `split` as in `graphs.matmul`: for parts of 4 bits.

    8 bits are always split, but where x is rounded in groups of the same size.
    """
    made = _Graph(op)
    products = [made.product(i, part, split=split) for i, part in enumerate(parts)]
    bias = made.builder.input("bias", F32, (op.n,)) if op.bias else ""
    made.builder.output("y", F32, ("m", op.n))
    y = made.builder.node("Concat", *products, axis=1) if len(products) > 1 else products[0]
    if bias:
        y = made.builder.node("Add", y, bias)
    if op.softcap:
        y = graphs.softcapped(made.builder, y, op.softcap)
    made.builder.node("Identity", y, out="y")
    return made.builder.model()


class _Graph:
    """Nodes of x that parts share are made once."""

    def __init__(self, op: ops.MatMul) -> None:
        self.op, self.builder = op, GraphBuilder()
        self.x = self.builder.input("x", F32, ("m", op.k))
        self.width = padded(op.k, GROUP_SIZE)
        self.names: dict[str, str] = {}

    def product(self, i: int, part: WeightPart, *, split: bool) -> str:
        """Return x times a part's rows, [m, part.n]."""
        if not part.bits:
            weight = self.builder.weight(f"weight{i}", F32, (part.n, self.op.k))
            return self.builder.node("Gemm", self.x, weight, transB=1)
        rounds = not activations_of(self.op.weight_format.activations, part.storage).are_floats
        whole = rounds and part.block == GROUP_SIZE  # the operator rounds as the format does
        if whole:
            y = self._nbits(i, part, self._rows(rounds), graphs.INT8_LEVEL)
        elif part.bits == 8 or split:
            planes = self._nbits(i, part, self._planes(part.block, rounds), graphs.INT8_LEVEL)
            both = f"high{i}", f"low{i}"
            self.builder.node("Split", planes, out=both, axis=0, num_outputs=2)
            y = self.builder.node("Add", *both)
        else:
            y = self._nbits(i, part, self._rows(rounds), graphs.FLOAT_LEVEL)
        if not part.shifted:
            return y
        shift = self.builder.weight(f"shift{i}", F32, (self.width // GROUP_SIZE, part.n))
        return self.builder.node("Add", y, self.builder.node("MatMul", self._sums(rounds), shift))

    def _nbits(self, i: int, part: WeightPart, x: str, level: int) -> str:
        count = self.width // part.block
        weight = self.builder.weight(
            f"weight{i}", np.uint8, (part.n, count, part.block * part.bits // 8)
        )
        scales = self.builder.weight(f"scales{i}", F32, (part.n, count))
        return self.builder.node(
            "MatMulNBits",
            *(x, weight, scales),
            domain=CONTRIB,
            K=self.width,
            N=part.n,
            bits=part.bits,
            block_size=part.block,
            accuracy_level=level,
        )

    def _blocks(self, rounds: bool) -> str:
        """Return x as [m · K/32, 32], rounded to codes or not."""
        if "blocks" not in self.names:
            padded = graphs.padded_features(self.builder, self.op, self.x)
            self.names["blocks"] = self.builder.node(
                "Reshape", padded, self.builder.ints(-1, GROUP_SIZE)
            )
        if not rounds:
            return self.names["blocks"]
        if "rounded" not in self.names:
            self.names["rounded"] = graphs.rounded(self.builder, self.names["blocks"])
        return self.names["rounded"]

    def _rows(self, rounds: bool) -> str:
        return self._reshaped(f"rows {rounds}", self._blocks(rounds), self.width)

    def _sums(self, rounds: bool) -> str:
        key = f"sums {rounds}"
        if key not in self.names:
            sums = self.builder.node(
                "ReduceSum", self._blocks(rounds), self.builder.ints(1), keepdims=0
            )
            return self._reshaped(key, sums, self.width // GROUP_SIZE)
        return self.names[key]

    def _planes(self, size: int, rounds: bool) -> str:
        """Return x as high + low, [2m, K]; high is rounded in groups of the kernel's `size`."""
        key = f"planes {size} {rounds}"
        if key not in self.names:
            whole = self._blocks(rounds)
            if size != GROUP_SIZE:
                whole = self._reshaped(f"groups {size} {rounds}", whole, size)
            high = graphs.rounded(self.builder, whole, size)
            low = self.builder.node("Sub", whole, high)
            planes = self.builder.node("Concat", high, low, axis=0)  # [2m · K/size, size]
            return self._reshaped(key, planes, self.width)
        return self.names[key]

    def _reshaped(self, key: str, x: str, width: int) -> str:
        if key not in self.names:
            self.names[key] = self.builder.node("Reshape", x, self.builder.ints(-1, width))
        return self.names[key]


def embed(op: ops.Embed, storage: StorageFormat) -> bytes:
    """Return `graphs.embed` of a table in blocks.

    Inputs `tokens`, `data` and, views of the same bytes, `floats` (d and e) and `small` (s and t).
    """
    builder, of = GraphBuilder(), storage.blocks
    builder.output("y", F32, ("m", op.d))
    builder.input("tokens", np.int32, ("m",))
    tokens = builder.node("Unsqueeze", builder.cast("tokens", np.int64), builder.ints(1))
    groups = padded(op.d, GROUP_SIZE) // GROUP_SIZE
    group, parts = np.arange(groups), np.arange(groups * of.halves)
    stride = blocks.block_count(of, groups) * of.scale_bytes

    def floats(at: npt.NDArray[np.int64], first: int) -> str:
        places = at // of.groups * (of.scale_bytes // 2) + first
        rows = graphs.rows_of(builder, tokens, "floats", np.float16, places, block=stride // 2)
        return builder.cast(rows, F32)

    def small(at: npt.NDArray[np.int64], first: int, inside: int) -> str:
        places = at // inside * of.scale_bytes + first + at % inside * ROW_BLOCK
        rows = graphs.rows_of(builder, tokens, "small", np.int8, places, block=stride)
        return builder.cast(rows, F32)

    inside = of.groups * of.halves
    scale = builder.node("Mul", floats(parts // of.halves, 0), small(parts, of.float_bytes, inside))
    codes = _codes(builder, tokens, of, groups)
    if of.e2m1:
        codes = builder.node(
            "Gather", builder.constant(np.array(E2M1, F32)), builder.cast(codes, np.int64)
        )
    codes = builder.node("Sub", codes, builder.scalar(float(of.zero)))
    grouped = builder.node("Reshape", codes, builder.ints(0, len(parts), -1))
    values = builder.node("Mul", grouped, builder.node("Unsqueeze", scale, builder.ints(2)))
    if of.minimum:
        t = small(group, of.float_bytes + inside * ROW_BLOCK, of.groups)
        least = builder.node("Mul", floats(group, ROW_BLOCK), t)
        values = builder.node("Sub", values, builder.node("Unsqueeze", least, builder.ints(2)))
    flat = builder.node("Reshape", values, builder.ints(0, -1))
    if op.d % GROUP_SIZE:
        flat = builder.slice(flat, 0, op.d, axis=1)
    builder.node("Mul", flat, builder.scalar(op.scale), out="y")
    return builder.model()


def _codes(builder: GraphBuilder, tokens: str, of: Blocks, groups: int) -> str:
    """Return the codes of rows `tokens` as floats, [m, G · 32]."""
    block = groups * of.words * ROW_BLOCK

    def words(first: int, count: int) -> npt.NDArray[np.int64]:
        places = np.arange(groups)[:, None] * of.words + first + np.arange(count)
        return places.reshape(-1) * ROW_BLOCK

    def shifted(names: str, shifts: npt.NDArray[np.uint32], mask: int) -> str:
        wide = builder.node("Unsqueeze", names, builder.ints(2))
        moved = builder.node("BitShift", wide, builder.constant(shifts), direction="RIGHT")
        masked = builder.node("BitwiseAnd", moved, builder.constant(np.array(mask, np.uint32)))
        return builder.node("Reshape", builder.cast(masked, F32), builder.ints(0, -1))

    every = np.concatenate([words(0, 4), words(4, of.words - 4)])
    gathered = graphs.rows_of(builder, tokens, "data", np.uint32, every, block=block)
    low = builder.slice(gathered, 0, 4 * groups, axis=1)
    codes = shifted(low, np.arange(0, 32, 4, dtype=np.uint32), 15)
    if of.bits == 4:
        return codes
    i = np.arange(16, dtype=np.uint32)
    upper = builder.slice(gathered, 4 * groups, len(every), axis=1)
    shifts = (8 * (i % 8 // 2) + 4 * (i // 8) + 2 * (i % 2)).astype(np.uint32)
    more = builder.node("Mul", shifted(upper, shifts, 3), builder.scalar(16.0))
    return builder.node("Add", codes, more)


def embed_inputs(weight: PackedWeight) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `embed` reads in place."""
    assert weight.scales is not None
    flat = weight.scales.reshape(-1)
    return {
        "data": weight.data.reshape(-1),
        "floats": flat.view(np.float16),
        "small": flat.view(np.int8),
    }


def staged(weight: PackedWeight) -> dict[str, Staging]:
    """Return arrays for the initializers of `graph`."""
    inputs: dict[str, Staging] = {}
    for i, (_, part) in enumerate(weight.spans()):
        arrays = _stage_blocks(part) if part.storage.scales == "block" else stage(part)
        inputs |= {f"{name}{i}": value for name, value in arrays.items()}
    return inputs


def _stage_blocks(weight: PackedWeight) -> dict[str, Staging]:
    of, groups = weight.storage.blocks, weight.data.shape[1]
    bits, halves = (4 if of.bits == 4 and not of.e2m1 else 8), of.halves
    codes = Staging(weight.n, (groups * halves, GROUP_SIZE // halves * bits // 8), np.uint8)
    scales = Staging(weight.n, (groups * halves,), F32)
    shift = Staging(groups, (weight.n,), F32) if of.minimum else None
    zero = 8 if bits == 4 else 16 if of.minimum else of.zero
    assert weight.scales is not None
    for part in slabs(weight):
        apart = blocks.unpacked_parts(of, weight.data[part], weight.scales[part])
        apart = apart._replace(codes=blocks.integers(of, apart.codes))
        rows = slice(part.start * ROW_BLOCK, part.stop * ROW_BLOCK)
        spread = _spread(apart.codes, zero) if bits == 8 else 1
        if bits == 4:
            pairs = apart.codes.reshape(len(apart.codes), groups, GROUP_SIZE // 2, 2)
            codes.padded[rows] = pairs[..., 0] | pairs[..., 1] << 4
        else:
            moved = (apart.codes - np.uint8(zero)) * np.uint8(spread) + np.uint8(128)
            codes.padded[rows] = moved.reshape(len(moved), groups * halves, -1)
        scale, least = blocks.group_scales(of, apart)
        scales.padded[rows] = scale / np.float32(spread)
        if shift is not None and least is not None:
            count = min(rows.stop, weight.n) - rows.start
            left: npt.NDArray[np.float32] = zero * scale - least
            shift.array[:, rows.start : rows.start + count] = left[:count].T
    arrays = {"weight": codes, "scales": scales}
    return arrays if shift is None else {**arrays, "shift": shift}


def _spread(codes: npt.NDArray[Any], zero: int) -> int:
    """Return the power of two by which codes are multiplied, and their scales divided.

    On Arm ONNX Runtime takes codes from 0 to 255 and subtracts 128 · scale · the sum of x in
    float32: what cancels there is the less, the smaller the scale.
    """
    if not is_arm64():
        return 1
    reach = max(1, zero - int(codes.min()), int(codes.max()) - zero + 1)
    return 1 << max(0, 7 - (reach - 1).bit_length())
