"""Memory that the Hexagon works on in place (`rpcmem`), where the platform has it.

Pages that FastRPC allocates are ordinary memory for this process, so OpenCL maps the same bytes,
and the NPU reads and writes them without a copy. The provider knows memory of its own allocator
only, by any address inside, and only if the tensor names its kind: CPU memory, host accessible, of
Qualcomm. ONNX Runtime's Python functions cannot name that kind; its compiled module can, and a
session hands out such memory (1.31, onnxruntime-qnn 2.7.0; both by trial, docs: qnn.md). A probe
decides: a sum on such memory, at addresses inside it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as native

from hetero.backends.errors import DeviceError
from hetero.backends.memory import PAGE_BYTES, HostBuffer
from hetero.backends.onnx_common import binding
from hetero.backends.onnx_common.binding import NATIVE_ERRORS, Argument, argument
from hetero.backends.ops import Add
from hetero.backends.qnn import graphs
from hetero.backends.qnn.library import FASTRPC, fastrpc
from hetero.backends.qnn.session import Target, new_session

CPU, HOST_ACCESSIBLE, QUALCOMM = 0, 5, 0x5143
UNNAMED: tuple[type[Exception], ...] = (*NATIVE_ERRORS, AttributeError, TypeError, ValueError)


class SharedMemoryError(Exception):
    """The reason why there is no shared memory here, in one line."""


class SharedBuffer(HostBuffer):
    """A buffer in shared memory; bound tensors inside it are not copied."""

    def __init__(self, pages: SharedPages) -> None:
        self.nbytes = pages.nbytes
        self.bytes = np.asarray(pages)
        self.address = pages.address
        self.dma_buf = dma_buf_of(self.address)
        self.bytes[:] = 0
        _buffers.add(self)


_buffers: weakref.WeakSet[SharedBuffer] = weakref.WeakSet()


def dma_buf_of(address: int) -> int | None:
    """Return FastRPC's descriptor of memory that it allocated, None if it has none."""
    library = fastrpc()
    find = getattr(library, "rpcmem_to_fd", None)
    if find is None:
        return None
    find.argtypes, find.restype = [ctypes.c_void_p], ctypes.c_int
    descriptor: int = find(address)
    return descriptor if descriptor >= 0 else None


class SharedPages:
    """An allocation and what keeps it; numpy takes it as an array of bytes."""

    def __init__(self, session: ort.InferenceSession, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._session = session
        kind = device_kind()
        self._value = session._sess.create_ortvalue_from_shape_and_type(
            [self.nbytes], np.uint8, kind
        )
        self.address: int = self._value.data_ptr()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


class SharedMemory:
    """The provider's allocator. Raises `SharedMemoryError` unless a sum on its memory is right."""

    def __init__(self, target: Target) -> None:
        if fastrpc() is None:
            names = " or ".join(name for group in FASTRPC.values() for name in group)
            raise SharedMemoryError(f"FastRPC ({names}) is not here")
        op, m = Add(d=64), 4
        try:
            self._session = new_session(
                replace(target, shared_memory=True), graphs.single(op, m, {}), "the probe"
            )
            self._check(self.allocate(3 * PAGE_BYTES), (m, op.d))
        except DeviceError as error:
            raise SharedMemoryError(f"the provider refuses it: {error.code}") from error
        except UNNAMED as error:
            reason = " ".join(str(error).split())[-160:]
            raise SharedMemoryError(f"it cannot be used: {reason}") from error

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Return page-aligned, zero-filled. Raises native errors."""
        pages = SharedPages(self._session, nbytes)
        if pages.address % PAGE_BYTES:
            raise SharedMemoryError("its allocations do not begin at a page")
        return SharedBuffer(pages)

    def _check(self, buffer: SharedBuffer, shape: tuple[int, int]) -> None:
        x, residual, y = (
            buffer.array(np.float32, shape, i * PAGE_BYTES + 256 * i) for i in range(3)
        )
        x[:], residual[:] = np.arange(shape[1]), 0.5
        inputs = {"x": argument(x), "residual": argument(residual)}
        self._session.run_with_iobinding(io_binding(self._session, inputs, {"y": argument(y)}))
        if not np.array_equal(y, np.arange(shape[1]) + np.full(shape, 0.5)):
            raise SharedMemoryError("a sum on it is wrong")


def device_kind() -> Any:
    """Return ONNX Runtime's name of the kind of memory."""
    return native.OrtDevice(CPU, HOST_ACCESSIBLE, QUALCOMM, 0)


def is_shared(value: Argument) -> bool:
    """Return whether an argument is in one of the buffers."""
    return any(
        buffer.address <= value.address < buffer.address + buffer.nbytes for buffer in _buffers
    )


def io_binding(
    session: ort.InferenceSession,
    inputs: Mapping[str, Argument],
    outputs: Mapping[str, Argument],
) -> ort.IOBinding:
    """Do the same as `binding.io_binding`, and bind what is in shared memory again as that."""
    made = binding.io_binding(session, inputs, outputs)
    direct = made._iobinding
    for bind, arguments in ((direct.bind_input, inputs), (direct.bind_output, outputs)):
        for name, value in arguments.items():
            if is_shared(value):
                bind(name, device_kind(), value.dtype.type, list(value.shape), value.address)
    return made
