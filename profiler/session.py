"""Taking a profile: every measurement in its order, within a budget, resumable at any moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock, ManualClock, SystemClock
from hetero.backends.protocol import KINDS, Device, DeviceKind
from hetero.profiler import fit, preparation
from hetero.profiler.device_overheads import (
    BANDWIDTH_REPEATS,
    ConcurrentBandwidth,
    DeviceOverheads,
    MaybePower,
    NonMatmulRows,
)
from hetero.profiler.environment import hetero_version
from hetero.profiler.errors import ProfileError
from hetero.profiler.grid import Task
from hetero.profiler.grid_run import GridRun
from hetero.profiler.interference import find_interference
from hetero.profiler.journal import Journal, journal_path
from hetero.profiler.measure import rescale, to_means
from hetero.profiler.options import Event, Options
from hetero.profiler.parts import Parts
from hetero.profiler.records import (
    Coverage,
    DeviceProfile,
    DeviceRecord,
    DeviceSync,
    Environment,
    EveryCore,
    HostSync,
    PreparationRow,
    StageCheck,
)
from hetero.profiler.storage import MaybeStorage
from hetero.profiler.workload import Workload

# Takes a checkpoint to call between processes; see `ProfilingSession._checkpoint`.
MeasureEveryCore: TypeAlias = Callable[[Callable[[], None]], list[EveryCore]]


def profile_devices(
    devices: Mapping[DeviceKind, Device],
    options: Options | None = None,
    *,
    out: Path | None = None,
    resume: bool = False,
    clock: Clock | None = None,
    progress: Callable[[Event], None] | None = None,
    step_s: float | None = None,
    every_core: MeasureEveryCore | None = None,
) -> DeviceProfile:
    """Measure open devices.

    The caller pins the thread. Writes `out` and its journal as it goes. `step_s` is what a step of
    the runtime costs besides its launches, which is above this room, and so is what `every_core`
    measures while the devices are idle.

    Raises `ProfileError` for options that cannot be, or a journal of another run.
    """
    if not devices:
        raise ProfileError("there is no device to measure: see `hetero doctor`")
    session = ProfilingSession(
        devices,
        options or Options(),
        out=out,
        clock=clock,
        progress=progress,
        step_s=step_s,
        every_core=every_core,
    )
    return session.run(resume=resume)


class ProfilingSession:
    """One run. Everything that is finished goes through the journal, and comes back from it."""

    def __init__(
        self,
        devices: Mapping[DeviceKind, Device],
        options: Options,
        *,
        out: Path | None,
        clock: Clock | None,
        progress: Callable[[Event], None] | None,
        step_s: float | None = None,
        every_core: MeasureEveryCore | None = None,
    ) -> None:
        self._step_s = step_s
        self._measure_every_core = every_core
        self.devices = dict(devices)
        self.options = options
        self.clock = clock or SystemClock()
        self.virtual = isinstance(self.clock, ManualClock)
        self.out = out
        self.progress = progress or (lambda _: None)
        self.format = self._main_format()
        self.records: dict[DeviceKind, DeviceRecord] = {}
        self.notes: list[str] = []
        self._stretch_s = 0.0  # the longest of the stretches of both devices at once
        self._start_s = self.clock.now()

    def run(self, *, resume: bool) -> DeviceProfile:
        """Measure, fit, write."""
        header = self.options.header() | {
            "devices": {kind: d.info.fingerprint for kind, d in sorted(self.devices.items())}
        }
        path = None if self.out is None else journal_path(self.out)
        with Journal(path, header, resume=resume) as self.journal:
            self.parts = Parts(self.journal, self._before)
            self._open_workload()
            self._device_overheads()
            self._check_budget(self._until_s())
            self._matmuls()
            self._check_stages()
            profile = self._profile(finished=True)
            if self.out is not None:
                profile.save(self.out)
            self.journal.close(delete=True)
        return profile

    @property
    def spent_s(self) -> float:
        """Time since the run began, and what earlier runs that it continues have spent."""
        earlier = sum(entry["spent_s"] for entry in self.journal.of_kind("spent")[-1:])
        return self.clock.now() - self._start_s + float(earlier)

    def _main_format(self) -> WeightFormat:
        for wanted in self.options.weight_formats:
            if all(wanted in d.capabilities.weight_formats for d in self.devices.values()):
                return wanted
        raise ProfileError(
            "no requested weight format runs on every device: choose one of "
            + ", ".join(
                f"{kind}: {' '.join(d.capabilities.weight_formats)}"
                for kind, d in self.devices.items()
            )
        )

    def _open_workload(self) -> None:
        cold = 0 if self.virtual else self.options.cold_bytes
        self.workload = Workload(
            self.devices,
            clock=self.clock,
            interference=None if self.virtual else find_interference(),
            cold=cold,
            seed=self.options.seed,
        )
        self._around = DeviceOverheads(
            self.devices,
            self.workload,
            self.options,
            self.format,
            self.virtual,
            self._checkpoint,
        )
        if self.workload.small:
            size = f"{self.workload.cold / 1e6:.1f} MB"
            self.notes.append(f"weights are in the caches as in a model of {size}")
        self.grid = GridRun(
            self.workload,
            self.options,
            self.format,
            self.journal,
            partial(self._report, "matmuls"),
            virtual=self.virtual,
        )

    def _before(self, part: str) -> None:
        self._report(part)
        self._checkpoint()

    def _device_overheads(self) -> None:
        """Measure everything that is not a matmul's time."""
        around = self._around
        self.parts.take("environment", Environment, around.environment)
        for kind in self.devices:
            (self.records[kind],) = self.parts.take(
                f"{kind} stages",
                DeviceRecord,
                partial(around.device, kind),
                fits=partial(_is_of, self.devices[kind]),
            )
            if kind in KINDS:
                self.parts.take(
                    f"{kind} synchronisation", DeviceSync, partial(around.synchronisation, kind)
                )
        self.parts.take("sleep", HostSync, self._host_sync)
        self.parts.take("every core", EveryCore, self._every_core, several=True)
        self.parts.take("storage", MaybeStorage, around.storage)
        self.parts.take("preparation", PreparationRow, around.preparation, several=True)
        self._concurrent(1)
        self.parts.take("power", MaybePower, around.power)
        self.parts.take("other kernels", NonMatmulRows, partial(around.others, self.records))

    def _checkpoint(self) -> None:
        """Raise `ProfileError` where the budget is used up before the matmuls.

        Called between the measurements of every part.
        """
        self._check_budget(self.clock.now() + self.options.budget_s - self.spent_s)

    def _check_budget(self, until_s: float) -> None:
        """Raise `ProfileError` where no time is left for matmuls; the journal keeps the rest."""
        if not self.options.keep_budget or self.grid.rows or until_s > self.clock.now():
            return
        self.journal.add({"kind": "spent", "spent_s": self.spent_s})
        min_s = 10 * math.ceil(1.5 * self.spent_s / 10)
        raise ProfileError(
            f"a budget of {self.options.budget_s:.0f} s is too short here: what is no matmul took "
            f"{self.spent_s:.0f} s; go on with --resume --budget {min_s}s"
        )

    def _host_sync(self) -> list[HostSync]:
        (costs,) = self._around.sleep()
        return [costs.model_copy(update={"step_s": self._step_s})]

    def _every_core(self) -> list[EveryCore]:
        if self._measure_every_core is None:
            return []
        try:
            return self._measure_every_core(self._checkpoint)
        except DeviceError as error:  # the profile is of the devices; this is an extra
            self.notes.append(str(error))
            return []

    def _concurrent(self, count: int) -> None:
        """Measure both devices concurrently, until so many repeats are done."""
        for name in BANDWIDTH_REPEATS[:count]:
            if name not in self.parts:
                start_s = self.clock.now()
                self.parts.take(name, ConcurrentBandwidth, self._around.concurrent)
                self._stretch_s = max(self._stretch_s, self.clock.now() - start_s)

    def _matmuls(self) -> None:
        """Measure the grid, in the order of what teaches most, until it or the budget is used up.

        Now and then and at its end the devices together.
        """
        tasks = self.grid.tasks(self.records)
        wanted = max(1, math.ceil(self.options.share * len(tasks)))
        until_s = self._until_s()
        start_s, done = self.clock.now(), len(self.grid.rows)
        open_tasks = [task for task in tasks if task.key not in self.grid.rows]
        least = min(math.ceil(self.options.least * len(tasks)), wanted)
        latest_s = until_s + 2 * self.options.budget_s
        for turn in range(len(tasks)):
            left = min(wanted - len(self.grid.rows), self.options.block)
            end_s = until_s if len(self.grid.rows) >= least else latest_s
            if left <= 0 or not open_tasks or (self.grid.rows and self.clock.now() >= end_s):
                break
            passed = (len(self.grid.rows) - done) / max(wanted - done, 1)
            if math.isfinite(until_s) and until_s > start_s:
                passed = max(passed, (self.clock.now() - start_s) / (until_s - start_s))
            self._concurrent(1 + int(passed * (len(BANDWIDTH_REPEATS) - 1)))
            block = self.grid.choose(self.records, open_tasks, left, turn)
            gone = set(block)
            self._measure(block, end_s)
            open_tasks = [
                task for task in open_tasks if task not in gone and self.grid.usable(task)
            ]
            self._snapshot()
        self._concurrent(len(BANDWIDTH_REPEATS))

    def _measure(self, block: Sequence[Task], until_s: float) -> None:
        if self.grid.measure(block, until_s):
            self.journal.add({"kind": "spent", "spent_s": self.spent_s})

    def _until_s(self) -> float:
        """Return clock time at which the grid must end."""
        left_s = self.options.budget_s * (1 - self.options.reserved) - self.spent_s
        left_s -= self._stretch_s * sum(name not in self.parts for name in BANDWIDTH_REPEATS)
        return self.clock.now() + max(left_s, 0.0)

    def _check_stages(self) -> None:
        """Measure some pruned sizes; a stage that does not hold is dropped and its sizes return."""
        measure = partial(self.grid.stage_checks, self.records, self._until_s)
        self.parts.take("stage checks", StageCheck, measure, several=True)
        for kind, record in list(self.records.items()):
            checks = [c for c in self.parts["stage checks"] if c.device == kind]
            wrong = [
                c for c in checks if abs(c.measured_s / c.stage_s - 1) > self.options.stage_wrong
            ]
            if wrong:
                self.records[kind] = record.model_copy(update={"row_stage": 1, "token_stage": 1})
                self.notes.append(
                    f"{kind}: stages of {record.row_stage} rows and {record.token_stage} tokens "
                    f"did not hold for {len(wrong)} of {len(checks)} sizes and were dropped"
                )
                again = [task for task in self.grid.pruned if task.device == kind]
                self.grid.pruned = {t: s for t, s in self.grid.pruned.items() if t.device != kind}
                self._measure([t for t in again if t.key not in self.grid.rows], self._until_s())

    def _gains(self) -> list[str]:
        gains_of: list[EveryCore] = self.parts["every core"]
        if not gains_of:
            return []
        gains = ", ".join(f"{x.weight_format} {x.phase} {x.speedup:.2f} x" for x in gains_of)
        return [f"OpenCL alone on {gains_of[0].cores} cores instead of one: {gains}"]

    def _report(self, what: str) -> None:
        left_s = max(self.options.budget_s - self.spent_s, 0.0)
        self.progress(Event(what, len(self.grid.rows), self.grid.total, left_s))

    def _snapshot(self) -> None:
        """Write the records so far as a valid profile, in case the process is killed."""
        if self.out is not None:
            self._profile(finished=False).save(self.out)

    def _profile(self, *, finished: bool) -> DeviceProfile:
        rows = list(self.grid.rows.values())
        if self.options.settings.scaled:
            rows = rescale(rows, self.grid.meter.points, small=self.workload.small)
        if self.options.fitting.means:
            rows = to_means(rows)
        if not rows:
            raise ProfileError(
                f"nothing was measured in {self.options.budget_s:g} s: give a longer --budget"
            )
        self._report("fitting")
        others: list[NonMatmulRows] = self.parts["other kernels"]
        concurrent = ConcurrentBandwidth.median(
            [self.parts[x][0] for x in BANDWIDTH_REPEATS if x in self.parts]
        )
        power: MaybePower = self.parts["power"][0]
        storage: MaybeStorage = self.parts["storage"][0]
        spent_s = self.spent_s
        return DeviceProfile(
            name=self.options.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            hetero_version=hetero_version(),
            environment=self.parts["environment"][0],
            coverage=Coverage(
                quick=self.options.quick,
                budget_s=self.options.budget_s,
                spent_s=spent_s,
                grid_tasks=self.grid.total,
                measured_tasks=len(rows),
                pruned_tasks=len(self.grid.pruned),
                finished=finished and len(rows) >= self.grid.total,
                seed=self.options.seed,
            ),
            devices=self.records,
            quarantined=(*self.grid.quarantined, *others[0].quarantined),
            bandwidth=concurrent.bandwidth,
            contention=concurrent.contention,
            sync={
                kind: self.parts[f"{kind} synchronisation"][0]
                for kind in self.devices
                if kind in KINDS
            },
            host_sync=self.parts["sleep"][0],
            every_core=tuple(self.parts["every core"]),
            storage=storage.storage,
            power=power.power,
            predictors=fit.fit_all(
                self.records, rows, validate=finished, fitting=self.options.fitting
            ),
            other_predictors=others[0].predictors,
            preparation_predictors=preparation.fit_preparation(self.parts["preparation"]),
            matmuls=tuple(sorted(rows, key=lambda row: row.key)),
            others=others[0].rows,
            preparation=tuple(self.parts["preparation"]),
            references=tuple(self.grid.meter.points),
            stage_checks=tuple(self.parts.get("stage checks")),
            notes=(*self.notes, *self._gains(), *filter(None, (storage.note, power.note))),
        )


def _is_of(device: Device, record: DeviceRecord) -> bool:
    """Return whether a record is of this device, with the graphs that it has now."""
    known = record.capabilities.model_copy(update={"early_visibility": None})
    here = DeviceRecord.of(device).capabilities.model_copy(update={"early_visibility": None})
    return (record.fingerprint, known) == (device.info.fingerprint, here)
