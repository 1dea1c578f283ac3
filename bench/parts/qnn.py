"""Figures of the QNN backend (docs/qnn.md). Compile times are this machine's; emulated run times
are printed nowhere, because they are no speeds.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from common import DATA, LLAMA, MIB, Worker, finish, new_app, table

from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.qnn import integer
from hetero.backends.qnn import open as open_qnn
from hetero.backends.qnn.store import Identity, weight_digest
from hetero.backends.weights import PackedWeight, pack
from hetero.profiler.compiled import Scheduler, Work, fit_model, leave_one_out

app = new_app(__doc__)
SOC = "sm8650"
FORMS: tuple[tuple[Any, WeightFormat, str], ...] = (
    ("float16", WeightFormat.W4A16, "groups"),
    ("float16", WeightFormat.W8A16, "groups"),
    ("float16", WeightFormat.F16, "groups"),
    ("int16", WeightFormat.W4A16, "groups"),
    ("int16", WeightFormat.W4A16, "rows"),
    ("int16", WeightFormat.W8A16, "groups"),
    ("int16", WeightFormat.W8A16, "rows"),
    ("int8", WeightFormat.W8A16, "rows"),
    ("int8", WeightFormat.W8A16, "whole"),
)
LAYOUTS: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (2048, 2048, (1, 8, 16, 31, 32, 33, 48, 64, 128, 256, 512, 1024)),
    (8192, 2048, (32, 128, 256, 512)),
    (2048, 8192, (32, 128, 256, 512)),
    (4096, 4096, (1, 32, 128, 256, 512)),
    (4096, 14336, (1, 64, 128)),
)
Only = Annotated[str, typer.Option(help="forms that begin so, such as 'int16 w4a16'")]


def forms(only: str) -> list[tuple[Any, WeightFormat, str]]:
    """Activations, weights and where scales are alike."""
    return [form for form in FORMS if " ".join(form).startswith(only)]


def scaled_weight(weight_format: WeightFormat, n: int, k: int, scales: str) -> PackedWeight:
    """A random weight whose scales are alike in the whole weight, in rows, or nowhere."""
    random = np.random.default_rng(0)
    values = random.standard_normal((n, k), dtype=np.float32).clip(-4, 4)
    if scales != "groups":
        values[:, ::32] = 4  # the largest of each group
    if scales != "whole":
        values *= random.uniform(0.5, 2, (n, 1)).astype(np.float32)
    return pack(values, weight_format.storage)


@app.command("accuracy")
def accuracy(only: Only = "") -> None:
    """Relative error against float64 of the dequantised weights; bound 5e-4.

    Of 8-bit activations also against float64 of the rounded activations, in steps of the result's
    codes: half a step is output rounding alone.
    """
    random = np.random.default_rng(0)

    def rows() -> Iterator[list[object]]:
        for activations, weight_format, scales in forms(only):
            for m, n, k in ((1, 2048, 2048), (32, 2048, 2048), (32, 2048, 8192), (128, 8192, 2048)):
                weight = scaled_weight(weight_format, n, k, scales)
                tensors = {"x": new_tensor((m, k)), "y": new_tensor((m, n))}
                x = tensors["x"].array
                x[:] = random.standard_normal((m, k))
                op = ops.MatMul(n=n, k=k, weight_format=weight_format)
                with open_qnn(graph_sizes=(m,), cache=None, activations=activations) as device:
                    device.prepare(op, {"weight": weight}).bind(tensors, m).run()
                found, dense = tensors["y"].array, weight.dequantize().astype(np.float64)
                expected = x.astype(np.float64) @ dense.T
                error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
                steps = steps_off(found, x, weight, dense) if activations == "int8" else ""
                yield [activations, f"{weight_format} {scales}", m, n, k, f"{error:.2e}", steps]

    print("emulated; errors, no speeds\n")
    table("activations|weights|m|n|k|error|of the rounded x, in steps of y", rows())
    finish()


def steps_off(found: Any, x: Any, weight: PackedWeight, dense: Any) -> str:
    """Distance to float64 of the 8-bit activations, in steps of each element's output code."""
    size = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    wanted = (np.rint(x / size * 127) / 127 * size) @ dense.T
    off = np.abs(found - wanted) / (size * np.abs(integer.row_units(weight)) * integer.REACH / 127)
    return f"{off.mean():.2f} on average, {off.max():.2f} at most"


class Opened:
    """Weights that are compiled or opened in a process of its own."""

    def __init__(self, *, folder: str, count: int, n: int, k: int) -> None:
        random, op = np.random.default_rng(0), ops.MatMul(n=n, k=k, weight_format=FORMS[0][1])
        weights = [
            pack(random.standard_normal((n, k), dtype=np.float32), op.weight_format.storage)
            for _ in range(count)
        ]
        tensors = {"x": new_tensor((32, k)), "y": new_tensor((32, n))}
        opened: Any = open_qnn(graph_sizes=(32,), cache=folder)
        with opened as device:
            seconds, memory, calls = [], [_resident()], []
            for weight in weights:
                start_s = time.perf_counter()
                calls.append(device.prepare(op, {"weight": weight}).bind(tensors, 32))
                seconds.append(time.perf_counter() - start_s)
                memory.append(_resident())
            grown = float(np.median(np.diff(memory)))  # the first few bring the library with them
            held = [_resident()]
            for call in calls:
                call.run()
                held.append(_resident())
            runs, compiled = np.diff(held) / MIB, device.store.counts.compiled
        ms = (1e3 * float(np.median(seconds)), 1e3 * max(seconds[1:]))
        sizes = f"{grown / MIB:.2f}", f"{grown / weights[0].nbytes:.2f}"
        runs_mib = f"{runs[:4].sum():.1f}", f"{runs[4:].sum():.1f}"
        self._cells = [f"{ms[0]:.1f}", f"{ms[1]:.1f}", *sizes, *runs_mib, str(compiled)]

    def cells(self) -> list[str]:
        """A row of the table."""
        return self._cells


