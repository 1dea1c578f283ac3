"""Pre-bound launches and their completion.

Every kernel's argument 0 is an int32 count of work, and a launch with count 0 writes nothing: that
is how a launch is warmed up when it is bound (PoCL specialises a kernel for its local size at the
first launch, 30 ms). A `Tensor` argument becomes two kernel arguments, `__global T *x, uint x_at`:
its buffer and the offset of its first element. `InPanels` becomes three.

What the host sees. Where memory is coherent nothing is done. Another GPU with unified memory works
in place, and OpenCL makes writes visible where a buffer is mapped and unmapped: inputs before the
launches, outputs after them (no data moves). Other devices hold copies: inputs are copied in before
the launches, outputs out after them. With explicit hand-overs a call does neither: its caller does,
by `transfer`, where another processor has written or will read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from hetero.backends.errors import WaitTimeoutError
from hetero.backends.host.time_limits import time_limit
from hetero.backends.memory import Tensor
from hetero.backends.opencl.failures import BACKEND, decoded
from hetero.backends.opencl.invokers import share_invokers
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.self_test.program_compiler import Variant, argument_kinds
from hetero.backends.ops import STATE_PORTS, Op, describe
from hetero.backends.protocol import (
    DEFAULT_DEADLINE_S,
    FIXED_PORTS,
    BoundCall,
    Completion,
    Kernel,
    Operand,
    check_tensors,
    parts_of,
)

share_invokers()


@dataclass(frozen=True)
class InPanels:
    """An operand that a kernel reads panel by panel (PANELS in common.cl); one tensor is one panel.

    Becomes three kernel arguments: the buffer of all panels, a table, their count.
    """

    operand: Operand

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return the panels. Raises `ValueError` unless they are in one buffer."""
        parts = parts_of(self.operand)
        if any(part.buffer is not parts[0].buffer for part in parts):
            raise ValueError("the panels of an operand must be in one buffer")
        return parts

    def table(self) -> npt.NDArray[np.int32]:
        """Return [panels, 4]: first column, end, element of its token 0, elements of a token."""
        rows, start = [], 0
        for part in self.parts:
            width = part.shape[1]
            rows.append((start, start + width, _first_element(part) - start, width))
            start += width
        return np.array(rows, dtype=np.int32)


Argument: TypeAlias = Tensor | InPanels | cl.Buffer | int | float
Native: TypeAlias = cl.Buffer | np.generic
Size: TypeAlias = tuple[int, ...]

INPUT_PORTS = frozenset(
    {
        "x",
        "residual",
        "gates",
        "tokens",
        "qkv",
        "position",
        "k_cache",
        "v_cache",
        "codes",
        "table",
        "score_sums",
        "routes",
        *STATE_PORTS,
    }
)
OUTPUT_PORTS = frozenset({"y", "sum", "out", "k_cache", "v_cache", "score_sums", *STATE_PORTS})
SPIN_S = 200e-6
LONGEST_SLEEP_S = 200e-6  # bounds how late the end of a long launch is noticed


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a program with its sizes and arguments. `args[0]` is the count of work."""

    program: cl.Program
    name: str
    global_size: Size
    local_size: Size
    args: tuple[Argument, ...]

    @property
    def count(self) -> int:
        """Return the work of this launch, the kernel's argument 0."""
        assert isinstance(self.args[0], int)
        return self.args[0]


class OpenCLKernel(Kernel):
    """A compiled operation: `launches(tensors, m)` lists what a binding enqueues.

    `keep` are the weight buffers that the launches use; `nbytes` counts device copies of weights.
    """

    def __init__(
        self,
        device: Resources,
        op: Op,
        launches: Callable[[Mapping[str, Operand], int], Sequence[KernelLaunch]],
        *,
        keep: Sequence[object] = (),
        nbytes: int = 0,
    ) -> None:
        self.op = op
        self.nbytes = nbytes
        self._device = device
        self._launches = launches
        self._keep = tuple(keep)

    def bind(self, tensors: Mapping[str, Operand], m: int) -> OpenCLCall:
        """See `Kernel.bind`. Kernels are specialised here, not at the first run.

        But where calls are fused: one that only runs in fused launches needs no kernel objects,
        which are half of what binding takes.
        """
        self._device.check()
        check_tensors(self.op, tensors, m, reads_panels=True)
        name = describe(self.op)
        with decoded(f"binding {name}"):
            return OpenCLCall(
                self._device,
                name,
                m,
                self._launches(tensors, m),
                tensors,
                keep=(self,),
                deferred=self._device.fuses,
            )


