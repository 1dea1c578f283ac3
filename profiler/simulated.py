"""Opens the devices of a profile as a simulated chip: its times become virtual time."""

from __future__ import annotations

from hetero.backends import simulated
from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul, Op
from hetero.backends.protocol import Capabilities, DeviceKind
from hetero.backends.simulated import ChipTimes, SimulatedChip, SimulatedDevice
from hetero.profiler.cost import CostModel
from hetero.profiler.predict import op_name
from hetero.profiler.records import DeviceProfile, Phase


def open_chip(
    profile: DeviceProfile, *, phase: Phase = "prefill", compute: bool = True, context: int = 0
) -> dict[DeviceKind, SimulatedDevice]:
    """Open both devices on one virtual clock.

    Contention is that of `phase` (and of the profile's first weight format), attention's cache
    holds `context` tokens before the call.
    """
    cost = CostModel(profile)
    measured = [entry.weight_format for entry in profile.contention if entry.phase == phase]
    chip = SimulatedChip(chip_times(cost, phase, measured[0] if measured else None))
    devices: dict[DeviceKind, SimulatedDevice] = {}
    for kind, record in profile.devices.items():
        declared = record.capabilities.model_dump()
        devices[kind] = simulated.open(
            capabilities=Capabilities(kind=kind, **declared),
            cost=_Times(cost, kind, context),
            chip=chip,
            compute=compute,
            name=record.name,
        )
    return devices


def chip_times(
    cost: CostModel, phase: Phase, weight_format: WeightFormat | None = None
) -> ChipTimes:
    """Return the costs between the devices; their contention is that of a weight format."""
    return ChipTimes(
        submit_busy_s=cost.submit_s("gpu", "busy"),
        submit_empty_s=cost.submit_s("gpu", "empty"),
        wait_s=cost.wait_s("gpu", "fast"),
        gpu_slowdown=cost.contention("gpu", phase, weight_format),
        npu_slowdown=cost.contention("npu", phase, weight_format),
    )


class _Times:
    """Seconds of a launch: what the profile predicts; 0 for operators that it does not know."""

    def __init__(self, cost: CostModel, kind: DeviceKind, context: int) -> None:
        self.cost, self.kind, self.context = cost, kind, context
        self.known = {
            (p.device, p.weight_format, p.order): p.weight_format for p in cost.profile.predictors
        }

    def __call__(self, op: Op, m: int) -> float:
        if isinstance(op, MatMul):
            return self._matmul(op, m)
        if self.cost.measured_as(self.kind, op_name(op)) is None:
            return 0.0
        return float(self.cost.other_s(self.kind, op, m, self.context).seconds)

    def _matmul(self, op: MatMul, m: int) -> float:
        """Return the operation's own format and order, else the fastest that is known."""
        wanted: WeightFormat = op.weight_format
        if (self.kind, wanted, op.order) in self.known:
            cost = self.cost.matmul_s(self.kind, wanted, m, op.n, op.k, op.order)
            return float(cost.seconds)
        times = [
            float(self.cost.matmul_s(self.kind, f, m, op.n, op.k, order).seconds)
            for kind, f, order in self.known
            if kind == self.kind
        ]
        return min(times, default=0.0)
