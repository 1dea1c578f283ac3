"""Taking a profile: every measurement in its order, within a budget, resumable at any moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock, ManualClock, SystemClock
from hetero.backends.protocol import Device, DeviceKind
from hetero.profiler import active, canary, fit, grid, preparation
from hetero.profiler.device_overheads import (
    BANDWIDTH_REPEATS,
    ConcurrentBandwidth,
    DeviceOverheads,
    MaybePower,
    NonMatmulRows,
)
from hetero.profiler.environment import hetero_version
from hetero.profiler.errors import ProfileError
from hetero.profiler.grid import Task, shape_class
from hetero.profiler.interference import find_interference
from hetero.profiler.journal import Journal, journal_path
from hetero.profiler.measure import Reference, TaskMeter, rescale, to_means
from hetero.profiler.options import Event, Options
from hetero.profiler.records import (
    Coverage,
    DeviceProfile,
    DeviceRecord,
    DeviceSync,
    Environment,
    EveryCore,
    HostSync,
    MatMulRow,
    PreparationRow,
    Quarantine,
    ReferencePoint,
    StageCheck,
)
from hetero.profiler.workload import Workload

R = TypeVar("R", bound=BaseModel)
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
        self.rows: dict[tuple[str, str, str, int, int, int], MatMulRow] = {}
        self.quarantined: list[Quarantine] = []
        self.parts: dict[str, Any] = {}
        self.pruned: dict[Task, Task] = {}
        self.notes: list[str] = []
        self.total = 0
        self._canaries: set[tuple[str, ...]] = set()
        self._stretch_s = 0.0  # the longest of the stretches of both devices at once
        self._start_s = self.clock.now()

    def run(self, *, resume: bool) -> DeviceProfile:
        """Measure, fit, write."""
        header = self.options.header() | {
            "devices": {kind: d.info.fingerprint for kind, d in sorted(self.devices.items())}
        }
        path = None if self.out is None else journal_path(self.out)
        with Journal(path, header, resume=resume) as self.journal:
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
        base = {
            (entry["device"], entry["phase"]): entry["seconds"]
            for entry in self.journal.of_kind("base")
        }
        self.meter = TaskMeter(
            self.workload,
            settings=self.options.settings,
            reference_format=self.format,
            base=base,
            seed=self.options.seed,
            between=self.options.between,
        )
        self.meter.points += [
            ReferencePoint.model_validate(entry["point"])
            for entry in self.journal.of_kind("reference")
        ]
        self._known_points = len(self.meter.points)
        self._known_bases: set[Reference] = set(base)
        for entry in self.journal.of_kind("row"):
            row = MatMulRow.model_validate(entry["row"])
            self.rows[row.key] = row
        for entry in self.journal.of_kind("quarantine"):
            self._quarantine(Quarantine.model_validate(entry["entry"]), write=False)

    def _part(
        self,
        name: str,
        kind: type[R],
        make: Callable[[], list[R]],
        *,
        several: bool = False,
        fits: Callable[[R], bool] = lambda _: True,
    ) -> list[R]:
        """Return records of one part of the profile, one unless `several`.

        From the journal, where all of them fit what is here, or measured and written to it.
        """
        for entry in self.journal.of_kind("part"):
            if entry["name"] == name and (several or len(entry["values"]) == 1):
                with suppress(ValidationError):  # then it is measured again
                    records = [kind.model_validate(value) for value in entry["values"]]
                    if all(map(fits, records)):
                        self.parts[name] = records
                        return records
        self._report(name)
        self._checkpoint()
        made = make()
        self.journal.add(
            {"kind": "part", "name": name, "values": [v.model_dump(mode="json") for v in made]}
        )
        self.parts[name] = made
        return made

    def _device_overheads(self) -> None:
        """Measure everything that is not a matmul's time."""
        around = self._around
        self._part("environment", Environment, around.environment)
        for kind in self.devices:
            (self.records[kind],) = self._part(
                f"{kind} stages",
                DeviceRecord,
                partial(around.device, kind),
                fits=partial(_is_of, self.devices[kind]),
            )
            self._part(f"{kind} synchronisation", DeviceSync, partial(around.synchronisation, kind))
        self._part("sleep", HostSync, self._host_sync)
        self._part("every core", EveryCore, self._every_core, several=True)
        self._part("preparation", PreparationRow, around.preparation, several=True)
        self._concurrent(1)
        self._part("power", MaybePower, around.power)
        self._part("other kernels", NonMatmulRows, partial(around.others, self.records))

    def _checkpoint(self) -> None:
        """Raise `ProfileError` where the budget is used up before the matmuls.

        Called between the measurements of every part.
        """
        self._check_budget(self.clock.now() + self.options.budget_s - self.spent_s)

    def _check_budget(self, until_s: float) -> None:
        """Raise `ProfileError` where no time is left for matmuls; the journal keeps the rest."""
        if not self.options.keep_budget or self.rows or until_s > self.clock.now():
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
                self._part(name, ConcurrentBandwidth, self._around.concurrent)
                self._stretch_s = max(self._stretch_s, self.clock.now() - start_s)

    def _matmuls(self) -> None:
        """Measure the grid, in the order of what teaches most, until it or the budget is used up.

        Now and then and at its end the devices together.
        """
        tasks = self._tasks()
        self.total = len(tasks)
        wanted = max(1, math.ceil(self.options.share * len(tasks)))
        until_s = self._until_s()
        start_s, done = self.clock.now(), len(self.rows)
        open_tasks = [task for task in tasks if task.key not in self.rows]
        least = min(math.ceil(self.options.least * len(tasks)), wanted)
        latest_s = until_s + 2 * self.options.budget_s
        for turn in range(len(tasks)):
            left = min(wanted - len(self.rows), self.options.block)
            end_s = until_s if len(self.rows) >= least else latest_s
            if left <= 0 or not open_tasks or (self.rows and self.clock.now() >= end_s):
                break
            passed = (len(self.rows) - done) / max(wanted - done, 1)
            if math.isfinite(until_s) and until_s > start_s:
                passed = max(passed, (self.clock.now() - start_s) / (until_s - start_s))
            self._concurrent(1 + int(passed * (len(BANDWIDTH_REPEATS) - 1)))
            block = self._choose(open_tasks, left, turn)
            gone = set(block)
            self._measure(block, end_s)
            open_tasks = [task for task in open_tasks if task not in gone and self._usable(task)]
            self._snapshot()
        self._concurrent(len(BANDWIDTH_REPEATS))

    def _tasks(self) -> list[Task]:
        tasks: list[Task] = []
        for kind, record in self.records.items():
            made = grid.make_grid(
                kind,
                record,
                self.options.grid_pairs(),
                grid.token_counts(record, self.options.grid_tokens()),
                self.options.weight_formats,
                heads=grid.head_pairs(self.options.shapes),
            )
            tasks += made.tasks
            self.pruned |= made.pruned
        return tasks

    def _until_s(self) -> float:
        """Return clock time at which the grid must end."""
        left_s = self.options.budget_s * (1 - self.options.reserved) - self.spent_s
        left_s -= self._stretch_s * sum(name not in self.parts for name in BANDWIDTH_REPEATS)
        return self.clock.now() + max(left_s, 0.0)

    def _choose(self, open_tasks: Sequence[Task], count: int, turn: int) -> list[Task]:
        if len(open_tasks) <= count:
            return list(open_tasks)
        known = {key[:3] for key in self.rows}
        fresh = [task for task in open_tasks if task.key[:3] not in known]
        if fresh:
            return active.first_tasks(fresh)[:count]
        one_token = [task for task in open_tasks if task.m == 1]
        if self.options.shapes and one_token:  # cheap, and what every token of that model takes
            return one_token[:count]
        rows = list(self.rows.values())
        return active.next_tasks(
            self.records, rows, open_tasks, count, seed=self.options.seed + turn
        )

    def _measure(self, block: Sequence[Task], until_s: float) -> None:
        good = [task for task in block if self._usable(task) and self._canary(task)]
        if not good:
            return
        self.meter.measure(good, until_s=until_s, on_row=self._keep)
        for key, seconds in self.meter.base.items():
            if key not in self._known_bases:
                self._known_bases.add(key)
                self.journal.add(
                    {"kind": "base", "device": key[0], "phase": key[1], "seconds": seconds}
                )
        for point in self.meter.points[self._known_points :]:
            self.journal.add({"kind": "reference", "point": point.model_dump(mode="json")})
        self._known_points = len(self.meter.points)
        self.journal.add({"kind": "spent", "spent_s": self.spent_s})

    def _keep(self, row: MatMulRow) -> None:
        self.rows[row.key] = row
        self.journal.add({"kind": "row", "row": row.model_dump(mode="json")})
        self._report("matmuls")

    def _usable(self, task: Task) -> bool:
        return (*task.key[:3], shape_class(*task.key[3:])) not in self._bad

    @property
    def _bad(self) -> set[tuple[str, str, str, str]]:
        return {
            (q.device, (q.weight_format or self.format).value, q.order, q.shape_class)
            for q in self.quarantined
            if q.op == "MatMul"
        }

    def _canary(self, task: Task) -> bool:
        """Check a kernel at its first use in a shape class; False if it is wrong."""
        key = (*task.key[:3], shape_class(task.m, task.n, task.k))
        if key in self._canaries:
            return True
        self._canaries.add(key)
        try:
            problem = None
            if not self.virtual:
                problem = canary.check_matmul(task, self.workload.runner(task))
        except (DeviceError, ValueError) as error:
            problem = canary.failed_matmul(task, str(error))
        if problem is not None:
            self._quarantine(problem)
        return problem is None

    def _quarantine(self, entry: Quarantine, *, write: bool = True) -> None:
        self.quarantined.append(entry)
        if write:
            self.journal.add({"kind": "quarantine", "entry": entry.model_dump(mode="json")})

    def _check_stages(self) -> None:
        """Measure some pruned sizes; a stage that does not hold is dropped and its sizes return."""
        self._part("stage checks", StageCheck, self._stage_checks, several=True)
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
                again = [task for task in self.pruned if task.device == kind]
                self.pruned = {t: s for t, s in self.pruned.items() if t.device != kind}
                self._measure([t for t in again if t.key not in self.rows], self._until_s())

    def _stage_checks(self) -> list[StageCheck]:
        checks: list[StageCheck] = []
        for kind, record in self.records.items():
            static = record.capabilities.static_shapes
            pairs = [
                (task, stage)
                for task, stage in self.pruned.items()
                if task.device == kind
                and stage.key in self.rows
                and not (static and task.m not in record.capabilities.graph_sizes)
            ]
            count = self.options.stage_checks
            step = max(1, len(pairs) // count)
            for task, stage in pairs[::step][:count]:
                rows = self.meter.measure([task, stage], until_s=self._until_s())
                times = {row.key: row.seconds for row in rows}
                checks.append(
                    StageCheck(
                        device=kind,
                        m=task.m,
                        n=task.n,
                        k=task.k,
                        measured_s=times[task.key],
                        stage_s=times[stage.key],
                    )
                )
        return checks

    def _gains(self) -> list[str]:
        gains_of: list[EveryCore] = self.parts["every core"]
        if not gains_of:
            return []
        gains = ", ".join(f"{x.weight_format} {x.phase} {x.speedup:.2f} x" for x in gains_of)
        return [f"OpenCL alone on {gains_of[0].cores} cores instead of one: {gains}"]

    def _report(self, what: str) -> None:
        left_s = max(self.options.budget_s - self.spent_s, 0.0)
        self.progress(Event(what, len(self.rows), self.total, left_s))

    def _snapshot(self) -> None:
        """Write the records so far as a valid profile, in case the process is killed."""
        if self.out is not None:
            self._profile(finished=False).save(self.out)

    def _profile(self, *, finished: bool) -> DeviceProfile:
        rows = list(self.rows.values())
        if self.options.settings.scaled:
            rows = rescale(rows, self.meter.points, small=self.workload.small)
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
                grid_tasks=self.total,
                measured_tasks=len(rows),
                pruned_tasks=len(self.pruned),
                finished=finished and len(rows) >= self.total,
                seed=self.options.seed,
            ),
            devices=self.records,
            quarantined=(*self.quarantined, *others[0].quarantined),
            bandwidth=concurrent.bandwidth,
            contention=concurrent.contention,
            sync={kind: self.parts[f"{kind} synchronisation"][0] for kind in self.devices},
            host_sync=self.parts["sleep"][0],
            every_core=tuple(self.parts["every core"]),
            power=power.power,
            predictors=fit.fit_all(
                self.records, rows, validate=finished, fitting=self.options.fitting
            ),
            other_predictors=others[0].predictors,
            preparation_predictors=preparation.fit_preparation(self.parts["preparation"]),
            matmuls=tuple(sorted(rows, key=lambda row: row.key)),
            others=others[0].rows,
            preparation=tuple(self.parts["preparation"]),
            references=tuple(self.meter.points),
            stage_checks=tuple(self.parts.get("stage checks", ())),
            notes=(*self.notes, *self._gains(), *([power.note] if power.note else [])),
        )


def _is_of(device: Device, record: DeviceRecord) -> bool:
    """Return whether a record is of this device, with the graphs that it has now."""
    known = record.capabilities.model_copy(update={"early_visibility": None})
    here = DeviceRecord.of(device).capabilities.model_copy(update={"early_visibility": None})
    return (record.fingerprint, known) == (device.info.fingerprint, here)
