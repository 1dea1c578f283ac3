"""The OpenCL device: context, in-order queue, mapped buffers, programs, the table of kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from hetero.backends import ops
from hetero.backends.checks import check_weights
from hetero.backends.errors import DeviceError, DeviceLostError
from hetero.backends.memory import HostBuffer
from hetero.backends.opencl import (
    attention,
    elementwise,
    embed,
    matmul,
    norm,
    pocl_repair,
    rope,
    tuning,
)
from hetero.backends.opencl import platform as _platform
from hetero.backends.opencl.calls import Launch, OpenCLKernel
from hetero.backends.opencl.failures import BACKEND, FATAL, code_name, decoded, device_error
from hetero.backends.opencl.program import ProgramCache
from hetero.backends.ops import Op, describe
from hetero.backends.protocol import (
    Acceptance,
    Capabilities,
    Device,
    DeviceInfo,
    WeightValue,
)
from hetero.backends.weights import PackedWeight

Prepare: TypeAlias = Callable[["OpenCLDevice", Any, Mapping[str, WeightValue]], OpenCLKernel]

PREPARE: dict[type[Op], Prepare] = {
    ops.MatMul: matmul.prepare_matmul,
    ops.Embed: embed.prepare_embed,
    ops.RMSNorm: norm.prepare_norm,
    ops.LayerNorm: norm.prepare_norm,
    ops.Rope: rope.prepare_rope,
    ops.Attention: attention.prepare_attention,
    ops.GatedAct: elementwise.prepare_gated_act,
    ops.Add: elementwise.prepare_add,
}


class OpenCLDevice(Device):
    """One OpenCL device. Options are those of `hetero.backends.opencl.open`.

    For kernels: `native`, `queue`, `context`, `programs` and `tuning`. `copies` counts copies
    enqueued for tensors, which stays 0 on unified memory. `worker_cpu` is the core that PoCL's
    worker is pinned to (a process has one worker, so the device opened last decides), None if it is
    not pinned.
    """

    def __init__(
        self,
        *,
        cpu: int | None = None,
        platform: str | None = None,
        family: str | None = None,
        unified_memory: bool | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        forced = tuning.find(family) if family is not None else None
        directory = cache_dir or _platform.default_cache_dir()
        found = _platform.find_device(wanted=platform, cpu=cpu, cache_dir=directory)
        flags = pocl_repair.cpu_flags() if found.is_pocl else frozenset[str]()
        native = found.device
        self.tuning = forced or tuning.detect(native.platform.name, native.name, flags)
        self.info = _info(found, self.tuning.family)
        with decoded(f"opening {native.name}"):
            self.context = cl.Context([native])
            self.queue = cl.CommandQueue(self.context)
        self.programs = ProgramCache(
            self.context,
            native,
            key=self.info.fingerprint,
            directory=None if found.is_pocl else directory / "programs",
        )
        unified = bool(native.host_unified_memory)
        self.capabilities = _capabilities(
            native, unified if unified_memory is None else unified_memory
        )
        self.copies = 0
        self.worker_cpu = found.worker_cpu
        self.native = native
        self._mapped: weakref.WeakKeyDictionary[HostBuffer, cl.Buffer] = weakref.WeakKeyDictionary()
        self._warm: set[tuple[object, ...]] = set()
        self.rope_tables: dict[ops.Rope, tuple[cl.Buffer, cl.Buffer]] = {}
        self._scratch: cl.Buffer | None = None
        self._lost = ""
        self._shared: cl.Buffer | None = None

    def map(self, buffer: HostBuffer) -> cl.Buffer:
        """The buffer's pages on unified memory, else device memory of the same size."""
        self.check()
        if buffer not in self._mapped:
            with decoded(f"mapping {buffer.nbytes} bytes"):
                self._mapped[buffer] = self._buffer(buffer.bytes, cl.mem_flags.READ_WRITE)
        return self._mapped[buffer]

    def constant(self, array: npt.NDArray[Any]) -> cl.Buffer:
        """Read-only memory with the array's contents: the array itself on unified memory."""
        self.check()
        contiguous = np.ascontiguousarray(array)
        with decoded(f"mapping {contiguous.nbytes} bytes of weights"):
            if self.capabilities.unified_memory:
                return self._buffer(contiguous, cl.mem_flags.READ_ONLY)
            copied = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
            return cl.Buffer(self.context, copied, hostbuf=contiguous)

    def vector_weight(
        self, op: Op, weights: Mapping[str, WeightValue], name: str, length: int
    ) -> cl.Buffer:
        """A weight that is a vector of `length` floats."""
        value = weights[name]
        if isinstance(value, PackedWeight) or value.shape != (length,):
            raise ValueError(f"{describe(op)} takes {name} as a vector of {length} floats")
        return self.constant(np.asarray(value, dtype=np.float32))

    def scratch(self, nbytes: int) -> cl.Buffer:
        """Device memory for results between the launches of one call.

        All calls share it: the queue is in order, so no two calls use it at once.
        """
        if self._scratch is None or self._scratch.size < nbytes:
            with decoded(f"allocating {nbytes} bytes"):
                self._scratch = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(nbytes, 4096))
        return self._scratch

    def shared_scratch(self, nbytes: int) -> cl.Buffer:
        """Device memory that holds data between two launches of one call only: every call uses the
        same memory, since the queue is in order.
        """
        if self._shared is None or self._shared.size < nbytes:
            self._shared = self.scratch(max(nbytes, SHARED_SCRATCH_BYTES, 2 * _size(self._shared)))
        return self._shared

    def accepts(self, op: Op) -> Acceptance:
        """See `Device.accepts`."""
        if type(op) not in PREPARE:
            return Acceptance(False, f"{BACKEND} has no kernel for {type(op).__name__}")
        if isinstance(op, ops.MatMul):
            return matmul.accepts_matmul(op)
        return Acceptance(True)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> OpenCLKernel:
        """See `Device.prepare`."""
        self.check()
        accepted = self.accepts(op)
        if not accepted:
            raise ValueError(f"{describe(op)}: {accepted.reason}")
        check_weights(op, weights)
        with decoded(f"preparing {describe(op)}"):
            return PREPARE[type(op)](self, op, weights)

    def warm_up(self, launch: Launch, kernel: cl.Kernel) -> None:
        """Launch with count 0, once per program, kernel and sizes, so that PoCL specialises it."""
        key = (id(launch.program), launch.name, launch.global_size, launch.local_size)
        if key in self._warm:
            return
        self._warm.add(key)
        kernel.set_arg(0, np.int32(0))
        cl.enqueue_nd_range_kernel(self.queue, kernel, launch.global_size, launch.local_size)
        self.queue.finish()
        kernel.set_arg(0, np.int32(launch.count))

    def check(self) -> None:
        """Raise `DeviceLostError` if the device was closed or failed earlier."""
        if self._lost:
            raise DeviceLostError(
                BACKEND, "using the device", self._lost, "close the model and open it again"
            )

    def failed(self, operation: str, code: int) -> DeviceError:
        """The error of a failed command; a device that cannot recover is lost from here on."""
        error = device_error(operation, code)
        if code_name(code) in FATAL or code < cl.status_code.INVALID_VALUE:
            self._lost = str(error)
        return error

    def close(self) -> None:
        """See `Device.close`."""
        if self._lost == CLOSED:
            return
        if not self._lost:
            self.queue.finish()
        self._lost = CLOSED
        self._mapped.clear()
        self._scratch = None
        self.rope_tables.clear()
        self.programs.close()

    def _buffer(self, array: npt.NDArray[Any], access: int) -> cl.Buffer:
        if not self.capabilities.unified_memory:
            return cl.Buffer(self.context, access, array.nbytes)
        return cl.Buffer(self.context, access | cl.mem_flags.USE_HOST_PTR, hostbuf=array)


CLOSED = "it was closed"
SHARED_SCRATCH_BYTES = 1 << 20


def _size(buffer: cl.Buffer | None) -> int:
    return 0 if buffer is None else int(buffer.size)


def _info(found: _platform.Found, family: str) -> DeviceInfo:
    native = found.device
    details = {
        "platform": native.platform.version.strip(),
        "version": native.version.strip(),
        "tuning": family,
    }
    if found.is_pocl:
        details["cpu"] = pocl_repair.known_cpu_name(pocl_repair.cpu_flags())
        details["repaired"] = found.compiler_cpu or "no"
    return DeviceInfo(
        backend=BACKEND,
        name=native.name.strip(),
        driver=native.driver_version.strip(),
        details=details,
    )


def _capabilities(native: cl.Device, unified: bool) -> Capabilities:
    return Capabilities(
        kind="gpu",
        unified_memory=unified,
        asynchronous=True,
        weight_formats=matmul.WEIGHT_FORMATS,
        row_alignment=16,
        memory_limit_bytes=None if unified else int(native.global_mem_size),
    )
