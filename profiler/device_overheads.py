"""Everything of a profile that is not the grid of matmuls: stages, synchronisation, and so on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock
from hetero.backends.host.folders import cache_folder
from hetero.backends.ops import Op
from hetero.backends.optional import flag_of
from hetero.backends.protocol import KINDS, Device, DeviceKind
from hetero.profiler import bandwidth, energy, non_matmul_ops, preparation
from hetero.profiler import sync as sync_costs
from hetero.profiler.environment import read_environment
from hetero.profiler.grid import Task
from hetero.profiler.options import Options
from hetero.profiler.records import (
    Bandwidth,
    Contention,
    DeviceRecord,
    DeviceSync,
    Environment,
    HostSync,
    NonMatmulPredictor,
    NonMatmulRow,
    Power,
    PreparationRow,
    Quarantine,
    Record,
)
from hetero.profiler.stages import ROW_STAGES, TOKEN_STAGES, find_stage
from hetero.profiler.storage import MaybeStorage, measure_storage
from hetero.profiler.workload import Workload

STAGE_TASK = (128, 2048)  # m and k of the matmuls whose rows show a stage
STAGE_WEIGHT = (1024, 1024)  # n and k of the matmuls whose tokens do
# When both devices are measured at once: a shared machine has bursts of seconds in which its memory
# is slow, or its two cores are threads of one, and a stretch of rounds may fall within one.
BANDWIDTH_REPEATS: Final = tuple(f"bandwidth {repeat}" for repeat in range(1, 6))
R = TypeVar("R", bound=Record)


class ConcurrentBandwidth(Record):
    """Both devices at once."""

    bandwidth: Bandwidth
    contention: tuple[Contention, ...]

    @classmethod
    def median(cls, measured: Sequence[ConcurrentBandwidth]) -> ConcurrentBandwidth:
        """Return the median of every value of measurements of the same devices and formats."""
        first = measured[0]
        return cls(
            bandwidth=_median(first.bandwidth, [x.bandwidth for x in measured]),
            contention=tuple(
                _median(entry, [x.contention[i] for x in measured])
                for i, entry in enumerate(first.contention)
            ),
        )


def _median(record: R, records: Sequence[R]) -> R:
    """Return the record with the median of each of its numbers."""
    names = [name for name, value in record if isinstance(value, float)]
    return record.model_copy(
        update={name: statistics.median(getattr(x, name) for x in records) for name in names}
    )


class MaybePower(Record):
    """Power, or why there is none."""

    power: Power | None
    note: str


class NonMatmulRows(Record):
    """The kernels that are not matmuls."""

    rows: tuple[NonMatmulRow, ...]
    predictors: tuple[NonMatmulPredictor, ...]
    quarantined: tuple[Quarantine, ...]


@dataclass(frozen=True)
class DeviceOverheads:
    """Measures the parts of a profile besides the matmuls, each on demand.

    `virtual`: null devices, whose results are not checked, on a clock that threads know nothing of.
    `checkpoint` is called between measurements and may end them by an exception.
    """

    devices: Mapping[DeviceKind, Device]
    workload: Workload
    options: Options
    weight_format: WeightFormat
    virtual: bool
    checkpoint: Callable[[], None] = lambda: None

    @property
    def alone(self) -> dict[DeviceKind, Device]:
        """Return the devices that compute whole models: of a third one only matmuls count."""
        return {kind: device for kind, device in self.devices.items() if kind in KINDS}

    @property
    def clock(self) -> Clock:
        """Return the workload's."""
        return self.workload.clock

    @property
    def repeats(self) -> int:
        """Return the samples of a cost of microseconds."""
        return 20 if self.options.quick else 60

    def environment(self) -> list[Environment]:
        """Return the machine."""
        options = self.options
        return [read_environment(gpu_core=options.gpu_core, control_core=options.control_core)]

    def device(self, kind: DeviceKind) -> list[DeviceRecord]:
        """Return a device with its stages; a quick profile looks for none."""
        device = self.devices[kind]
        flag_of(device)  # so that the capabilities say whether one is seen in time
        if self.options.quick:
            return [DeviceRecord.of(device)]
        capabilities, (tokens, k) = device.capabilities, STAGE_TASK
        if capabilities.static_shapes and capabilities.graph_sizes:
            tokens = min(capabilities.graph_sizes, key=lambda size: abs(size - STAGE_TASK[0]))
        row_stage = find_stage(lambda n: self._time_s(kind, tokens, n, k), ROW_STAGES)
        token_stage = 1
        if not capabilities.static_shapes:
            token_stage = find_stage(lambda m: self._time_s(kind, m, *STAGE_WEIGHT), TOKEN_STAGES)
        return [DeviceRecord.of(device, row_stage=row_stage, token_stage=token_stage)]

    def _time_s(self, kind: DeviceKind, m: int, n: int, k: int) -> float:
        """Return the median of a few launches, outside the grid."""
        self.checkpoint()
        runner = self.workload.runner(Task(kind, self.weight_format, "plain", m, n, k))
        if runner.cycle == 0:
            self.workload.warm_up(runner)
        return sorted(self.workload.time(runner) for _ in range(5))[2]

    def synchronisation(self, kind: DeviceKind) -> list[DeviceSync]:
        """Return costs around one device's kernels."""
        costs = sync_costs.measure_device(self.devices[kind], self.clock, repeats=self.repeats)
        if kind == "npu":
            restart_s = bandwidth.measure_restart(
                self.workload, self.weight_format, rounds=self.repeats
            )
            costs = costs.model_copy(update={"restart_s": restart_s})
        return [costs]

    def sleep(self) -> list[HostSync]:
        """Return what the host's threads pay."""
        return [sync_costs.measure_host(self.clock, repeats=self.repeats, wake=not self.virtual)]

    def storage(self) -> list[MaybeStorage]:
        """Return the rate of reading mapped files that are not in memory."""
        if self.virtual:
            return [MaybeStorage()]
        return [measure_storage(cache_folder(), self.clock)]

    def preparation(self) -> list[PreparationRow]:
        """Return preparing graphs and kernels."""
        return preparation.measure_preparation(
            self.alone,
            self.workload.pool,
            self.clock,
            self.options.grid_pairs(),
            self.options.weight_formats,
            checkpoint=self.checkpoint,
        )

    def concurrent(self) -> list[ConcurrentBandwidth]:
        """Return bandwidth and contention, one of the `BANDWIDTH_REPEATS`."""
        formats = dict.fromkeys((self.weight_format, *self.options.weight_formats))
        alone, contention = bandwidth.measure_concurrent(
            self.workload,
            tuple(formats),
            shapes=self.options.shapes,
            rounds=2 if self.options.quick else 5,
        )
        return [ConcurrentBandwidth(bandwidth=alone, contention=contention)]

    def power(self) -> list[MaybePower]:
        """Return the power of each device and both."""
        if not self.options.power or energy.find_meter() is None:
            return [MaybePower(power=None, note=energy.ABSENT)]
        names = [*self.alone, *(["both"] if len(self.alone) == 2 else [])]
        loads = {n: bandwidth.load(self.workload, self.weight_format, n) for n in names}
        return [MaybePower(power=energy.measure_power(self.clock, loads), note="")]

    def others(self, records: Mapping[DeviceKind, DeviceRecord]) -> list[NonMatmulRows]:
        """Return the kernels that are not matmuls: checked, timed, fitted."""
        timed, quarantined = self.timed_non_matmul(records)
        return [
            NonMatmulRows(
                rows=tuple(row for row, _ in timed),
                predictors=non_matmul_ops.fit_non_matmul(
                    timed, self.options.own_ops, self.options.fitting
                ),
                quarantined=tuple(quarantined),
            )
        ]

    def timed_non_matmul(
        self,
        records: Mapping[DeviceKind, DeviceRecord],
        wanted: Callable[[DeviceKind, Op], bool] = lambda *_: True,
    ) -> tuple[list[tuple[NonMatmulRow, Op]], list[Quarantine]]:
        """Return the wanted kernels, checked and timed, and the wrong ones."""
        timed: list[tuple[NonMatmulRow, Op]] = []
        quarantined: list[Quarantine] = []
        for kind in self.alone:
            meter = non_matmul_ops.NonMatmulMeter(
                kind,
                self.devices[kind],
                self.clock,
                self.options.seed,
                cold=self.workload.caches,
                model_bytes=self.workload.cold,
                weight_format=self.weight_format,
                pool=self.workload.pool,
            )
            cases = non_matmul_ops.cases(
                records[kind],
                self.weight_format,
                quick=self.options.quick,
                blocks=self.options.blocks,
                graph=self.options.graph,
                outliers=any(x.activations.static for x in self.options.weight_formats),
            )
            cases = [case for case in cases if wanted(kind, case.op)]
            good = self._good(meter, dict.fromkeys(case.op for case in cases), quarantined)
            for case in (case for case in cases if case.op in good):
                self.checkpoint()
                timed.append((meter.time(case), case.op))
        return timed, quarantined

    def _good(
        self,
        meter: non_matmul_ops.NonMatmulMeter,
        wanted: Mapping[Op, Any],
        quarantined: list[Quarantine],
    ) -> set[Op]:
        """Return the operations that the device takes and computes correctly.

        Wrong ones are listed.
        """
        good = set()
        for op in wanted:
            self.checkpoint()
            if not meter.device.accepts(op):
                continue
            problem = None if self.virtual else meter.check(op)
            if problem is None:
                good.add(op)
            else:
                quarantined.append(problem)
        return good