def _resident() -> int:
    """Memory of this process; what was freed goes back to the system first."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@app.command("loading")
def loading(count: int = 20, n: int = 2048, k: int = 2048) -> None:
    """Seconds and memory of loaded graphs: compiled once, then opened in a fresh process.

    Hashing a weight is part of opening it.
    """

    def rows(folder: str) -> Iterator[list[str]]:
        for name in ("compiled", "loaded"):
            worker = Worker(name, Opened, folder=folder, count=count, n=n, k=k)
            worker.start()
            yield [name, *worker.ask("cells")]
            worker.stop()

    print(f"measured; {count} weights of {n} x {k}, 4 bits\n")
    head = "graphs|ms each (median)|most after the first|MiB each|x its weights|MiB of the first "
    with tempfile.TemporaryDirectory() as folder:
        table(head + "four runs|of the others|compiled", rows(folder))
    finish()


@app.command("layouts")
def layouts(integers: bool = False, only: Only = "int") -> None:
    """DRAM and VTCM traffic that the compiler schedules, and seconds to compile, by shape.

    `--integers`: of integer activations, as a MatMul and as a 1×1 convolution.
    """
    scheduler = Scheduler(SOC)

    def traffic(found: Any) -> list[str]:
        dram = f"{found.dram_read_bytes / MIB:.1f}, {found.dram_write_bytes / MIB:.1f}"
        return [dram, f"{found.hmx.vtcm_bytes / MIB:.0f}", f"{found.hvx.vtcm_bytes / MIB:.0f}"]

    def rows() -> Iterator[list[object]]:
        for form in forms(only) if integers else FORMS[:1]:
            weights = f"{form[0]} {form[1]} {form[2]}"
            for n, k, counts in LAYOUTS:
                weight = scaled_weight(form[1], n, k, form[2]) if integers else None
                for m in counts:
                    if weight is None:
                        found = scheduler.schedule(n, k, m)
                        yield [weights, m, n, k, "", *traffic(found), f"{found.prepare_s:.2f}"]
                        continue
                    for node in ("MatMul", "Conv"):
                        try:
                            told = traffic(_integer(scheduler, form, weight, m, node))
                        except DeviceError as error:
                            told = [error.code[:60], "", ""]
                        yield [weights, m, n, k, node, *told, ""]

    print(f"the compiler's schedules for {SOC}; compile times measured\n")
    table("form|m|n|k|as|DRAM read, written MiB|HMX MiB|HVX MiB|compiled in s", rows())
    scheduler.close()
    finish()


def _integer(
    scheduler: Scheduler,
    form: tuple[Any, WeightFormat, str],
    weight: PackedWeight,
    m: int,
    as_: str,
) -> Any:
    """The schedule of a matmul of integer activations."""
    op = ops.MatMul(n=weight.n, k=weight.k, weight_format=form[1])
    identity = Identity(f"{op!r} {form[0]} {as_}", m, weights=weight_digest(weight))

    def make() -> Any:
        return integer.matmul(op, m, weight, form[0], convolution=as_ == "Conv")

    return scheduler.store.find(identity, make)


@app.command("bundle")
def bundle(model: str = LLAMA, sizes: str = "32,128,256") -> None:
    """`hetero compile` of a model: minutes and peak memory; bounds of 1B: 20 minutes and 6 GB."""
    with tempfile.TemporaryDirectory() as folder:
        start_s, peak = time.perf_counter(), 0
        command = [sys.executable, "-P", "-m", "hetero.start", "compile", model, "--soc", SOC]
        command += ["--graph-sizes", sizes, "--out", f"{folder}/bundle"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
            while job.poll() is None:
                peak = max(peak, _private_of_tree(job.pid))
                time.sleep(0.05)
        minutes = (time.perf_counter() - start_s) / 60
        files = [x.stat().st_size for x in Path(folder, "bundle", "graphs").glob("*/*.bin")]
    print(f"measured; {model}, sizes {sizes}\n")
    told = [f"{sum(files) / MIB:,.0f}", f"{minutes:.1f}", f"{peak / 2**30:.2f}", job.returncode]
    table("graphs|MiB|minutes|GiB of memory|exit", [[len(files), *told]])
    finish()


def _private_of_tree(pid: int) -> int:
    """Memory of a process and its children that is not of files, in bytes."""
    total, waiting = 0, [str(pid)]
    while waiting:
        each = waiting.pop()
        try:
            status = Path(f"/proc/{each}/status").read_text()
            waiting += Path(f"/proc/{each}/task/{each}/children").read_text().split()
        except OSError:
            continue
        lines = dict(line.split(":", 1) for line in status.splitlines())
        total += 1024 * int(lines.get("RssAnon", "0 kB").split()[0])
    return total


@app.command("calibrate")
def calibrate() -> None:
    """The physical model of schedules: fit to six NPU timings, and leave-one-out error."""
    data = json.loads((DATA / "snapdragon_8_gen_3_calibration.json").read_text())
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
