"""A device of a simulated chip: real numbers from `reference`, time from a model of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from hetero.backends import checks
from hetero.backends.errors import WaitTimeoutError
from hetero.backends.memory import HostBuffer, Tensor
from hetero.backends.ops import Op, describe
from hetero.backends.optional import SupportsQueueControl, SupportsTransfer
from hetero.backends.protocol import (
    DEFAULT_DEADLINE_S,
    Acceptance,
    BoundCall,
    Capabilities,
    Completion,
    Device,
    DeviceInfo,
    Kernel,
    Operand,
    WeightValue,
    check_tensors,
    whole,
)
from hetero.backends.simulated.chip import ChipJob, Load, SimulatedChip

Cost: TypeAlias = Callable[[Op, int], float]


class LaunchModel(Protocol):
    """The kernels that a device has, and the time that each launch takes as if it were alone."""

    def refusal(self, op: Op) -> str:
        """Return why there is no kernel of an operation; empty where there is one."""

    def load(self, op: Op, m: int, position: int) -> Load:
        """Return the work of m tokens, the first of them at `position` of its text."""

    def preparation_s(self, op: Op, m: int) -> float:
        """Return the seconds to prepare a graph of m tokens while a prompt waits for it."""

    def layers_share(self, op: Op) -> bool:
        """Return whether one graph serves equal operations, whatever their weights."""


class FixedCost(LaunchModel):
    """Launches of known seconds; graphs take no time."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def refusal(self, op: Op) -> str:  # noqa: ARG002
        """See `LaunchModel.refusal`."""
        return ""

    def load(self, op: Op, m: int, position: int) -> Load:  # noqa: ARG002
        """See `LaunchModel.load`."""
        return Load(self._cost(op, m))

    def preparation_s(self, op: Op, m: int) -> float:  # noqa: ARG002
        """See `LaunchModel.preparation_s`."""
        return 0.0

    def layers_share(self, op: Op) -> bool:  # noqa: ARG002
        """See `LaunchModel.layers_share`."""
        return False


