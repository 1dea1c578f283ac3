"""The resources of an OpenCL device's kernels: context, in-order queue, memory, programs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from hetero.backends import ops
from hetero.backends.checks import Health
from hetero.backends.errors import DeviceError
from hetero.backends.memory import PAGE_BYTES, HostBuffer
from hetero.backends.opencl.failures import BACKEND, FATAL, code_name, decoded, device_error
from hetero.backends.opencl.fused_program import FusedProgram
from hetero.backends.opencl.program_cache import ProgramCache
from hetero.backends.opencl.selected import Selected
from hetero.backends.opencl.tuning import find_tuning
from hetero.backends.protocol import Device

SHARED_SCRATCH_BYTES = 1 << 20


class DeviceMemory(cl.Buffer):
    """Memory of this device.

    `address` is its address in kernels, once one has reported it; 0 before.
    """

    address = 0


class Scratch(DeviceMemory):
    """Memory that all calls of a device work in, one after the other."""


def new_context(native: cl.Device) -> cl.Context:
    """Return a context of one device."""
    return cl.Context([native])


class SvmBuffer(HostBuffer):
    """Fine-grained shared virtual memory, zero-filled; page-aligned as other buffers are."""

    def __init__(self, context: cl.Context, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        flags = cl.svm_mem_flags.READ_WRITE | cl.svm_mem_flags.SVM_FINE_GRAIN_BUFFER
        count, dtype = self.nbytes + PAGE_BYTES, np.dtype(np.uint8)
        memory = cl.svm_empty(context, flags, count, dtype)  # type: ignore[arg-type]
        start = -memory.ctypes.data % PAGE_BYTES  # OpenCL aligns to 128 bytes at most
        self.bytes = memory[start : start + self.nbytes]
        self.bytes[:] = 0
        self.address = self.bytes.ctypes.data


class Resources(Device):
    """The part of an OpenCL device that its kernels and calls use. Owned by the control thread.

    `copies` counts copies enqueued for tensors, which stays 0 on unified memory, and `maps` pairs
    of mapping and unmapping. `coherent`: host and device see each other's writes without mapping
    (see `calls`); None until it was probed. `svm`: in memory that this device allocates, which is
    fine-grained shared virtual memory (`SvmBuffer`). `explicit_handovers`: calls hand nothing over,
    their caller does (`Device.set_explicit_handovers`). `half` is fp16 arithmetic: 1 where a GPU
    has it, 0 elsewhere (a processor's is slower than its float32), 2 emulated (tests set it).
    `rounded_division`: float32 quotients can be had correctly rounded. `specialised` lists the
    launches that were warmed up, `fused_programs` the programs of fused launches. `clock_offset_s`
    is the host's clock less the device's, None while commands are not timed.
    """

    def __init__(
        self,
        selected: Selected,
        *,
        family: str | None,
        unified_memory: bool | None,
        coherent: bool | None,
        svm: bool,
    ) -> None:
        self.native = selected.device
        self.tuning = find_tuning(family if family is not None else selected.family)
        self.threads = selected.threads
        with decoded(f"opening {self.native.name}"):
            self.context = new_context(self.native)
            self.queue = cl.CommandQueue(self.context)
        self.programs = ProgramCache(self.context, self.native, selected.compiler)
        unified = bool(self.native.host_unified_memory)
        self.unified_memory = unified if unified_memory is None else unified_memory
        is_cpu = bool(self.native.type & cl.device_type.CPU)
        self.coherent = coherent if self.unified_memory else False
        self.svm = svm
        self.explicit_handovers = False
        self.half = int("cl_khr_fp16" in self.native.extensions.split() and not is_cpu)
        rounded = cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
        self.rounded_division = bool(self.native.single_fp_config & rounded)
        self.copies = self.maps = 0
        self.clock_offset_s: float | None = None
        self.specialised: set[tuple[object, ...]] = set()
        self.fused_programs: list[FusedProgram] = []
        self.rope_tables: dict[ops.Rope, tuple[cl.Buffer, cl.Buffer]] = {}
        self._mapped: weakref.WeakKeyDictionary[HostBuffer, DeviceMemory] = (
            weakref.WeakKeyDictionary()
        )
        self._scratch: Scratch | None = None
        self._health = Health(BACKEND, threads=True)

    @property
    def fuses(self) -> bool:
        """Return whether launches can be fused (`megakernel`).

        They can where memory is the host's and kernels are work-items on threads.
        """
        in_place = self.coherent or (self.unified_memory and self.explicit_handovers)
        return self.tuning.lanes == 1 and bool(in_place)

    @property
    def has_svm(self) -> bool:
        """Return whether the driver has fine-grained shared virtual memory."""
        try:
            able = int(self.native.svm_capabilities)
        except (cl.Error, AttributeError):  # of OpenCL 1.2
            return False
        return bool(able & cl.device_svm_capabilities.FINE_GRAIN_BUFFER)

    def allocate(self, nbytes: int, *, huge: bool = False) -> HostBuffer:
        """See `Device.allocate`."""
        if not self.svm:
            return super().allocate(nbytes, huge=huge)
        with decoded(f"allocating {nbytes} bytes of shared virtual memory"):
            return SvmBuffer(self.context, nbytes)

    def map(self, buffer: HostBuffer) -> DeviceMemory:
        """Return the buffer's pages on unified memory, else a copy in the device's memory."""
        self.check()
        if buffer not in self._mapped:
            memory = self.imported(buffer)
            if memory is None:
                with decoded(f"mapping {buffer.nbytes} bytes"):
                    memory = self._buffer(buffer.bytes, cl.mem_flags.READ_WRITE)
            self._mapped[buffer] = memory
        return self._mapped[buffer]

    def imported(self, buffer: HostBuffer) -> DeviceMemory | None:  # noqa: ARG002
        """Return memory of another allocator by its own descriptor; None where that is not done."""
        return None

    @contextmanager
    def mapped_as(self, buffer: HostBuffer, memory: DeviceMemory) -> Iterator[None]:
        """Map a buffer as this memory for a while."""
        self._mapped[buffer] = memory
        try:
            yield
        finally:
            self._mapped.pop(buffer, None)

    def constant(self, array: npt.NDArray[Any], *, written: bool = False) -> DeviceMemory:
        """Return memory with the array's contents: the array itself on unified memory.

        Kernels write into it only if they are said to.
        """
        self.check()
        contiguous = np.ascontiguousarray(array)
        access = cl.mem_flags.READ_WRITE if written else cl.mem_flags.READ_ONLY
        with decoded(f"mapping {contiguous.nbytes} bytes of weights"):
            return self._buffer(contiguous, access)

    def shared_scratch(self, nbytes: int) -> Scratch:
        """Return the device memory that holds data between two launches of one call only.

        Every call uses the same memory, since the queue is in order.
        """
        scratch_bytes = 0 if self._scratch is None else int(self._scratch.size)
        if self._scratch is None or scratch_bytes < nbytes:
            size = max(nbytes, SHARED_SCRATCH_BYTES, 2 * scratch_bytes)
            with decoded(f"allocating {size} bytes"):
                self._scratch = Scratch(self.context, cl.mem_flags.READ_WRITE, size)
        return self._scratch

    def check(self) -> None:
        """Raise `DeviceLostError` if the device was closed or failed earlier."""
        self._health.check("using the device")

    def failed(self, operation: str, code: int) -> DeviceError:
        """Return the error of a failed command.

        A device that cannot recover is lost from here on.
        """
        error = device_error(operation, code)
        if code_name(code) in FATAL or code < cl.status_code.INVALID_VALUE:
            self._health.lose(str(error))
        return error

    def finish(self) -> None:
        """Wait by `clFinish`."""
        self.check()
        with decoded("finishing"):
            self.queue.finish()

    def _buffer(self, array: npt.NDArray[Any], access: int) -> DeviceMemory:
        flags = cl.mem_flags
        own = flags.USE_HOST_PTR if self.unified_memory else flags.COPY_HOST_PTR
        return DeviceMemory(self.context, access | own, hostbuf=array)
