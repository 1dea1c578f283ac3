"""The profiler's predictors on (n, k) pairs that no profile measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from common import finish, table, timed

from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import assign_cores, pinned
from hetero.backends.host.clock import SystemClock
from hetero.backends.host.files import atomic_write
from hetero.backends.protocol import KINDS, Device, DeviceKind
from hetero.measuring.profiling import parse_budget
from hetero.placement.device_set import open_devices
from hetero.profiler import active, fit
from hetero.profiler.cost import CostModel
from hetero.profiler.grid import Task, make_grid, token_counts
from hetero.profiler.interference import find_interference
from hetero.profiler.measure import MeasureSettings, TaskMeter
from hetero.profiler.options import Options
from hetero.profiler.records import DeviceProfile, MatMulRow, Phase
from hetero.profiler.session import profile_devices
from hetero.profiler.stats import relative_errors
from hetero.profiler.workload import Workload

HELD_OUT = (
    (1536, 1536), (2560, 2048), (6144, 1536), (12288, 2048),
    (1536, 6144), (2048, 5632), (1152, 896), (4096, 4096),
)  # fmt: skip
GROUPS: tuple[tuple[DeviceKind, Phase], ...] = tuple(
    (kind, phase) for kind in KINDS for phase in ("decode", "prefill")
)
Errors = dict[tuple[DeviceKind, Phase], tuple[float, float, int]]


def reference_times(profile: DeviceProfile) -> dict[tuple[DeviceKind, Phase], float]:
    """Median seconds of each reference kernel over a profile's run."""
    times: dict[tuple[DeviceKind, Phase], list[float]] = {}
    for point in profile.references:
        times.setdefault((point.device, point.phase), []).append(point.seconds)
    return {key: statistics.median(values) for key, values in times.items()}


def held_out(
    devices: dict[DeviceKind, Device], profile: DeviceProfile, budget_s: float
) -> Iterator[MatMulRow]:
    """Rows of the held-out pairs in the profile's units: relative to its reference kernels."""
    clock, tokens = SystemClock(), sorted({row.m for row in profile.matmuls})
    meter = TaskMeter(
        Workload(devices, clock=clock, interference=find_interference()),
        settings=MeasureSettings(),
        reference_format=WeightFormat.W4A16,
        base=reference_times(profile),
        seed=1,
    )
    until_s = clock.now() + budget_s
    for m in tokens:
        tasks: list[Task] = []
        for kind in KINDS:
            known = profile.devices[kind]
            counts = [m] if m in token_counts(known, tokens) else []
            tasks += make_grid(kind, known, HELD_OUT, counts, [WeightFormat.W4A16]).tasks
        yield from meter.measure(tasks, until_s=until_s)


def predicted(model: CostModel, rows: Sequence[MatMulRow], kind: DeviceKind) -> Any:
    """Seconds of rows on a device."""
    m, n, k = ([getattr(row, name) for row in rows] for name in "mnk")
    return model.matmul_s(kind, rows[0].weight_format, m, n, k).seconds


def errors(model: CostModel, rows: Sequence[MatMulRow]) -> Errors:
    """Mean and 95th percentile of the relative error, and shapes, by device and phase."""
    found: Errors = {}
    for kind, phase in GROUPS:
        if chosen := [row for row in rows if (row.device, row.phase) == (kind, phase)]:
            times = [row.seconds for row in chosen]
            found[kind, phase] = (
                *relative_errors(list(predicted(model, chosen, kind)), times),
                len(chosen),
            )
    return found


def regrets(model: CostModel, rows: Iterable[MatMulRow]) -> Iterator[float]:
    """Extra time of choosing the device by prediction, of each shape measured on both."""
    both: dict[tuple[int, int, int], dict[DeviceKind, MatMulRow]] = {}
    for row in rows:
        both.setdefault((row.m, row.n, row.k), {})[row.device] = row
    for pair in both.values():
        if len(pair) == len(KINDS):
            told = {kind: float(predicted(model, [row], kind)[0]) for kind, row in pair.items()}
            picked = pair[min(told, key=lambda kind, of=told: of[kind])]  # type: ignore[misc]
            yield picked.seconds / min(row.seconds for row in pair.values()) - 1