class OpenCLCall(BoundCall):
    """A flat list of launches with every argument set.

    `clSetKernelArg` retains nothing, so the call keeps what its launches point to. `launches` are
    those, each with its arguments as they are set: at once, or `deferred` to `finish_binding`.
    """

    fusible = True

    def __init__(
        self,
        device: Resources,
        name: str,
        m: int,
        launches: Sequence[KernelLaunch],
        tensors: Mapping[str, Operand],
        *,
        keep: tuple[object, ...] = (),
        deferred: bool = False,
    ) -> None:
        self.name = name
        self.m = m
        self.device = device
        self._keep: list[object] = [*keep, *tensors.values()]
        self.launches = [(launch, self._values(launch)) for launch in launches]
        if not deferred:
            self.finish_binding()
        in_place = device.coherent or device.explicit_handovers
        self._inputs = [] if in_place else _regions(device, tensors, INPUT_PORTS, m)
        self._outputs = [] if in_place else _regions(device, tensors, OUTPUT_PORTS, m)

    def finish_binding(self) -> None:
        """See `BoundCall.finish_binding`: make the kernel objects of the launches."""
        _ = self._bound

    @cached_property
    def _bound(self) -> list[tuple[cl.Kernel, Size, Size]]:
        with decoded(f"binding {self.name}"):
            return [self._bind(*launch) for launch in self.launches]

    def submit(self) -> OpenCLCompletion:
        """Enqueue every launch in order and flush."""
        completion = self.enqueue()
        try:
            self.device.queue.flush()
        except cl.Error as error:
            raise self.device.failed(f"launching {self.name}", error.code) from error
        return completion

    def enqueue(self) -> OpenCLCompletion:
        """Enqueue every launch in order."""
        device = self.device
        device.check()
        queue = device.queue
        try:
            for region in self._inputs:
                region.publish(device)
            first: cl.Event | None = None
            for kernel, global_size, local_size in self._bound:
                last = cl.enqueue_nd_range_kernel(queue, kernel, global_size, local_size)
                first = first or last
            for output in self._outputs:
                last = output.fetch(device)
        except cl.Error as error:
            raise device.failed(f"launching {self.name}", error.code) from error
        return OpenCLCompletion(self, first or last, last)

    def run(self) -> None:
        """Submit and wait."""
        self.submit().wait()

    def _values(self, launch: KernelLaunch) -> Sequence[Native]:
        return [value for argument in launch.args for value in self._native(argument)]

    def _bind(self, launch: KernelLaunch, values: Sequence[Native]) -> tuple[cl.Kernel, Size, Size]:
        """Return a kernel object of its own with its arguments set.

        Specialised by an empty launch.
        """
        kernel = cl.Kernel(launch.program, launch.name)
        for at, value in enumerate(values):
            kernel.set_arg(at, value)
        _specialise(self.device, launch, kernel, argument_kinds(values))
        return kernel, launch.global_size, launch.local_size

    def _native(self, argument: Argument) -> tuple[Native, ...]:
        match argument:
            case Tensor():
                buffer = self.device.map(argument.buffer)
                self._keep.append(buffer)
                return buffer, np.uint32(_first_element(argument))
            case InPanels():
                parts, table = argument.parts, self.device.constant(argument.table())
                buffer = self.device.map(parts[0].buffer)
                self._keep += [buffer, table]
                return buffer, table, np.int32(len(parts))
            case int():
                return (np.int32(argument),)
            case float():
                return (np.float32(argument),)
            case _:
                self._keep.append(argument)
                return (argument,)


