"""Every figure of the profiler's "how good": errors on pairs never measured, decision regret, a
quarter of the grid, a repeated profile, and the speed of predicting.

    python bench/profiler_accuracy.py [--budget 10m] [--held-budget 6m] [--repeat] [--out log.json]
        [--profile p.json --rows held.jsonl [--again]]

Takes a full profile, then measures (n, k) pairs that are not in its grid, on the same devices in
the same process, in units of the same reference kernels. With --again the predictors of today are
fitted to the rows of an earlier run and judged by its held-out rows.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hetero.backends.host.affinity import assign_cores, pinned
from hetero.backends.host.files import atomic_write
from hetero.backends.ops import WeightFormat
from hetero.backends.protocol import Device, DeviceKind
from hetero.measuring.profiling import parse_budget
from hetero.placement.device_set import open_devices
from hetero.profiler import active, fit
from hetero.profiler.cost import CostModel
from hetero.profiler.grid import Task, make_grid, token_counts
from hetero.profiler.interference import find_interference
from hetero.profiler.measure import REFERENCE_SIZES, Meter, Settings
from hetero.profiler.options import Options
from hetero.profiler.records import DeviceProfile, MatMulRow, Phase, ReferencePoint
from hetero.profiler.session import profile_devices
from hetero.profiler.stats import relative_errors
from hetero.profiler.workload import Workload

HELD_OUT = (
    (1536, 1536), (2560, 2048), (6144, 1536), (12288, 2048),
    (1536, 6144), (2048, 5632), (1152, 896), (4096, 4096),
)  # fmt: skip
PHASES: tuple[Phase, ...] = ("decode", "prefill")
KINDS: tuple[DeviceKind, ...] = ("gpu", "npu")


def measure_held_out(
    devices: dict[DeviceKind, Device], profile: DeviceProfile, budget_s: float
) -> list[MatMulRow]:
    """Rows of the held-out pairs in the profile's units: relative to its reference kernels."""
    from hetero.backends.host.clock import SystemClock

    clock = SystemClock()
    workload = Workload(devices, clock=clock, interference=find_interference())
    base = reference_times(profile.references)
    meter = Meter(
        workload, settings=Settings(), reference_format=WeightFormat.W4A16, base=base, seed=1
    )
    until_s = clock.now() + budget_s
    rows: list[MatMulRow] = []
    tokens = sorted({row.m for row in profile.matmuls})
    for m in tokens:
        tasks = [
            task
            for kind in KINDS
            for task in make_grid(
                kind,
                profile.devices[kind],
                HELD_OUT,
                [m] if m in token_counts(profile.devices[kind], tokens) else [],
                [WeightFormat.W4A16],
            ).tasks
        ]
        rows += meter.measure(tasks, until_s=until_s)
    return rows


def reference_times(points: Sequence[ReferencePoint]) -> dict[tuple[DeviceKind, Phase], float]:
    """Median time of each reference kernel over a profile's run."""
    found: dict[tuple[DeviceKind, Phase], list[float]] = {}
    for point in points:
        found.setdefault((point.device, point.phase), []).append(point.seconds)
    return {key: float(np.median(times)) for key, times in found.items()}


def errors(model: CostModel, rows: Sequence[MatMulRow]) -> dict[str, dict[str, float]]:
    """Mean and 95th percentile of the relative error, for each device and phase."""
    found = {}
    for kind in KINDS:
        for phase in PHASES:
            chosen = [r for r in rows if r.device == kind and r.phase == phase]
            if chosen:
                mape, p95 = relative_errors(
                    list(predictions(model, chosen)), [r.seconds for r in chosen]
                )
                noise = float(np.median([r.ci or 0.0 for r in chosen]))
                found[f"{kind} {phase}"] = {
                    "mape": mape, "p95": p95, "shapes": len(chosen), "median_ci": noise
                }  # fmt: skip
    return found


def mean_error(found: dict[str, dict[str, float]]) -> float:
    """Mean relative error over all shapes."""
    shapes = sum(group["shapes"] for group in found.values())
    return sum(group["mape"] * group["shapes"] for group in found.values()) / shapes


def predictions(model: CostModel, rows: Sequence[MatMulRow]) -> np.ndarray[Any, Any]:
    """Predicted seconds of rows of one device."""
    m, n, k = ([getattr(row, name) for row in rows] for name in "mnk")
    return model.matmul_s(rows[0].device, rows[0].weight_format, m, n, k).seconds


def regret(model: CostModel, rows: Sequence[MatMulRow]) -> float:
    """Extra time of choosing the device by prediction, over shapes measured on both."""
    times = {(r.device, r.m, r.n, r.k): r.seconds for r in rows}
    chosen_s = best_s = 0.0
    ratios = []
    for (kind, m, n, k), gpu_s in times.items():
        npu_s = times.get(("npu", m, n, k))
        if kind != "gpu" or npu_s is None:
            continue
        predicted = {
            d: float(model.matmul_s(d, WeightFormat.W4A16, m, n, k).seconds) for d in KINDS
        }
        picked_s = gpu_s if predicted["gpu"] <= predicted["npu"] else npu_s
        chosen_s += picked_s
        best_s += min(gpu_s, npu_s)
        ratios.append(picked_s / min(gpu_s, npu_s) - 1)
    print(f"regret by shape: mean {np.mean(ratios):.2%} over {len(ratios)} shapes")
    return float(np.mean(ratios)) if ratios else math.nan


