"""Graphs of matmuls with integer activations, codes of 16 or 8 bits; `rounding` is around them.

Scales of activations are constants of a graph. So each row of x is divided by its largest magnitude
on the host and rounded to codes of [-1, 1], and each row of the weight is divided by a power of two
that brings its norm to [0.5, 1) (`row_units`); the result has codes of [-REACH, REACH] and is
multiplied back. What does not fit is computed again at half the size, which ends, since
|y| ≤ norm · √k. So an element depends on its own rows of x and of the weight alone: cutting tokens
or features changes no bit. Weights keep their scales, one for each group of 32, or where those are
alike, one for each row (QNN's per-channel form) or for the whole weight (per tensor); groups do
not go with 8-bit activations.

The schedule decides the node (docs: qnn.md): with 16-bit activations a MatMul and a 1×1 convolution
are the same to it, with 8-bit ones the convolution moves less data, for 256 tokens of 2048×8192 a
sixth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends import ops
from hetero.backends.formats import GROUP_SIZE, StorageFormat
from hetero.backends.onnx_common import staging
from hetero.backends.onnx_common.builder import GraphBuilder
from hetero.backends.weights import PackedWeight, padded

Activations: TypeAlias = Literal["float16", "int16", "int8"]
ACTIVATIONS: tuple[Activations, ...] = ("float16", "int16", "int8")
OPSET = 21
REACH = 2.0  # largest result with a code, over the size of x and the norm of the row
F32 = np.float32
# From so many codes of x on, its pixels are better laid out in two dimensions (`height`).
TALL_CODES, TALL = 5 << 19, 16


@dataclass(frozen=True)
class Coding:
    """Unsigned codes of [-1, 1] around `zero`, `steps` to each side."""

    dtype: type[np.unsignedinteger]
    zero: int
    steps: int


CODINGS = {"int16": Coding(np.uint16, 32768, 32767), "int8": Coding(np.uint8, 128, 127)}


def codes_of(weight: PackedWeight) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Return signed codes [n, K] and scales [n, K / 32] of a quantised weight.

    [n, 1] of its rows.
    """
    if weight.storage.scales == "row":
        assert weight.scales is not None
        codes = np.zeros((weight.n, padded(weight.k, GROUP_SIZE)), np.int8)
        codes[:, : weight.k] = weight.codes()
        return codes, weight.scales.reshape(-1, 1)[: weight.n]
    staged = staging.stage(weight)
    raw = staged["weight"].array.reshape(weight.n, -1)
    if weight.storage is StorageFormat.Q4:
        raw = np.stack((raw & 15, raw >> 4), axis=-1).reshape(weight.n, -1)
        return raw.astype(np.int8) - np.int8(8), staged["scales"].array
    return (raw ^ np.uint8(128)).view(np.int8), staged["scales"].array


def has_row_scales(weight: PackedWeight) -> bool:
    """Return whether all groups of a row have the same scale, in every row."""
    return bool((np.ptp(codes_of(weight)[1], axis=1) == 0).all())


def row_units(weight: PackedWeight) -> npt.NDArray[np.float32]:
    """Return what rows are divided by, [n].

    The power of two that brings the norm of each to [0.5, 1).

    Negative where the one scale of a row is, since QNN takes positive scales only.
    """
    norms = np.linalg.norm(weight.dequantize(), axis=1)
    scales = codes_of(weight)[1]
    flipped = (scales[:, 0] < 0) & has_row_scales(weight)
    units: npt.NDArray[np.float32] = np.ldexp(
        np.where(flipped, F32(-1), F32(1)), np.frexp(norms)[1]
    )
    return units


def matmul(
    op: ops.MatMul,
    m: int,
    weight: PackedWeight,
    activations: Activations,
    *,
    convolution: bool | None = None,
) -> bytes:
    """Emit a matmul of codes: input `x` [m, K], output `y` [m, n], divided by `row_units`.

    Bias and cap are the host's. `convolution` overrules the choice of the node.
    """
    if convolution is None:
        convolution = activations == "int8"
    coding, graph = CODINGS[activations], GraphBuilder()
    width = padded(op.k, GROUP_SIZE)
    x = graph.input("x", coding.dtype, (m, width))
    graph.output("y", coding.dtype, (m, op.n))
    coder = _Coder(graph, coding)
    product = _convolution if convolution else _product
    product(coder, weight, x, m, "y")
    return graph.model(OPSET)


def emit_static(
    graph: GraphBuilder, x: str, x_scale: float, weight: PackedWeight, m: int, *, peak: str
) -> str:
    """Return the nodes of a matmul inside a larger graph: floats `x` [m, k] in, floats [m, n] out.

    The same numbers as by the host (`rounding`), whose codes may differ where fp16 rounds x
    across a half. A result beyond REACH gets the last code, which is not computed again: `peak`
    [1, 1] is the largest code, over the last one.
    """
    coder = _Coder(graph, CODINGS["int8"], x_scale * CODINGS["int8"].steps)
    if (width := padded(weight.k, GROUP_SIZE)) != weight.k:
        x = graph.node("Concat", x, graph.constant(np.zeros((m, width - weight.k), F32)), axis=1)
    x = coder.values(coder.codes(x, coder.x_step), coder.x_step)
    lift, undo = coder.lifts(x)
    codes = coder.codes(graph.node("Mul", x, lift), coder.x_step)
    values = coder.values(_convolution(coder, weight, codes, m), coder.y_step)
    highest = graph.node("ReduceMax", graph.node("Abs", values), graph.ints(0, 1), keepdims=1)
    graph.node("Mul", highest, graph.scalar(1 / (REACH * coder.size)), out=peak)
    values = graph.node("Mul", values, undo)
    return graph.node("Mul", values, graph.constant(row_units(weight)[None, :]))


