"""Matmuls with integer activations: graphs of 16-bit or 8-bit codes, and the rounding around them.

Scales of activations are constants of a graph. So each row is divided by its largest magnitude on
the host and rounded to codes of [-1, 1]; the result has codes of [-reach, reach], where `reach` is
twice the norm of the weight's largest row. A row whose result does not fit runs again at half the
size, which ends, since |y| ≤ norm · √k. Weights keep their scales, one for each group of 32, or
where those are alike, one for each row (QNN's per-channel form) or for the whole weight, the only
form with 8-bit activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from hetero.backends import ops
from hetero.backends.onnx_common import packing
from hetero.backends.onnx_common.binding import Array, argument, io_binding
from hetero.backends.onnx_common.builder import GraphBuilder
from hetero.backends.ops import StorageFormat
from hetero.backends.weights import GROUP_SIZE, PackedWeight, padded

Activations: TypeAlias = Literal["float16", "int16", "int8"]
ACTIVATIONS: tuple[Activations, ...] = ("float16", "int16", "int8")
OPSET = 21
REACH = 2.0
F32 = np.float32


@dataclass(frozen=True)
class Coding:
    """Unsigned codes of [-1, 1] around `zero`, `steps` to each side."""

    dtype: type[np.unsignedinteger]
    zero: int
    steps: int


CODINGS = {"int16": Coding(np.uint16, 32768, 32767), "int8": Coding(np.uint8, 128, 127)}


def codes_of(weight: PackedWeight) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Signed codes [n, K] and scales [n, K / 32] of a quantised weight."""
    staged = packing.stage(weight)
    raw = staged["weight"].array.reshape(weight.n, -1)
    if weight.storage is StorageFormat.Q4:
        raw = np.stack((raw & 15, raw >> 4), axis=-1).reshape(weight.n, -1)
        return raw.astype(np.int8) - np.int8(8), staged["scales"].array
    return (raw ^ np.uint8(128)).view(np.int8), staged["scales"].array


def has_one_scale(weight: PackedWeight) -> bool:
    """Whether all rows and groups of a weight have the same scale."""
    return bool(np.ptp(codes_of(weight)[1]) == 0)


def reach(weight: PackedWeight) -> float:
    """Largest result that has a code, for a row of x in [-1, 1]."""
    norms = np.linalg.norm(weight.dequantize(), axis=1)
    return float(REACH * norms.max()) or 1.0


def matmul(op: ops.MatMul, m: int, weight: PackedWeight, activations: Activations) -> bytes:
    """Input `x` [m, K] and output `y` [m, n] are codes; bias and cap are the host's."""
    coding, graph = CODINGS[activations], GraphBuilder()
    width = padded(op.k, GROUP_SIZE)
    zero = graph.constant(np.array(coding.zero, coding.dtype))
    x = graph.node(
        "DequantizeLinear",
        graph.input("x", coding.dtype, (m, width)),
        graph.scalar(1 / coding.steps),
        zero,
    )
    product = graph.node("MatMul", x, _weight(graph, weight))
    graph.output("y", coding.dtype, (m, op.n))
    graph.node("QuantizeLinear", product, graph.scalar(reach(weight) / coding.steps), zero, out="y")
    return graph.model(OPSET)


def _weight(graph: GraphBuilder, weight: PackedWeight) -> str:
    """[K, n] behind a DequantizeLinear.

    The zero points are given: without them 4-bit weights per row come out wrong (2.7.0).
    """
    codes, scales = codes_of(weight)
    store = graph.int4 if weight.storage is StorageFormat.Q4 else graph.constant
    stored = store(np.ascontiguousarray(codes.T))
    options: dict[str, Any] = {}
    if np.ptp(scales) == 0:
        found = scales[:1, 0].reshape(())
    elif (np.ptp(scales, axis=1) == 0).all():
        found, options = scales[:, 0], {"axis": 1}
    else:
        found, options = scales.T, {"axis": 0, "block_size": GROUP_SIZE}
    zeros = store(np.zeros(found.shape, np.int8))
    return graph.node("DequantizeLinear", stored, graph.constant(np.array(found)), zeros, **options)


class IntegerProduct:
    """A matmul's graph on codes, between the caller's float32 x [m, k] and y [m, n]."""

    def __init__(
        self,
        session: ort.InferenceSession,
        op: ops.MatMul,
        x: Array,
        y: Array,
        *,
        coding: Coding,
        reach: float,
        bias: Array | None,
    ) -> None:
        self._session, self._op, self._x, self._y = session, op, x, y
        self._coding, self._reach, self._bias = coding, reach, bias
        self._in = np.full((len(x), padded(op.k, GROUP_SIZE)), coding.zero, coding.dtype)
        self._out = np.zeros(y.shape, coding.dtype)
        self._binding = io_binding(session, {"x": argument(self._in)}, {"y": argument(self._out)})

    def run(self) -> None:
        """Compute y."""
        zero, steps = self._coding.zero, self._coding.steps
        sizes = np.abs(self._x).max(axis=1, keepdims=True)  # [m, 1]
        sizes[sizes == 0] = 1
        for _ in range(2 + self._op.k.bit_length() // 2):
            codes = np.rint(self._x * (steps / sizes)) + zero
            self._in[:, : self._op.k] = codes
            self._session.run_with_iobinding(self._binding)
            signed = self._out.astype(np.int32) - zero
            full = (np.abs(signed) >= steps).any(axis=1, keepdims=True)
            if not full.any():
                break
            sizes[full] *= 2
        np.multiply(signed, sizes * F32(self._reach / steps), out=self._y, casting="unsafe")
        if self._bias is not None:
            self._y += self._bias
        if self._op.softcap:
            self._y[:] = self._op.softcap * np.tanh(self._y / self._op.softcap)
