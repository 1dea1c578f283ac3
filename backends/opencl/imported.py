"""Memory of another allocator, an NPU's, imported by its dma-buf: tried, never assumed.

A GPU whose driver does not know some pages may copy them at every hand-over, or refuse them.
Qualcomm's drivers take the descriptor of the memory and a policy of the host's caches
(`cl_qcom_ext_host_ptr` with `cl_qcom_dmabuf_host_ptr`, `cl_qcom_ion_host_ptr` and
`cl_qcom_ext_host_ptr_iocoherent`). Which pair a phone takes its list of extensions does not say
reliably, so that all are tried on the memory itself, which the host and a launch then hand over.
(`cl_arm_import_memory` is of Mali GPUs, which no chip with a Hexagon has.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import pyopencl as cl

from hetero.backends.errors import DeviceError
from hetero.backends.memory import HostBuffer
from hetero.backends.opencl.coherence import CoherencePolicy, hands_over
from hetero.backends.opencl.failures import decoded
from hetero.backends.opencl.resources import DeviceMemory, Resources

EXTENSION: Final = "cl_qcom_ext_host_ptr"
EXT_HOST_PTR: Final = 1 << 29  # CL_MEM_EXT_HOST_PTR_QCOM
DMA_BUF, ION = 0x411D, 0x40A8  # CL_MEM_{DMABUF,ION}_HOST_PTR_QCOM
IO_COHERENT, UNCACHED, WRITE_BACK = 0x40A9, 0x40A4, 0x40A5  # CL_MEM_HOST_*_QCOM
PROBE_FLOATS: Final = 1 << 12


class _HostPointer(ctypes.Structure):
    """`cl_mem_dmabuf_host_ptr` and `cl_mem_ion_host_ptr`, which are alike."""

    _fields_ = [
        ("allocation_type", ctypes.c_uint32),
        ("host_cache_policy", ctypes.c_uint32),
        ("file", ctypes.c_int),
        ("address", ctypes.c_void_p),
    ]


class Import(NamedTuple):
    """One way to import memory: the type of its allocation and the policy of the host's caches."""

    allocation_type: int
    host_cache_policy: int

    def of(self, context: cl.Context, buffer: HostBuffer) -> DeviceMemory:
        """Return the buffer's memory in the device's address space. Raises `DeviceError`."""
        assert buffer.dma_buf is not None
        pointer = _HostPointer(*self, buffer.dma_buf, buffer.address)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR | EXT_HOST_PTR
        with decoded(f"importing {buffer.nbytes} bytes of shared memory"):
            return DeviceMemory(context, flags, hostbuf=_Described(pointer, buffer).array)


NOT_TRIED: Final = Import(0, 0)
IMPORTS: Final = tuple(
    Import(kind, policy)
    for policy in (IO_COHERENT, UNCACHED, WRITE_BACK)
    for kind in (DMA_BUF, ION)
)


class _Described:
    """A host pointer as an array of its buffer's length, as OpenCL takes it.

    The driver reads the structure there, not the array.
    """

    def __init__(self, pointer: _HostPointer, buffer: HostBuffer) -> None:
        self._kept = pointer, buffer
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (ctypes.addressof(pointer), False),
        }
        self.array = np.asarray(self)


def find_import(device: Resources, buffer: HostBuffer) -> Import | None:
    """Return the first way to import the buffer that hands values over; None if there is none."""
    if EXTENSION not in device.native.extensions.split():
        return None
    floats = min(buffer.nbytes // 12, PROBE_FLOATS)
    for way in IMPORTS:
        with _kept(buffer, 12 * floats):
            try:
                with device.mapped_as(buffer, way.of(device.context, buffer)):
                    if hands_over(device, CoherencePolicy(floats=(floats,)), buffer):
                        return way
            except DeviceError:
                continue
    return None


@contextmanager
def _kept(buffer: HostBuffer, nbytes: int) -> Iterator[None]:
    """Give the buffer's first bytes back as they were."""
    before = buffer.bytes[:nbytes].copy()
    try:
        yield
    finally:
        buffer.bytes[:nbytes] = before
