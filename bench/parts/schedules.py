"""The compiler-predicted NPU: its two constants, fitted to six published timings."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from unittest.mock import patch

import numpy as np
import typer
from common import DATA, finish, integers, random_weight, table
from lab.chip_fit import fit_model, leave_one_out

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul
from hetero.backends.qnn import integer
from hetero.backends.qnn.graph_store import GraphIdentity
from hetero.backends.qnn.library import load
from hetero.backends.qnn.optrace import Schedule, ScheduleStore
from hetero.backends.qnn.session import Target
from hetero.backends.snapdragon import find_chip
from hetero.profiler.compiled import CallWork, Scheduler

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
    memory = [CallWork(0, work.dram_bytes, work.dram_bytes) for work in works]
    alone = np.mean(np.abs(leave_one_out(memory, seconds, 1e15)))
    mean = f"mean absolute error left out: {np.mean(np.abs(left_out)):.0%}"
    finish(f"{mean}; from DRAM traffic alone: {alone:.0%}")


def layouts(
    shapes: Annotated[str, typer.Option(help="n x k, such as 2048x8192,8192x2048")] = "2048x8192",
    m: Annotated[str, typer.Option("-m", help="token counts")] = "256,512",
    heights: Annotated[str, typer.Option(help="rows of pixels to try")] = "1,2,8,16,32",
) -> None:
    """Equal shapes (height x width) of the convolution that is a w8a8 matmul, by the compiler's
    schedule; `*` is what `integer.height` takes.
    """
    print(f"the schedules of Qualcomm's compiler for {SOC}; nothing is measured\n")
    fmt, rows = WeightFormat.W8A8, []
    with TemporaryDirectory() as folder:
        store = ScheduleStore(Target(load(None), find_chip(SOC)), Path(folder))
        for shape in shapes.split(","):
            n, k = map(int, shape.split("x"))
            op, weight = MatMul(n=n, k=k, weight_format=fmt), random_weight(fmt.storage, n, k)
            for tokens in integers(m):
                for tall in (x for x in integers(heights) if tokens % x == 0):
                    own = integer.height(tokens, k) == tall
                    with patch.object(integer, "height", return_value=tall):
                        model = integer.matmul(op, tokens, weight, "int8")
                    found = store.find(GraphIdentity(f"{op} {tall}", tokens), lambda x=model: x)
                    mark = f"{tall}x{tokens // tall}" + " *" * own
                    rows.append([shape, str(tokens), mark, *_traffic(found)])
        store.close()
    table("n x k|m|height x width|DRAM MiB|HMX MiB|HVX MiB", rows)
    finish()


def _traffic(found: Schedule) -> list[str]:
    moved = (found.dram_bytes, found.hmx.vtcm_bytes, found.hvx.vtcm_bytes)
    return [f"{nbytes / 2**20:.1f}" for nbytes in moved]
