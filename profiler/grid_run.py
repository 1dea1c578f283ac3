"""The matmuls of a run: what of the grid is measured, what is quarantined, what stages prune."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.profiler import active, canary, grid
from hetero.profiler.grid import Task, shape_class
from hetero.profiler.journal import Journal
from hetero.profiler.measure import Reference, TaskMeter
from hetero.profiler.options import Options
from hetero.profiler.records import (
    DeviceRecord,
    MatMulRow,
    Quarantine,
    ReferencePoint,
    StageCheck,
)
from hetero.profiler.workload import Workload


class GridRun:
    """Rows of the grid, from the journal and measured; every new one goes into the journal.

    `report` is called after each row. A kernel is checked at its first use in a shape class, unless
    the clock is `virtual`; a wrong one is quarantined, and not measured.
    """

    def __init__(
        self,
        workload: Workload,
        options: Options,
        reference_format: WeightFormat,
        journal: Journal,
        report: Callable[[], None],
        *,
        virtual: bool,
    ) -> None:
        self._workload, self._options, self._format = workload, options, reference_format
        self._journal, self._report, self._virtual = journal, report, virtual
        self.rows: dict[tuple[str, str, str, int, int, int], MatMulRow] = {}
        self.quarantined: list[Quarantine] = []
        self.pruned: dict[Task, Task] = {}
        self.total = 0
        self._canaries: set[tuple[str, ...]] = set()
        base = {
            (entry["device"], entry["phase"]): entry["seconds"] for entry in journal.of_kind("base")
        }
        self.meter = TaskMeter(
            workload,
            settings=options.settings,
            reference_format=reference_format,
            base=base,
            seed=options.seed,
            between=options.between,
        )
        self.meter.points += [
            ReferencePoint.model_validate(entry["point"]) for entry in journal.of_kind("reference")
        ]
        self._known_points = len(self.meter.points)
        self._known_bases: set[Reference] = set(base)
        for entry in journal.of_kind("row"):
            row = MatMulRow.model_validate(entry["row"])
            self.rows[row.key] = row
        for entry in journal.of_kind("quarantine"):
            self._quarantine(Quarantine.model_validate(entry["entry"]), write=False)

    def tasks(self, records: Mapping[DeviceKind, DeviceRecord]) -> list[Task]:
        """Return the grid of these devices, without the pruned sizes."""
        tasks: list[Task] = []
        for kind, record in records.items():
            made = grid.make_grid(
                kind,
                record,
                self._options.grid_pairs(),
                grid.token_counts(record, self._options.grid_tokens()),
                self._options.weight_formats,
                heads=grid.head_pairs(self._options.shapes),
            )
            tasks += made.tasks
            self.pruned |= made.pruned
        self.total = len(tasks)
        return tasks

    def choose(
        self,
        records: Mapping[DeviceKind, DeviceRecord],
        open_tasks: Sequence[Task],
        count: int,
        turn: int,
    ) -> list[Task]:
        """Return the tasks to measure next, of which the predictors learn most."""
        if len(open_tasks) <= count:
            return list(open_tasks)
        known = {key[:3] for key in self.rows}
        fresh = [task for task in open_tasks if task.key[:3] not in known]
        if fresh:
            return active.first_tasks(fresh)[:count]
        one_token = [task for task in open_tasks if task.m == 1]
        if self._options.shapes and one_token:  # cheap, and what every token of that model takes
            return one_token[:count]
        rows = list(self.rows.values())
        return active.next_tasks(records, rows, open_tasks, count, seed=self._options.seed + turn)

    def measure(self, block: Sequence[Task], until_s: float) -> bool:
        """Measure tasks whose kernels are correct; False where there is none."""
        good = [task for task in block if self.usable(task) and self._canary(task)]
        if not good:
            return False
        self.meter.measure(good, until_s=until_s, on_row=self._keep)
        for key, seconds in self.meter.base.items():
            if key not in self._known_bases:
                self._known_bases.add(key)
                self._journal.add(
                    {"kind": "base", "device": key[0], "phase": key[1], "seconds": seconds}
                )
        for point in self.meter.points[self._known_points :]:
            self._journal.add({"kind": "reference", "point": point.model_dump(mode="json")})
        self._known_points = len(self.meter.points)
        return True

    def _keep(self, row: MatMulRow) -> None:
        self.rows[row.key] = row
        self._journal.add({"kind": "row", "row": row.model_dump(mode="json")})
        self._report()

    def usable(self, task: Task) -> bool:
        """Return whether no kernel of a task's shape class was wrong."""
        return (*task.key[:3], shape_class(*task.key[3:])) not in self._bad

    @property
    def _bad(self) -> set[tuple[str, str, str, str]]:
        return {
            (q.device, (q.weight_format or self._format).value, q.order, q.shape_class)
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
            if not self._virtual:
                problem = canary.check_matmul(task, self._workload.runner(task))
        except (DeviceError, ValueError) as error:
            problem = canary.failed_matmul(task, str(error))
        if problem is not None:
            self._quarantine(problem)
        return problem is None

    def _quarantine(self, entry: Quarantine, *, write: bool = True) -> None:
        self.quarantined.append(entry)
        if write:
            self._journal.add({"kind": "quarantine", "entry": entry.model_dump(mode="json")})

    def stage_checks(
        self, records: Mapping[DeviceKind, DeviceRecord], until_s: Callable[[], float]
    ) -> list[StageCheck]:
        """Measure some pruned sizes, each with the size that stands for it."""
        checks: list[StageCheck] = []
        for kind, record in records.items():
            static = record.capabilities.static_shapes
            pairs = [
                (task, stage)
                for task, stage in self.pruned.items()
                if task.device == kind
                and stage.key in self.rows
                and not (static and task.m not in record.capabilities.graph_sizes)
            ]
            count = self._options.stage_checks
            step = max(1, len(pairs) // count)
            for task, stage in pairs[::step][:count]:
                rows = self.meter.measure([task, stage], until_s=until_s())
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
