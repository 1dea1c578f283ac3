"""A device of a simulated chip: real numbers from `reference`, time from a cost function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from hetero.backends import checks
from hetero.backends.errors import WaitTimeoutError
from hetero.backends.memory import HostBuffer
from hetero.backends.ops import Op, describe
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
)
from hetero.backends.simulated.chip import ChipJob, SimulatedChip

Cost: TypeAlias = Callable[[Op, int], float]


class SimulatedDevice(Device):
    """Launches take virtual time on a shared `SimulatedChip`.

    Results are computed by `inner` (None: they are left as they are) when the host learns of them.
    """

    def __init__(
        self,
        *,
        name: str,
        capabilities: Capabilities,
        cost: Cost,
        chip: SimulatedChip,
        inner: Device | None,
    ) -> None:
        self.info = DeviceInfo(backend="simulated", name=name, driver="none")
        self.capabilities, self.chip = capabilities, chip
        self.health = checks.Health("simulated")
        self.inner = inner
        self._cost = cost

    def map(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing: the memory is the host's."""
        self.health.check("map")

    def accepts(self, op: Op) -> Acceptance:
        """Return every operation in the declared formats."""
        return checks.accept_format(self.capabilities, op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """Prepare the computation, if there is one."""
        self.health.check(f"preparing {describe(op)}")
        accepted = self.accepts(op)
        if not accepted:
            raise ValueError(accepted.reason)
        checks.check_weights(op, weights)
        inner = self.inner.prepare(op, weights) if self.inner is not None else None
        return _Kernel(self, op, inner)

    def state(self) -> str:
        """See `Device.state`."""
        return self.health.state

    def close(self) -> None:
        """Refuse every later call."""
        if self.inner is not None:
            self.inner.close()
        self.health.lose("closed")

    def seconds(self, op: Op, m: int) -> float:
        """Return the virtual time of one launch alone."""
        return self._cost(op, m)


class _Kernel(Kernel):
    def __init__(self, device: SimulatedDevice, op: Op, inner: Kernel | None) -> None:
        self.device, self.op, self.inner = device, op, inner

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self.device.health.check(f"binding {describe(self.op)}")
        check_tensors(self.op, tensors, m, reads_panels=True)
        checks.check_token_count(self.device.capabilities, self.op, m, own=self.graph)
        inner = self.inner.bind(tensors, m) if self.inner is not None else None
        return _Call(self.device, self.op, m, inner)


class _Call(BoundCall):
    def __init__(self, device: SimulatedDevice, op: Op, m: int, inner: BoundCall | None) -> None:
        self.name, self.m = f"{describe(op)} m={m}", m
        self._device, self._inner = device, inner
        self._seconds = device.seconds(op, m)

    def run(self) -> None:
        self._device.health.check(self.name)
        if self._device.capabilities.asynchronous:
            self.submit().wait()
            return
        self._device.chip.run(self._device.capabilities.kind, self.name, self._seconds)
        self.compute()

    def submit(self) -> Completion:
        if not self._device.capabilities.asynchronous:
            return super().submit()
        self._device.health.check(self.name)
        kind = self._device.capabilities.kind
        job = self._device.chip.submit(kind, self.name, self._seconds)
        self.compute()
        return _Completion(self._device, self.name, job)

    def compute(self) -> None:
        """Compute the numbers, outside virtual time."""
        if self._inner is not None:
            self._inner.run()


class _Completion(Completion):
    def __init__(self, device: SimulatedDevice, call: str, job: ChipJob) -> None:
        self._device, self._call, self._job = device, call, job

    def done(self) -> bool:
        self._device.health.check(self._call)
        self._device.chip.advance()
        return self._job.end_s is not None

    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._device.health.check(self._call)
        chip = self._device.chip
        if not chip.finish(self._job, deadline_s):
            raise WaitTimeoutError("simulated", self._call, deadline_s)
        chip.clock.sleep(chip.times.wait_s)