def quarter_of(profile: DeviceProfile) -> list[MatMulRow]:
    """A quarter of the grid's rows, chosen by active sampling."""
    known = {row.key: row for row in profile.matmuls}
    tasks = [Task(r.device, r.weight_format, r.order, r.m, r.n, r.k) for r in profile.matmuls]
    wanted, chosen = len(tasks) // 4, active.first_tasks(tasks)[: len(tasks) // 4]
    while len(chosen) < wanted:
        left = [task for task in tasks if task not in set(chosen)]
        measured, count = [known[task.key] for task in chosen], min(8, wanted - len(chosen))
        chosen += active.next_tasks(profile.devices, measured, left, count, seed=len(chosen))
    return [known[task.key] for task in chosen]


def quarter(profile: DeviceProfile) -> CostModel:
    """A model of a quarter of the grid's rows."""
    rows = quarter_of(profile)
    predictors = fit.fit_all(profile.devices, rows)
    return CostModel(profile.model_copy(update={"predictors": predictors, "matmuls": tuple(rows)}))


def accuracy(
    budget: Annotated[str, typer.Option(help="of the profile")] = "10m",
    held_budget: Annotated[str, typer.Option(help="of the held-out pairs")] = "6m",
    profile: Annotated[Path | None, typer.Option(help="where to keep the first profile")] = None,
    rows: Annotated[Path | None, typer.Option(help="where to keep the rows (JSON lines)")] = None,
    again: Annotated[bool, typer.Option(help="judge a saved run by today's predictors")] = False,
) -> None:
    """Errors on pairs never measured, decision regret, a quarter of the grid."""
    notes = []
    if again:
        if profile is None or rows is None:
            raise typer.BadParameter("--again reads the files of --profile and --rows: name both")
        saved = DeviceProfile.load(str(profile))
        lines = rows.read_text(encoding="utf-8").splitlines()
        measured = [MatMulRow.model_validate_json(line) for line in lines]
        predictors = fit.fit_all(saved.devices, saved.matmuls)
        taken = saved.model_copy(update={"predictors": predictors})
    else:
        opened, cores = open_devices("hetero"), assign_cores()
        cores_of: dict[str, Any] = {"gpu_core": cores.gpu, "control_core": cores.control}
        options = Options(budget_s=parse_budget(budget), **cores_of)
        with pinned(opened.control_core):
            taken = profile_devices(opened.devices, options, out=profile)
            measured = list(held_out(opened.devices, taken, parse_budget(held_budget)))
        if rows is not None:
            atomic_write(rows, "".join(row.model_dump_json() + "\n" for row in measured))
    model = CostModel(taken)
    full, part = errors(model, measured), errors(quarter(taken), measured)
    print(f"predicted and measured; {taken.environment.processor}, profile of {taken.created}")
    cells = (
        [*key, count, f"{mean:.1%}", f"{p95:.1%}", f"{part[key][0]:.1%}"]
        for key, (mean, p95, count) in full.items()
    )
    table("device|phase|shapes|mean error|95 %|with a quarter of the grid", cells)
    rng, best_s = np.random.default_rng(0), math.inf
    m, n, k = rng.integers(1, 1024, 10_000), *rng.integers(512, 8192, (2, 10_000))
    for kind in KINDS * 3:
        best_s = min(best_s, timed(lambda: model.matmul_s(kind, WeightFormat.W4A16, m, n, k)))  # noqa: B023
    lost = list(regrets(model, measured))
    if lost:
        regret = f"{statistics.mean(lost):.2%} over {len(lost)} shapes"
        notes.append(f"decision regret: {regret}")
    finish(*notes, f"10 000 shapes predicted in {1e3 * best_s:.1f} ms")