def quarter(profile: DeviceProfile, rows: Sequence[MatMulRow]) -> dict[str, dict[str, float]]:
    """Errors of a model of a quarter of the grid's rows, chosen by active sampling."""
    known = {row.key: row for row in profile.matmuls}
    tasks = [Task(r.device, r.weight_format, r.order, r.m, r.n, r.k) for r in profile.matmuls]
    wanted = len(tasks) // 4
    chosen = active.first_tasks(tasks)[:wanted]
    while len(chosen) < wanted:
        taken = set(chosen)
        left = [task for task in tasks if task not in taken]
        measured = [known[task.key] for task in chosen]
        chosen += active.next_tasks(
            profile.devices, measured, left, min(8, wanted - len(chosen)), seed=len(chosen)
        )
    subset = [known[task.key] for task in chosen]
    model = profile.model_copy(update={"predictors": fit.fit_all(profile.devices, subset)})
    return errors(CostModel(model), rows)


def repeated(first: DeviceProfile, second: DeviceProfile) -> float:
    """Median difference of two profiles' rows, each over its reference kernel."""
    times = [
        {
            row.key: row.seconds / reference_times(profile.references)[row.device, row.phase]
            for row in profile.matmuls
        }
        for profile in (first, second)
    ]
    common = times[0].keys() & times[1].keys()
    return float(np.median([abs(times[1][key] / times[0][key] - 1) for key in common]))


def prediction_time_s(model: CostModel) -> float:
    """Seconds for 10 000 shapes, the slower device, best of three."""
    rng = np.random.default_rng(0)
    m, n, k = rng.integers(1, 1024, 10_000), *rng.integers(512, 8192, (2, 10_000))
    times = []
    for kind in KINDS:
        best = math.inf
        for _ in range(3):
            start_s = time.perf_counter()
            model.matmul_s(kind, WeightFormat.W4A16, m, n, k)
            best = min(best, time.perf_counter() - start_s)
        times.append(best)
    return max(times)


def run_again(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of a saved run with the predictors as they are now."""
    saved = DeviceProfile.load(arguments.profile)
    predictors = fit.fit_all(saved.devices, saved.matmuls)
    lines = arguments.rows.read_text().splitlines()
    held = [MatMulRow.model_validate_json(line) for line in lines]
    return figures(saved.model_copy(update={"predictors": predictors}), held, None)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures as one record."""
    opened = open_devices("hetero")
    cores = assign_cores()
    options = Options(
        budget_s=parse_budget(arguments.budget), gpu_core=cores.gpu, control_core=cores.control
    )
    with pinned(opened.control_core):
        first = profile_devices(opened.devices, options, out=arguments.profile)
        held = measure_held_out(opened.devices, first, parse_budget(arguments.held_budget))
        second = profile_devices(opened.devices, options) if arguments.repeat else None
    opened.close()
    if arguments.rows is not None:
        atomic_write(arguments.rows, "".join(row.model_dump_json() + "\n" for row in held))
    return figures(first, held, second)


def figures(
    first: DeviceProfile, held: Sequence[MatMulRow], second: DeviceProfile | None
) -> dict[str, Any]:
    """The record of one run."""
    model = CostModel(first)
    full, part = errors(model, held), quarter(first, held)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "measured": first.created,
        "machine": first.environment.processor,
        "load_average": first.environment.load_average,
        "coverage": first.coverage.model_dump(),
        "held_out": full,
        "decision_regret": regret(model, held),
        "quarter_of_grid": part,
        "quarter_over_full": {
            **{key: part[key]["mape"] / full[key]["mape"] for key in full},
            "all": mean_error(part) / mean_error(full),
        },
        "repeat_median_difference": repeated(first, second) if second else None,
        "predict_10000_shapes_s": prediction_time_s(model),
        "validation": {
            f"{p.device} {v.phase}": v.model_dump() for p in first.predictors for v in p.validation
        },
        "reference_sizes": REFERENCE_SIZES,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--held-budget", default="6m")
    parser.add_argument("--repeat", action="store_true", help="take the profile twice")
    parser.add_argument("--profile", type=Path, help="where to keep the first profile")
    parser.add_argument("--rows", type=Path, help="where to keep the held-out rows (JSONL)")
    parser.add_argument("--out", type=Path, help="where to write the figures (JSON)")
    parser.add_argument("--again", action="store_true", help="judge a saved run again")
    arguments = parser.parse_args()
    found = run_again(arguments) if arguments.again else run(arguments)
    text = json.dumps(found, indent=1, default=str)
    print(text)
    if arguments.out is not None:
        atomic_write(arguments.out, text + "\n")


if __name__ == "__main__":
    main()
