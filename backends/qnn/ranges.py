"""Keeping float32 activations inside the range of fp16, in which the Hexagon computes.

The compiler saturates at ±65504 without a word and loses digits below 6e-5. A matmul is linear, so
rows that are too large or too small are scaled by a power of two, which changes no digit. Other
operations cannot be scaled: what does not fit is an error that names the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from hetero.backends.errors import DeviceError
from hetero.backends.onnx_common.binding import Array, argument
from hetero.backends.qnn.library import BACKEND
from hetero.backends.qnn.shared_memory import io_binding

LARGEST = 65504.0
# Rows whose largest magnitude is between these go through unchanged.
COMFORTABLE = (2.0**-8, 2.0**12)


def saturated(values: Array) -> bool:
    """Return whether any value is at or beyond the end of fp16's range."""
    return bool(values.max() >= LARGEST or values.min() <= -LARGEST)


class RangeGuard:
    """Refuses inputs and outputs that fp16 cannot hold."""

    def __init__(
        self, name: str, inputs: Sequence[Array], outputs: Sequence[Array], *, keep: object
    ) -> None:
        self._name = name
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._keep = keep  # whatever owns the memory

    def before(self) -> None:
        """Raise `DeviceError` if an input is too large."""
        for values in self._inputs:
            if saturated(values):
                raise overflow(self._name)

    def after(self) -> None:
        """Raise `DeviceError` if a result was clamped."""
        for values in self._outputs:
            if saturated(values):
                raise overflow(self._name)


def overflow(name: str) -> DeviceError:
    """Return a value beyond fp16."""
    return DeviceError(
        BACKEND,
        name,
        "FP16_OVERFLOW: a value is beyond ±65504, the Hexagon's range",
        "run this model's other operations on the GPU: --device hetero",
    )


class ScaledProduct:
    """A matmul's graph on fixed memory, x [m, k] to y [m, n].

    Ordinarily it works on the caller's memory in place. Rows out of the comfortable range, and
    rows with a clamped result, go through memory of its own, scaled; a bias is scaled with them
    by the graph's input `unit` [m, 1], and a soft cap is taken of the result times `lift` [m, 1].
    What an element becomes depends on its own rows of x and of the weight alone, so that cutting
    tokens or features changes no bit.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        x: Array,
        y: Array,
        *,
        bias: bool,
        capped: bool,
        name: str,
    ) -> None:
        self._session, self._x, self._y, self._bias, self._name = session, x, y, bias, name
        self._capped = capped
        self._unit = np.ones((len(x), 1), np.float32)
        self._lift = np.ones((len(x), 1), np.float32)
        self._staged: Array | None = None
        self._binding = self._bind(x)

    def _bind(self, x: Array) -> ort.IOBinding:
        inputs = {"x": argument(x)}
        if self._bias:
            inputs["unit"] = argument(self._unit)
        if self._capped:
            inputs["lift"] = argument(self._lift)
        return io_binding(self._session, inputs, {"y": argument(self._y)})

    def run(self) -> None:
        """Compute y."""
        largest = np.maximum(self._x.max(axis=1), -self._x.min(axis=1))  # [m]
        low, high = COMFORTABLE
        scaled = (largest > high) | ((largest < low) & (largest > 0))
        if scaled.any():
            self._run_scaled(largest, scaled)
        else:
            self._session.run_with_iobinding(self._binding)
        if self._capped or (self._y.max() < LARGEST and self._y.min() > -LARGEST):
            return
        clamped = ~scaled[:, None] & (np.abs(self._y) >= LARGEST)
        if clamped.any():
            self._mend(largest, clamped)

    def _mend(self, largest: Array, clamped: Array) -> None:
        """Compute again, scaled, what was clamped; everything else is unchanged."""
        first = self._y.copy()
        self._run_scaled(largest, np.any(clamped, axis=1))
        np.copyto(self._y, first, where=~clamped)

    def _run_scaled(self, largest: Array, rows: Array) -> None:
        """Compute y with the given rows of x brought to [0.5, 1)."""
        usable = rows & np.isfinite(largest)
        exponents = np.frexp(np.where(usable, largest, 0.0))[1][:, None]  # 0 for the other rows
        if self._bias:  # a bias that grows with 1 / x could itself overflow
            exponents = np.maximum(exponents, 0)
        if self._staged is None:
            self._staged = np.empty_like(self._x)
            self._scaled_binding = self._bind(self._staged)
        np.ldexp(self._x, -exponents, out=self._staged)
        self._unit[:] = np.ldexp(np.float32(1), -exponents)
        # What a lift beyond fp16 would multiply is far beyond any cap already.
        self._lift[:] = np.minimum(np.ldexp(np.float32(1), exponents), LARGEST)
        self._session.run_with_iobinding(self._scaled_binding)
        self._unit[:] = self._lift[:] = 1
        if self._capped:
            return
        if (rows[:, None] & (np.abs(self._y) >= LARGEST)).any():
            raise overflow(self._name)
        np.ldexp(self._y, exponents, out=self._y)
