"""Matmuls with integer activations: graphs of 16-bit or 8-bit codes, and the rounding around them.

Scales of activations are constants of a graph. So each row of x is divided by its largest magnitude
on the host and rounded to codes of [-1, 1], and each row of the weight is divided by a power of two
that brings its norm to [0.5, 1) (`row_units`); the result has codes of [-REACH, REACH] and is
multiplied back. What does not fit is computed again at half the size, which ends, since
|y| ≤ norm · √k. So an element depends on its own rows of x and of the weight alone: cutting tokens
or features changes no bit. Weights keep their scales, one for each group of 32, or where those are
alike, one for each row (QNN's per-channel form) or for the whole weight (per tensor); groups do
not go with 8-bit activations.

The schedule decides the node (docs/qnn.md): with 16-bit activations a MatMul and a 1×1 convolution
are the same to it, with 8-bit ones the convolution moves less data, for 256 tokens of 2048×8192 a
sixth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from hetero.backends import ops
from hetero.backends.formats import GROUP_SIZE, StorageFormat
from hetero.backends.onnx_common import packing
from hetero.backends.onnx_common.binding import Array, argument
from hetero.backends.onnx_common.builder import GraphBuilder
from hetero.backends.qnn.shared_memory import io_binding
from hetero.backends.weights import PackedWeight, padded

Activations: TypeAlias = Literal["float16", "int16", "int8"]
ACTIVATIONS: tuple[Activations, ...] = ("float16", "int16", "int8")
OPSET = 21
REACH = 2.0  # largest result with a code, over the size of x and the norm of the row
F32 = np.float32


@dataclass(frozen=True)
class Coding:
    """Unsigned codes of [-1, 1] around `zero`, `steps` to each side."""

    dtype: type[np.unsignedinteger]
    zero: int
    steps: int


CODINGS = {"int16": Coding(np.uint16, 32768, 32767), "int8": Coding(np.uint8, 128, 127)}


def codes_of(weight: PackedWeight) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Signed codes [n, K] and scales [n, K / 32] of a quantised weight; [n, 1] of its rows."""
    if weight.storage.scales == "row":
        assert weight.scales is not None
        codes = np.zeros((weight.n, padded(weight.k, GROUP_SIZE)), np.int8)
        codes[:, : weight.k] = weight.codes()
        return codes, weight.scales.reshape(-1, 1)[: weight.n]
    staged = packing.stage(weight)
    raw = staged["weight"].array.reshape(weight.n, -1)
    if weight.storage is StorageFormat.Q4:
        raw = np.stack((raw & 15, raw >> 4), axis=-1).reshape(weight.n, -1)
        return raw.astype(np.int8) - np.int8(8), staged["scales"].array
    return (raw ^ np.uint8(128)).view(np.int8), staged["scales"].array


def has_row_scales(weight: PackedWeight) -> bool:
    """Whether all groups of a row have the same scale, in every row."""
    return bool((np.ptp(codes_of(weight)[1], axis=1) == 0).all())


def row_units(weight: PackedWeight) -> npt.NDArray[np.float32]:
    """What rows are divided by, [n]: the power of two that brings the norm of each to [0.5, 1).

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
    """Input `x` [m, K] and output `y` [m, n] are codes; y is divided by `row_units`.

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
    product(coder, weight, x, m)
    return graph.model(OPSET)


class _Coder:
    """Conversions between codes and values in a graph."""

    def __init__(self, graph: GraphBuilder, coding: Coding) -> None:
        self.graph = graph
        self._zero = graph.constant(np.array(coding.zero, coding.dtype))
        self.x_step, self.y_step = (graph.scalar(end / coding.steps) for end in (1.0, REACH))

    def values(self, codes: str, step: str) -> str:
        return self.graph.node("DequantizeLinear", codes, step, self._zero)

    def codes(self, values: str, step: str, out: str = "") -> str:
        return self.graph.node("QuantizeLinear", values, step, self._zero, out=out)

    def moved(self, kind: str, values: str, *inputs: str, step: str, **attrs: Any) -> str:
        """Values moved by a node that computes nothing: QNN wants codes on both of its sides."""
        return self.values(self.codes(self.graph.node(kind, values, *inputs, **attrs), step), step)


def _product(coder: _Coder, weight: PackedWeight, x: str, m: int) -> None:  # noqa: ARG001
    values = coder.values(x, coder.x_step)
    product = coder.graph.node("MatMul", values, _weight(coder.graph, weight))
    coder.codes(product, coder.y_step, out="y")


