"""The reference device: runs `compute.program`, now or when the host asks for the result."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetero.backends import checks
from hetero.backends.errors import DeviceError, WaitTimeoutError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock
from hetero.backends.memory import HostBuffer, Panels, Tensor
from hetero.backends.ops import Op, describe
from hetero.backends.optional import SupportsTransfer
from hetero.backends.protocol import (
    DEFAULT_DEADLINE_S,
    FIXED_PORTS,
    Acceptance,
    BoundCall,
    Capabilities,
    Completion,
    Device,
    DeviceInfo,
    DeviceKind,
    Kernel,
    Operand,
    WeightValue,
    check_tensors,
)
from hetero.backends.reference.compute import Program, program


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Misbehaviour on demand: every launch takes `delay_s`, launch `fail_launch` (from 0) fails."""

    delay_s: float = 0.0
    fail_launch: int | None = None


class ReferenceDevice(Device, SupportsTransfer):
    """numpy float64 on the calling thread."""

    def __init__(
        self,
        *,
        kind: DeviceKind,
        asynchronous: bool,
        graph_sizes: tuple[int, ...],
        row_alignment: int,
        token_alignment: int,
        faults: Faults,
        clock: Clock,
    ) -> None:
        self.info = DeviceInfo(backend="reference", name=platform.machine(), driver=np.__version__)
        self.capabilities = Capabilities(
            kind=kind,
            asynchronous=asynchronous,
            static_shapes=bool(graph_sizes),
            graph_sizes=graph_sizes,
            weight_formats=tuple(WeightFormat),
            row_alignment=row_alignment,
            token_alignment=token_alignment,
            early_visibility=False,
            attention_heads=True,
            experts=True,
            reads_panels=True,
        )
        self.health = checks.Health("reference")
        self.clock = clock
        self._faults = faults
        self._launches = 0
        self._queue: deque[_Launch] = deque()

    def map(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing: numpy works on the pages in place."""
        self.health.check("map")

    def accepts(self, op: Op) -> Acceptance:
        """Return everything."""
        return checks.accept_format(self.capabilities, op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """Widen the weights."""
        self.health.check(f"preparing {describe(op)}")
        checks.check_weights(op, weights)
        return _Kernel(self, op, *program(op, weights))

    def transfer(self, host: Tensor, own: Tensor, *, to_device: bool) -> BoundCall:
        """See `SupportsTransfer.transfer`."""
        return _Copy(self, *((host, own) if to_device else (own, host)))

    def drain(self, deadline_s: float) -> None:  # noqa: ARG002
        """See `Device.drain`."""
        if self._queue:
            self.retire(self._queue[-1])

    def state(self) -> str:
        """See `Device.state`."""
        return self.health.state

    def close(self) -> None:
        """Forget what is queued."""
        self.health.lose("closed")
        self._queue.clear()

    def enqueue(self, call: _Call | _Copy) -> _Launch:
        """Put a call in the queue; it starts when the one before it is over."""
        self.health.check(call.name)
        number, self._launches = self._launches, self._launches + 1
        start_s = max([self.clock.now(), *(launch.ready_s for launch in self._queue)])
        fails = number == self._faults.fail_launch
        launch = _Launch(self, call, start_s, fails)
        launch.ready_s += self._faults.delay_s
        self._queue.append(launch)
        return launch

    def retire(self, until: _Launch) -> None:
        """Compute everything in the queue up to and including `until`."""
        while not until.retired:
            self.health.check(until.call.name)
            self._queue.popleft().execute()


class _Kernel(Kernel):
    def __init__(self, device: ReferenceDevice, op: Op, run: Program, nbytes: int) -> None:
        self.device, self.op, self.program, self.nbytes = device, op, run, nbytes

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self.device.health.check(f"binding {describe(self.op)}")
        check_tensors(self.op, tensors, m, reads_panels=True)
        checks.check_token_count(self.device.capabilities, self.op, m, own=self.graph)
        return _Call(self, tensors, m)


class _Call(BoundCall):
    def __init__(self, kernel: _Kernel, tensors: Mapping[str, Operand], m: int) -> None:
        self.name, self.m = f"{describe(kernel.op)} m={m}", m
        self._kernel = kernel
        self._panels = {p: t for p, t in tensors.items() if isinstance(t, Panels)}
        self._arrays = {
            port: tensor.array if port in FIXED_PORTS else tensor.array[:m]
            for port, tensor in tensors.items()
            if isinstance(tensor, Tensor)
        }

    def run(self) -> None:
        self._kernel.device.enqueue(self).wait()

    def submit(self) -> Completion:
        if not self._kernel.device.capabilities.asynchronous:
            return super().submit()
        return self._kernel.device.enqueue(self)

    def compute(self) -> None:
        """Read the inputs, write the outputs."""
        gathered = {port: panels.gather(self.m) for port, panels in self._panels.items()}
        self._kernel.program(self._arrays | gathered)


class _Copy(BoundCall):
    def __init__(self, device: ReferenceDevice, source: Tensor, target: Tensor) -> None:
        self.name, self.m = f"copy of {source.nbytes} bytes", source.shape[0]
        self._device, self._source, self._target = device, source, target

    def run(self) -> None:
        self._device.enqueue(self).wait()

    def submit(self) -> Completion:
        return self._device.enqueue(self)

    def compute(self) -> None:
        """Copy the elements."""
        np.copyto(self._target.array, self._source.array)


class _Launch(Completion):
    """A queued call, computed when its time has come and the host looks."""

    def __init__(
        self, device: ReferenceDevice, call: _Call | _Copy, ready_s: float, fails: bool
    ) -> None:
        self.device, self.call, self.ready_s, self.fails = device, call, ready_s, fails
        self.retired = False
        self._start_s, self._took_s = ready_s, 0.0
        self._error: DeviceError | None = None

    def done(self) -> bool:
        if not self.retired:
            self.device.health.check(self.call.name)
            if self.device.clock.now() < self.ready_s:
                return False
            self.device.retire(self)
        if self._error is not None:
            raise self._error
        return True

    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        clock = self.device.clock
        give_up_s = clock.now() + deadline_s
        while not self.done():
            left_s = min(self.ready_s, give_up_s) - clock.now()
            if left_s <= 0:
                raise WaitTimeoutError("reference", self.call.name, deadline_s)
            clock.sleep(left_s)

    def span(self) -> tuple[float, float] | None:
        """Return the span of its delay and computation, as if it had not waited for the host."""
        return (self._start_s, self.ready_s + self._took_s) if self.retired else None

    def execute(self) -> None:
        """Compute, or keep the failure for `done` and `wait`."""
        self.retired = True
        begun_s = self.device.clock.now()
        try:
            if self.fails:
                self.device.health.lose(f"INJECTED_FAILURE in {self.call.name}")
                raise DeviceError("reference", self.call.name, "INJECTED_FAILURE", "none: a test")
            self.call.compute()
        except DeviceError as error:
            self._error = error
        self._took_s = self.device.clock.now() - begun_s