class OpenCLCompletion(Completion):
    """Rests on the event of the call's last command; keeps the call alive until then.

    Begins with `first`.
    """

    def __init__(self, call: OpenCLCall, first: cl.Event, last: cl.Event) -> None:
        self._call = call
        self._first = first
        self._last = last

    def done(self) -> bool:
        """See `Completion.done`."""
        try:
            status: int = self._last.command_execution_status
        except cl.Error as error:
            raise self._call.device.failed(f"running {self._call.name}", error.code) from error
        if status < 0:
            raise self._call.device.failed(f"running {self._call.name}", status)
        return status == cl.command_execution_status.COMPLETE

    def span(self) -> tuple[float, float] | None:
        """See `Completion.span`."""
        offset_s = self._call.device.clock_offset_s
        if offset_s is None:
            return None
        with decoded(f"timing {self._call.name}"):
            start_ns, end_ns = self._first.profile.start, self._last.profile.end
        return start_ns * 1e-9 + offset_s, end_ns * 1e-9 + offset_s

    def block(self) -> None:
        """Wait by `clWaitForEvents`."""
        with decoded(f"waiting for {self._call.name}"):
            self._last.wait()

    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """Poll the event: busily at first, then in naps of a twentieth of the time waited."""
        start_s = time.perf_counter()
        while not self.done():
            waited_s = time.perf_counter() - start_s
            if waited_s > deadline_s and waited_s > (limit_s := time_limit(deadline_s)):
                raise WaitTimeoutError(BACKEND, self._call.name, limit_s)
            if waited_s > SPIN_S:
                time.sleep(min(waited_s / 20, LONGEST_SLEEP_S))


def _specialise(device: Resources, launch: KernelLaunch, kernel: cl.Kernel, kinds: str) -> None:
    """Launch with count 0, once per program, kernel and sizes."""
    key = (id(launch.program), launch.name, launch.global_size, launch.local_size)
    if key in device.specialised:
        return
    device.specialised.add(key)
    kernel.set_arg(0, np.int32(0))
    variant = Variant(launch.name, launch.global_size, launch.local_size, kinds)
    with device.programs.first_launch(launch.program, variant):
        cl.enqueue_nd_range_kernel(device.queue, kernel, launch.global_size, launch.local_size)
        device.queue.finish()
    kernel.set_arg(0, np.int32(launch.count))


def _first_element(tensor: Tensor) -> int:
    element, rest = divmod(tensor.offset_bytes, tensor.dtype.itemsize)
    if rest:
        raise ValueError(
            f"a {tensor.dtype} tensor starts at a multiple of {tensor.dtype.itemsize} bytes of its "
            f"buffer, got {tensor.offset_bytes}"
        )
    return element


@dataclass(frozen=True)
class Region:
    """The part of a buffer that a call reads or writes, and the same bytes on the host.

    `copied`: they are in other memory; else the same, where mapping makes writes visible.
    """

    buffer: cl.Buffer
    offset: int
    host: npt.NDArray[np.uint8]
    copied: bool

    @classmethod
    def of(cls, device: Resources, own: Tensor, host: Tensor | None = None) -> Region:
        """Return the part of its buffer that a tensor takes.

        `host` is another tensor of its size where the host has those bytes.
        """
        on_host = own if host is None else host
        start = on_host.offset_bytes
        pages = on_host.buffer.bytes[start : start + on_host.nbytes]
        copied = on_host.buffer is not own.buffer or not device.unified_memory
        return cls(device.map(own.buffer), own.offset_bytes, pages, copied)

    def publish(self, device: Resources) -> cl.Event:
        """Let the device see what the host wrote, once the event is complete."""
        if not self.copied:  # other flags may fetch what the device has over what the host wrote
            return self._map(device, cl.map_flags.WRITE_INVALIDATE_REGION)
        device.copies += 1
        return cl.enqueue_copy(
            device.queue, self.buffer, self.host, dst_offset=self.offset, is_blocking=False
        )

    def fetch(self, device: Resources) -> cl.Event:
        """Let the host see what the device wrote, once the event is complete."""
        if not self.copied:
            return self._map(device, cl.map_flags.READ)
        device.copies += 1
        return cl.enqueue_copy(
            device.queue, self.host, self.buffer, src_offset=self.offset, is_blocking=False
        )

    def _map(self, device: Resources, flags: cl.map_flags) -> cl.Event:
        device.maps += 1
        view, _ = cl.enqueue_map_buffer(
            device.queue,
            self.buffer,
            flags,
            self.offset,
            self.host.shape,
            np.dtype(np.uint8),
            is_blocking=False,
        )
        event: cl.Event = view.base.release(device.queue)
        return event


def _regions(
    device: Resources, tensors: Mapping[str, Operand], ports: frozenset[str], m: int
) -> list[Region]:
    """Return the rows of each port that a call touches; caches and positions whole."""
    regions = []
    for port, operand in tensors.items():
        for tensor in parts_of(operand) if port in ports else ():
            used = tensor if port in FIXED_PORTS else tensor.rows(0, m)
            regions.append(Region.of(device, used))
    return regions