class SimulatedDevice(Device, SupportsTransfer, SupportsQueueControl):
    """Launches take virtual time on a shared `SimulatedChip`.

    Results are computed by `inner`, in an order in which what is read too early is wrong
    (`SimulatedChip.run`); without one they are left as they are. `drift` multiplies
    the seconds of what is launched from now on: a device that throttles.
    """

    def __init__(
        self,
        *,
        name: str,
        capabilities: Capabilities,
        model: LaunchModel,
        chip: SimulatedChip,
        inner: Device | None,
    ) -> None:
        self.info = DeviceInfo(backend="simulated", name=name, driver="none")
        self.capabilities, self.chip = capabilities, chip
        self.health = checks.Health("simulated")
        self.inner, self.model = inner, model
        self.drift = 1.0
        self._graphs: WeakValueDictionary[tuple[Op, int], _Graph] = WeakValueDictionary()

    def map(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing: the memory is the host's."""
        self.health.check("map")

    def accepts(self, op: Op) -> Acceptance:
        """Return the operations that the model knows, in the declared formats."""
        reason = self.model.refusal(op)
        return Acceptance(False, reason) if reason else checks.accept_format(self.capabilities, op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> _Kernel:
        """Prepare the computation, if there is one."""
        self.health.check(f"preparing {describe(op)}")
        accepted = self.accepts(op)
        if not accepted:
            raise ValueError(accepted.reason)
        checks.check_weights(op, weights)
        inner = self.inner.prepare(op, weights) if self.inner is not None else None
        return _Kernel(self, op, inner)

    def prepare_graph(self, op: Op, weights: Mapping[str, WeightValue], m: int) -> Kernel:
        """See `Device.prepare_graph`: time passes, unless an equal layer has this graph."""
        kernel = self.prepare(op, weights)
        kernel.graph = m
        kernel.keeps = self._graphs.get((op, m)) if self.model.layers_share(op) else None
        if kernel.keeps is None:
            self.chip.clock.sleep(self.drift * self.model.preparation_s(op, m))
            kernel.keeps = self._graphs[op, m] = _Graph()
        return kernel

    def transfer(self, host: Tensor, own: Tensor, *, to_device: bool) -> BoundCall:
        """See `SupportsTransfer.transfer`."""
        source, target = (host, own) if to_device else (own, host)
        return _Copy(self, source, target)

    def finish(self) -> None:
        """See `SupportsQueueControl.finish`."""
        self.health.check("finish")
        self.chip.finish_queue(self.capabilities.kind)

    def set_timing(self, on: bool) -> None:
        """Do nothing: every launch knows when it ran."""

    def state(self) -> str:
        """See `Device.state`."""
        return self.health.state

    def close(self) -> None:
        """Refuse every later call."""
        if self.inner is not None:
            self.inner.close()
        self.health.lose("closed")

    def load(self, op: Op, m: int, position: int = 0) -> Load:
        """Return the work of one launch now, by the model and `drift`."""
        seconds, nbytes = self.model.load(op, m, position)
        return Load(self.drift * seconds, nbytes)

    def copy_load(self, nbytes: int) -> Load:
        """Return the work of one copy."""
        times = self.chip.times
        return Load(self.drift * (times.copy_fixed_s + times.copy_s_per_byte * nbytes))


class _Graph:
    """A prepared graph, alive as long as a kernel uses it."""


class _Kernel(Kernel):
    def __init__(self, device: SimulatedDevice, op: Op, inner: Kernel | None) -> None:
        self.device, self.op, self.inner = device, op, inner
        self.keeps: _Graph | None = None

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self.device.health.check(f"binding {describe(self.op)}")
        check_tensors(self.op, tensors, m, reads_panels=True)
        checks.check_token_count(self.device.capabilities, self.op, m, own=self.graph)
        inner = self.inner.bind(tensors, m) if self.inner is not None else None
        return _Call(self, tensors, m, inner)


class _Launched(BoundCall):
    """A call on the chip's timeline."""

    _device: SimulatedDevice

    def run(self) -> None:
        device = self._device
        if device.capabilities.asynchronous:
            self.submit().wait()
            return
        device.health.check(self.name)
        kind = device.capabilities.kind
        job = device.chip.run(kind, self.name, self.load(), self.compute)
        if job.error is not None:
            raise job.error

    def submit(self) -> Completion:
        device = self._device
        if not device.capabilities.asynchronous:
            return super().submit()
        device.health.check(self.name)
        kind = device.capabilities.kind
        return _Completion(device, device.chip.submit(kind, self.name, self.load(), self.compute))

    def load(self) -> Load:
        """Return the work of a launch that is made now."""
        raise NotImplementedError

    def compute(self) -> None:
        """Compute the numbers, outside virtual time."""
        raise NotImplementedError


class _Call(_Launched):
    def __init__(
        self, kernel: _Kernel, tensors: Mapping[str, Operand], m: int, inner: BoundCall | None
    ) -> None:
        self.name, self.m = f"{describe(kernel.op)} m={m}", m
        self._device, self._kernel, self._inner = kernel.device, kernel, inner
        position = tensors.get("position")
        self._position = None if position is None else whole(position).array

    def load(self) -> Load:
        position = 0 if self._position is None else int(self._position[0])
        return self._device.load(self._kernel.op, self.m, position)

    def compute(self) -> None:
        if self._inner is not None:
            self._inner.run()


class _Copy(_Launched):
    def __init__(self, device: SimulatedDevice, source: Tensor, target: Tensor) -> None:
        self.name, self.m = f"copy of {source.nbytes} bytes", source.shape[0]
        self._device, self._source, self._target = device, source, target

    def load(self) -> Load:
        return self._device.copy_load(self._source.nbytes)

    def compute(self) -> None:
        if self._device.inner is not None:
            np.copyto(self._target.array, self._source.array)


class _Completion(Completion):
    def __init__(self, device: SimulatedDevice, job: ChipJob) -> None:
        self._device, self._job = device, job

    def done(self) -> bool:
        self._device.health.check(self._job.name)
        ended = self._device.chip.poll(self._job)
        if ended and self._job.error is not None:
            raise self._job.error
        return ended

    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._device.health.check(self._job.name)
        if not self._device.chip.wait(self._job, deadline_s):
            raise WaitTimeoutError("simulated", self._job.name, deadline_s)
        if self._job.error is not None:
            raise self._job.error

    def span(self) -> tuple[float, float] | None:
        start_s, end_s = self._job.start_s, self._job.end_s
        return None if start_s is None or end_s is None else (start_s, end_s)
