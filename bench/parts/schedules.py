"""The compiler-predicted NPU: its two constants, fitted to six published timings."""

from __future__ import annotations

import json

import numpy as np
from common import DATA, finish, table

from hetero.profiler.compiled import Scheduler, Work, fit_model, leave_one_out

SOC = "sm8650"


def schedules() -> None:
    """The physical model of the compiler's schedules (`hetero profile --soc`): fit to the paper's
    six NPU timings, and leave-one-out error, also from DRAM traffic alone.
    """
    data = json.loads((DATA / "snapdragon_8_gen_3_calibration.json").read_text(encoding="utf-8"))
    points, dram = data["operator_latency_us"], data["bandwidth_GB_per_s"]["gpu_only"] * 1e9
    scheduler = Scheduler(SOC)
    works = [scheduler.work(p["n"], p["k"], p["m"]) for p in points]
    scheduler.close()
    seconds = [p["npu"] * 1e-6 for p in points]
    model, left_out = fit_model(works, seconds, dram), leave_one_out(works, seconds, dram)
    print(f"predicted; {model}\n")
    rows = []
    for point, work, left in zip(points, works, left_out, strict=True):
        fitted, known = 1e6 * model.seconds(work), point["npu"]
        errors = f"{fitted / known - 1:+.0%}", f"{left:+.0%}"
        rows.append([point["n"], point["k"], point["m"], known, f"{fitted:.0f}", *errors])
    table("n|k|m|the paper's µs|fitted µs|error|left out", rows)
    memory = [Work(0, work.dram_bytes, work.dram_bytes) for work in works]
    alone = np.mean(np.abs(leave_one_out(memory, seconds, 1e15)))
    mean = f"mean absolute error left out: {np.mean(np.abs(left_out)):.0%}"
    finish(f"{mean}; from DRAM traffic alone: {alone:.0%}")