def _convolution(coder: _Coder, weight: PackedWeight, x: str, m: int) -> None:
    """The same numbers as `_product`, by a 1×1 convolution over m pixels."""
    graph, step = coder.graph, coder.x_step
    width = padded(weight.k, GROUP_SIZE)
    image = coder.moved("Reshape", coder.values(x, step), graph.ints(1, 1, m, width), step=step)
    channels = coder.moved("Transpose", image, step=step, perm=[0, 3, 1, 2])  # [1, K, 1, m]
    kernel = _weight(graph, weight, convolution=True)
    step = coder.y_step
    product = coder.moved("Conv", channels, kernel, step=step, kernel_shape=[1, 1])
    rows = coder.moved("Transpose", product, step=step, perm=[0, 2, 3, 1])  # [1, 1, m, n]
    coder.codes(graph.node("Reshape", rows, graph.ints(m, weight.n)), step, out="y")


def _weight(graph: GraphBuilder, weight: PackedWeight, *, convolution: bool = False) -> str:
    """[K, n], or [n, K, 1, 1] for a convolution, behind a DequantizeLinear; rows of norm below 1.

    The zero points are given: without them 4-bit weights per row come out wrong (2.7.0).
    """
    codes, scales = codes_of(weight)
    scales = scales / row_units(weight)[:, None]
    store = graph.int4 if weight.storage is StorageFormat.Q4 else graph.constant
    stored = store(codes[:, :, None, None] if convolution else np.ascontiguousarray(codes.T))
    options: dict[str, Any] = {}
    if np.ptp(scales) == 0:
        found = scales[:1, 0].reshape(())
    elif (np.ptp(scales, axis=1) == 0).all():
        found, options = scales[:, 0], {"axis": 0 if convolution else 1}
    else:
        found, options = scales.T, {"axis": 0, "block_size": GROUP_SIZE}
        if convolution:
            found, options["axis"] = scales[:, :, None, None], 1
    zeros = store(np.zeros(found.shape, np.int8))
    return graph.node("DequantizeLinear", stored, graph.constant(np.array(found)), zeros, **options)


class IntegerProduct:
    """A matmul's graph on codes, between the caller's float32 x [m, k] and y [m, n].

    `x_scale` is the scale of all of x, if it is given rather than each row's largest magnitude.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        op: ops.MatMul,
        x: Array,
        y: Array,
        *,
        coding: Coding,
        units: npt.NDArray[np.float32],
        bias: Array | None,
        x_scale: float | None = None,
    ) -> None:
        self._session, self._op, self._x, self._y = session, op, x, y
        self._coding, self._bias = coding, bias
        self._x_scale = None if x_scale is None else F32(x_scale)
        self._units = F32(REACH / coding.steps) * units  # [n], of a code of y
        self._in = np.full((len(x), padded(op.k, GROUP_SIZE)), coding.zero, coding.dtype)
        self._out = np.zeros(y.shape, coding.dtype)
        self._binding = io_binding(session, {"x": argument(self._in)}, {"y": argument(self._out)})

    def run(self) -> None:
        """Compute y."""
        sizes = self._sizes()
        clipped = self._run(sizes, np.True_)
        for _ in range(2 + self._op.k.bit_length() // 2):
            rows = clipped.any(axis=1)
            if not rows.any():
                break
            sizes[rows] *= 2
            clipped = self._run(sizes, clipped)
        if self._bias is not None:
            self._y += self._bias
        if self._op.softcap:
            self._y[:] = self._op.softcap * np.tanh(self._y / self._op.softcap)

    def _sizes(self) -> Array:
        """What codes of the largest size stand for, [m, 1]."""
        if self._x_scale is not None:
            # Codes of a small row are multiplied by a power of two: the steps of y get as fine.
            steps = self._coding.steps
            largest = np.abs(np.rint(self._x / self._x_scale)).max(axis=1, keepdims=True)
            lift = np.exp2(np.floor(np.log2(steps / largest.clip(1, steps)))).astype(F32)
            scaled: Array = self._x_scale * F32(steps) / lift
            return scaled
        sizes: Array = np.abs(self._x).max(axis=1, keepdims=True)
        sizes[sizes == 0] = 1
        return sizes

    def _codes(self, sizes: Array) -> Array:
        """Codes of x around zero, [m, k]; a given scale is divided by, as the format asks."""
        steps = self._coding.steps
        if self._x_scale is None:
            return np.rint(self._x * (steps / sizes))
        codes = np.rint(self._x / self._x_scale).clip(-steps - 1, steps)
        lift = self._x_scale * F32(steps) / sizes  # a power of two, below 1 to make y fit
        return np.rint(codes * lift).clip(-steps - 1, steps)

    def _run(self, sizes: Array, wanted: Array | np.bool) -> Array:
        """Compute the wanted elements of y from x / sizes; which of them were clipped."""
        zero, steps = self._coding.zero, self._coding.steps
        self._in[:, : self._op.k] = self._codes(sizes) + zero
        self._session.run_with_iobinding(self._binding)
        signed = self._out.astype(np.int32) - zero
        np.copyto(self._y, signed * self._units * sizes, where=wanted, casting="unsafe")
        clipped: Array = wanted & (np.abs(signed) >= steps)
        return clipped
