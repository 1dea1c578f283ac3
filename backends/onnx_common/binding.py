"""Memory bound to the inputs and outputs of ONNX Runtime's sessions, and its exceptions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as native

from hetero.backends.memory import Tensor
from hetero.backends.protocol import FIXED_PORTS

NATIVE_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for _, kind in inspect.getmembers(native, inspect.isclass)
      if issubclass(kind, Exception)),
)  # fmt: skip

Array: TypeAlias = npt.NDArray[Any]


class Argument(NamedTuple):
    """Memory bound to a graph's input or output."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def argument(array: Array) -> Argument:
    """Return the argument that an array is; the caller keeps the array alive."""
    return Argument(array.ctypes.data, array.dtype, array.shape)


def rows_argument(tensor: Tensor, m: int) -> Argument:
    """Return the first m rows of a tensor."""
    return Argument(tensor.address, tensor.dtype, (m, *tensor.shape[1:]))


def io_binding(
    session: ort.InferenceSession,
    inputs: Mapping[str, Argument],
    outputs: Mapping[str, Argument],
) -> ort.IOBinding:
    """Fix the addresses of a session's inputs and outputs."""
    binding = session.io_binding()
    for name, (address, dtype, shape) in inputs.items():
        binding.bind_input(name, "cpu", 0, dtype.type, shape, address)
    for name, (address, dtype, shape) in outputs.items():
        binding.bind_output(name, "cpu", 0, dtype.type, shape, address)
    return binding


class SessionLaunch(NamedTuple):
    """One graph to run on fixed addresses."""

    session: ort.InferenceSession
    binding: ort.IOBinding

    @property
    def bound(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what to call, and with what."""
        return self.session.run_with_iobinding, (self.binding,)


class Copied(NamedTuple):
    """Elements to copy by the calling thread: columns that no graph's input or output can be."""

    target: Array
    source: Array

    @property
    def bound(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what to call, and with what."""
        return np.copyto, (self.target, self.source)


class HostStep(NamedTuple):
    """A computation of the host on arrays, between sessions that it runs itself."""

    compute: Callable[[Mapping[str, Array]], None]
    arrays: Mapping[str, Array]

    @property
    def bound(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what to call, and with what."""
        return self.compute, (self.arrays,)


Launch: TypeAlias = SessionLaunch | Copied | HostStep


def rows_between(tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Return tokens [start, stop) of every tensor that has tokens."""
    return {
        port: tensor if port in FIXED_PORTS else tensor.rows(start, stop)
        for port, tensor in tensors.items()
    }