class _Coder:
    """Conversions between codes and values in a graph, whose largest code stands for `size`."""

    def __init__(self, graph: GraphBuilder, coding: Coding, size: float = 1.0) -> None:
        self.graph, self.steps, self.size = graph, coding.steps, size
        self._zero = graph.constant(np.array(coding.zero, coding.dtype))
        ends = (size, REACH * size)
        self.x_step, self.y_step = (graph.scalar(end / coding.steps) for end in ends)

    def values(self, codes: str, step: str) -> str:
        return self.graph.node("DequantizeLinear", codes, step, self._zero)

    def codes(self, values: str, step: str, out: str = "") -> str:
        return self.graph.node("QuantizeLinear", values, step, self._zero, out=out)

    def lifts(self, x: str) -> tuple[str, str]:
        """Return the powers of two by which rows of codes fit too, [m, 1], and what undoes them.

        Comparisons, since the Hexagon's own powers and quotients are not exact.
        """
        graph = self.graph
        largest = graph.node("ReduceMax", graph.node("Abs", x), graph.ints(1), keepdims=1)
        step, steps = self.size / self.steps, self.steps
        lift, undo = graph.scalar(1.0), graph.scalar(1.0)
        for times in (1 << i for i in range(1, steps.bit_length())):
            fits = graph.node("LessOrEqual", largest, graph.scalar((steps // times + 0.5) * step))
            lift = graph.node("Where", fits, graph.scalar(float(times)), lift)
            undo = graph.node("Where", fits, graph.scalar(1 / times), undo)
        return lift, undo

    def moved(self, kind: str, values: str, *inputs: str, step: str, **attrs: Any) -> str:
        """Return values moved by a node that computes nothing.

        QNN wants codes on both of its sides.
        """
        return self.values(self.codes(self.graph.node(kind, values, *inputs, **attrs), step), step)


def _product(coder: _Coder, weight: PackedWeight, x: str, m: int, out: str = "") -> str:  # noqa: ARG001
    values = coder.values(x, coder.x_step)
    product = coder.graph.node("MatMul", values, _weight(coder.graph, weight))
    return coder.codes(product, coder.y_step, out=out)


def height(m: int, k: int) -> int:
    """Return the rows of the image whose m pixels a convolution computes; the numbers are the same.

    What the compiler's schedules say (qnn.md, `python bench/paper.py layouts`): one row, or 8,
    moves least, but where x takes a third of VTCM 16 rows move up to half less.
    """
    return TALL if m % TALL == 0 and m * padded(k, GROUP_SIZE) >= TALL_CODES else 1


def _convolution(coder: _Coder, weight: PackedWeight, x: str, m: int, out: str = "") -> str:
    """Return the same numbers as `_product`, by a 1×1 convolution over m pixels."""
    graph, step = coder.graph, coder.x_step
    width = padded(weight.k, GROUP_SIZE)
    tall = height(m, weight.k)
    shape = graph.ints(1, tall, m // tall, width)
    image = coder.moved("Reshape", coder.values(x, step), shape, step=step)
    channels = coder.moved("Transpose", image, step=step, perm=[0, 3, 1, 2])  # [1, K, rows, …]
    kernel = _weight(graph, weight, convolution=True)
    step = coder.y_step
    product = coder.moved("Conv", channels, kernel, step=step, kernel_shape=[1, 1])
    rows = coder.moved("Transpose", product, step=step, perm=[0, 2, 3, 1])  # [1, rows, …, n]
    return coder.codes(graph.node("Reshape", rows, graph.ints(m, weight.n)), step, out=out)


def _weight(graph: GraphBuilder, weight: PackedWeight, *, convolution: bool = False) -> str:
    """Return [K, n], or [n, K, 1, 1] for a convolution, after a DequantizeLinear.

    Rows of norm below 1.

    The zero points are given: without them 4-bit weights per row come out wrong (2.7.0).
    """
    codes, scales = codes_of(weight)
    scales = scales / row_units(weight)[:, None]
    store = graph.int4 if weight.storage is StorageFormat.Q4 else graph.constant
    stored = store(codes[:, :, None, None] if convolution else np.ascontiguousarray(codes.T))
    options: dict[str, Any] = {}
    if np.ptp(scales) == 0:
        scale = scales[:1, 0].reshape(())
    elif (np.ptp(scales, axis=1) == 0).all():
        scale, options = scales[:, 0], {"axis": 0 if convolution else 1}
    else:
        scale, options = scales.T, {"axis": 0, "block_size": GROUP_SIZE}
        if convolution:
            scale, options["axis"] = scales[:, :, None, None], 1
    zeros = store(np.zeros(scale.shape, np.int8))
    return graph.node("DequantizeLinear", stored, graph.constant(np.array(scale)), zeros, **options)
