"""The host's work around a matmul of codes (`integer`): rounding x, and undoing it in y."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from hetero.backends import ops
from hetero.backends.formats import GROUP_SIZE
from hetero.backends.onnx_common.binding import Array, argument
from hetero.backends.qnn.integer import F32, REACH, Coding
from hetero.backends.qnn.shared_memory import io_binding
from hetero.backends.weights import padded


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
        """Return what codes of the largest size stand for, [m, 1]."""
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
        """Return the codes of x around zero, [m, k].

        A given scale is divided by, as the format asks.
        """
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
