"""The null device: a timeline and a list of launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hetero.backends import checks
from hetero.backends.errors import WaitTimeoutError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock
from hetero.backends.memory import HostBuffer
from hetero.backends.ops import OUTPUT_PORTS, Op, describe
from hetero.backends.protocol import (
    DEFAULT_DEADLINE_S,
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
    whole,
)

Cost: TypeAlias = Callable[[Op, int], float]


@dataclass(frozen=True)
class LaunchRecord:
    """One launch: what ran, for how many tokens, and when, on the device's clock."""

    op: Op
    m: int
    submitted_s: float
    start_s: float
    end_s: float


class NullDevice(Device):
    """Runs launches one after another, each for as long as `cost` says."""

    def __init__(
        self,
        *,
        kind: DeviceKind,
        asynchronous: bool,
        graph_sizes: tuple[int, ...],
        weight_formats: tuple[WeightFormat, ...],
        row_alignment: int,
        token_alignment: int,
        cost: Cost,
        clock: Clock,
        poison: bool,
    ) -> None:
        self.info = DeviceInfo(backend="null", name="null", driver="none")
        self.capabilities = Capabilities(
            kind=kind,
            asynchronous=asynchronous,
            static_shapes=bool(graph_sizes),
            graph_sizes=tuple(sorted(graph_sizes)),
            weight_formats=weight_formats,
            row_alignment=row_alignment,
            token_alignment=token_alignment,
            early_visibility=False,
            attention_heads=True,
            reads_panels=True,
        )
        self.clock = clock
        self.health = checks.Health("null")
        self.launches: list[LaunchRecord] = []
        self.poison = poison
        self._cost = cost

    def map(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing."""
        self.health.check("map")

    def accepts(self, op: Op) -> Acceptance:
        """Return every operation in the declared formats."""
        return checks.accept_format(self.capabilities, op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """Check the weights and forget them."""
        self.health.check(f"preparing {describe(op)}")
        checks.check_weights(op, weights)
        return _Kernel(self, op)

    def state(self) -> str:
        """See `Device.state`."""
        return self.health.state

    def close(self) -> None:
        """Refuse every later call."""
        self.health.lose("closed")

    def launch(self, call: _Call) -> LaunchRecord:
        """Put a call on the timeline, after the one before it."""
        self.health.check(call.name)
        now_s = self.clock.now()
        start_s = max(now_s, self.launches[-1].end_s if self.launches else now_s)
        end_s = start_s + self._cost(call.op, call.m)
        record = LaunchRecord(call.op, call.m, now_s, start_s, end_s)
        self.launches.append(record)
        return record


class _Kernel(Kernel):
    def __init__(self, device: NullDevice, op: Op) -> None:
        self.device, self.op = device, op

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self.device.health.check(f"binding {describe(self.op)}")
        check_tensors(self.op, tensors, m, reads_panels=True)
        checks.check_token_count(self.device.capabilities, self.op, m, own=self.graph)
        return _Call(self.device, self.op, tensors, m)


class _Call(BoundCall):
    def __init__(self, device: NullDevice, op: Op, tensors: Mapping[str, Operand], m: int) -> None:
        self.name, self.m, self.op = f"{describe(op)} m={m}", m, op
        self._device = device
        self._outputs = [
            whole(tensors[port]).array[:m] for port in op.ports if port in OUTPUT_PORTS
        ]

    def run(self) -> None:
        self._launch().wait()

    def submit(self) -> Completion:
        if not self._device.capabilities.asynchronous:
            return super().submit()
        return self._launch()

    def _launch(self) -> _Completion:
        record = self._device.launch(self)
        if self._device.poison:
            for output in self._outputs:
                output[:] = np.nan
        return _Completion(self._device, self.name, record.end_s)


class _Completion(Completion):
    def __init__(self, device: NullDevice, call: str, end_s: float) -> None:
        self._device, self._call, self._end_s = device, call, end_s

    def done(self) -> bool:
        self._device.health.check(self._call)
        return self._device.clock.now() >= self._end_s

    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        clock = self._device.clock
        give_up_s = clock.now() + deadline_s
        while not self.done():
            if clock.now() >= give_up_s:
                raise WaitTimeoutError("null", self._call, deadline_s)
            clock.sleep(min(self._end_s, give_up_s) - clock.now())
