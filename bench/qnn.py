"""Figures of the QNN backend (docs/qnn.md), each made again by one sub-command:

    python bench/qnn.py accuracy     every weight format against float64 of the dequantised weights
    python bench/qnn.py identity     that padding, cutting and the cache change no bit
    python bench/qnn.py loading      second start: seconds and memory of a loaded graph
    python bench/qnn.py layouts      DRAM and VTCM traffic that the compiler schedules, by shape
    python bench/qnn.py integer_layouts  the same for integer activations, by kind of node
    python bench/qnn.py preparation  compile time against shape (the paper's figure 9)
    python bench/qnn.py bundle       `hetero compile` of a 1B model: minutes and peak memory
    python bench/qnn.py sharing      size of one file for four graph sizes over one size's
    python bench/qnn.py calibrate    the physical model: fit, and leave-one-out error
    python bench/qnn.py text MODEL   30 greedy tokens on the emulated Hexagon against float64

Compile times are this machine's. Emulated run times are printed nowhere: they are no speeds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hetero import LLM
from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.groups import Group, GroupStep
from hetero.backends.memory import new_tensor
from hetero.backends.ops import WeightFormat
from hetero.backends.qnn import catalog, integer
from hetero.backends.qnn import open as open_qnn
from hetero.backends.qnn.store import GraphStore, Identity, read_entry, weight_digest
from hetero.backends.weights import PackedWeight, pack
from hetero.profiler.compiled import Scheduler, Work, fit_model, leave_one_out

CALIBRATION = Path(__file__).with_name("data") / "snapdragon_8_gen_3_calibration.json"
MIB = 2**20
CLOSE = 0.02


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


def accuracy(only: str = "") -> None:
    """Relative error of the whole result against float64 of the dequantised weights; bound 5e-4.

    `only` takes the forms whose description begins so, such as "int16 w4a16".

    Of 8-bit activations also against float64 of the rounded activations, in steps of the result's
    codes: half a step is output rounding alone.
    """
    random = np.random.default_rng(0)
    print("| activations | weights | m | n | k | error | of the rounded x, in steps of y |")
    print("|---|---|---|---|---|---|---|")
    for activations, weight_format, scales in _forms(only):
        for m, n, k in ((1, 2048, 2048), (32, 2048, 2048), (32, 2048, 8192), (128, 8192, 2048)):
            weight = _scaled_weight(weight_format, n, k, scales)
            x = random.standard_normal((m, k)).astype(np.float32)
            found = _product(activations, weight_format, weight, x)
            dense = weight.dequantize().astype(np.float64)
            expected = x.astype(np.float64) @ dense.T
            error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            steps = "" if activations != "int8" else _steps(found, x, weight, dense)
            print(
                f"| {activations} | {weight_format} {scales} | {m} | {n} | {k} | {error:.2e} | "
                f"{steps} |",
                flush=True,
            )
    if "feed-forward".startswith(only):
        _group_accuracy()


def _forms(only: str) -> list[tuple[Any, WeightFormat, str]]:
    return [form for form in FORMS if " ".join(form).startswith(only)]


def _product(activations: Any, weight_format: WeightFormat, weight: PackedWeight, x: Any) -> Any:
    op = ops.MatMul(n=weight.n, k=weight.k, weight_format=weight_format)
    tensors = {"x": new_tensor(x.shape), "y": new_tensor((len(x), weight.n))}
    tensors["x"].array[:] = x
    with open_qnn(graph_sizes=(len(x),), cache=None, activations=activations) as device:
        device.prepare(op, {"weight": weight}).bind(tensors, len(x)).run()
    return tensors["y"].array


def _steps(found: Any, x: Any, weight: PackedWeight, dense: Any) -> str:
    """Distance to float64 of the 8-bit activations, in steps of each element's output code."""
    size = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    wanted = (np.rint(x / size * 127) / 127 * size) @ dense.T
    step = size * np.abs(integer.row_units(weight)) * integer.REACH / 127
    off = np.abs(found - wanted) / step
    return f"{off.mean():.2f} on average, {off.max():.2f} at most"


def _group_accuracy(d: int = 2048, f: int = 5632) -> None:
    """The feed-forward as one graph, of 4-bit weights."""
    up = ops.MatMul(n=2 * f, k=d, weight_format=WeightFormat.W4A16)
    down = ops.MatMul(n=d, k=f, weight_format=WeightFormat.W4A16)
    weights = [_scaled_weight(op.weight_format, op.n, op.k, "groups") for op in (up, down)]
    group = Group(
        "feed_forward",
        (
            GroupStep(up, (("x", "h"), ("y", "wide"))),
            GroupStep(ops.GatedAct(f=f), (("x", "wide"), ("y", "active"))),
            GroupStep(down, (("x", "active"), ("y", "h"))),
        ),
        ("h",),
    )
    first, second = (weight.dequantize().astype(np.float64) for weight in weights)
    for m in (1, 32, 128):
        h = new_tensor((m, d))
        h.array[:] = 0.01 * np.random.default_rng(m).standard_normal((m, d))
        wide = h.array @ first.T
        gate = wide[:, :f]
        expected = (gate / (1 + np.exp(-gate)) * wide[:, f:]) @ second.T
        with open_qnn(graph_sizes=(m,), cache=None) as device:
            values: Any = [{"weight": weights[0]}, {}, {"weight": weights[1]}]
            device.prepare_group(group, values).bind({"h": h}, m).run()
        error = np.linalg.norm(h.array - expected) / np.linalg.norm(expected)
        print(f"| float16 | w4a16 feed-forward | {m} | {d} | {f} | {error:.2e} | |", flush=True)


def identity(only: str = "") -> None:
    """That no bit depends on padding, on cutting tokens or features, or on the cache.

    `only` as for `accuracy`.
    """
    random = np.random.default_rng(0)
    checked = 0
    for activations, weight_format, scales in _forms(only):
        for n, k in ((256, 2048), (64, 8192), (208, 172)):
            weight = _scaled_weight(weight_format, n, k, scales)
            x = random.standard_normal((320, k)).astype(np.float32)
            x[3], x[5], x[200] = 0, 1e5 * x[5], 2000 * np.sign(weight.dequantize()[-1])
            checked += _check_identity(activations, weight_format, weight, x)
        print(f"{activations}, {weight_format} {scales}: equal", flush=True)
    print(f"{checked} comparisons, every one equal bit for bit")


def _check_identity(
    activations: Any, weight_format: WeightFormat, weight: PackedWeight, x: Any
) -> int:
    """Compare a call of all tokens with many others; how many there were."""
    op = ops.MatMul(n=weight.n, k=weight.k, weight_format=weight_format)
    sizes = (1, 8, 32, 64, 128, len(x))
    checked = 0
    with tempfile.TemporaryDirectory() as folder:

        def run(device: Any, rows: Any, m: int, start: int = 0, stop: int = weight.n) -> Any:
            part = weight if (start, stop) == (0, weight.n) else weight.rows(start, stop)
            tensors = {"x": new_tensor((m, weight.k)), "y": new_tensor((m, part.n))}
            tensors["x"].array[: len(rows)] = rows
            device.prepare(replace(op, n=part.n), {"weight": part}).bind(tensors, m).run()
            return tensors["y"].array[: len(rows)].copy()

        options: Any = {"graph_sizes": sizes, "activations": activations}
        with open_qnn(cache=None, **options) as device:
            whole = run(device, x, len(x))
            for m in sizes:
                for first, last in ((0, m), (max(0, 201 - m), 201), (3, 3 + max(1, m // 3))):
                    np.testing.assert_array_equal(run(device, x[first:last], m), whole[first:last])
                    checked += 1
            half = weight.n // 2 // 16 * 16
            for start, stop in ((0, half), (half, half + 1), (half, weight.n)):
                for m in (32, len(x)):
                    found = run(device, x[:m], m, start, stop)
                    np.testing.assert_array_equal(found, whole[:m, start:stop])
                    checked += 1
        for _ in range(2):  # compiled into the cache, then opened from it
            with open_qnn(cache=folder, **options) as device:
                np.testing.assert_array_equal(run(device, x[:32], 32), whole[:32])
                checked += 1
    return checked


def loading(count: int = 20, n: int = 2048, k: int = 2048) -> None:
    """Compile `count` weights once, then open them all again in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        for action in ("compiled", "loaded"):
            command = [sys.executable, __file__, "_open", folder, str(count), str(n), str(k)]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            print(f"{action}: {answer.strip()}")


def _open(folder: str, count: int, n: int, k: int) -> None:
    random = np.random.default_rng(0)
    op = ops.MatMul(n=n, k=k, weight_format=WeightFormat.W4A16)
    weights = [
        pack(random.standard_normal((n, k), dtype=np.float32), op.weight_format.storage)
        for _ in range(count)
    ]
    tensors = {"x": new_tensor((32, k)), "y": new_tensor((32, n))}
    with open_qnn(graph_sizes=(32,), cache=folder) as device:
        seconds, opened, calls = [], [_resident()], []
        for weight in weights:
            start = time.perf_counter()
            calls.append(device.prepare(op, {"weight": weight}).bind(tensors, 32))
            seconds.append(time.perf_counter() - start)
            opened.append(_resident())
        grown = float(np.median(np.diff(opened)))  # the first few bring the library with them
        held = [_resident()]
        for call in calls:
            call.run()
            held.append(_resident())
        runs = np.diff(held) / MIB
        counts = device.store.counts
    print(
        f"median {1e3 * float(np.median(seconds)):.1f} ms a graph (hashing its weight included), "
        f"largest after the first {1e3 * max(seconds[1:]):.1f} ms, memory {grown / MIB:.2f} MiB a "
        f"graph = {grown / weights[0].nbytes:.2f} × its weights; a run of each adds "
        f"{runs[:4].sum():.1f} MiB in the first four and {runs[4:].sum():.1f} in all others; "
        f"compiled {counts.compiled}"
    )


def _resident() -> int:
    """Memory of this process; what was freed goes back to the system first."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bundle(model: str = "random:llama-3.2-1b", sizes: str = "32,128,256") -> None:
    """Compile a model for sm8650; bounds: 20 minutes and 6 GB."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        program = "from hetero.cli.app import main; main()"
        command = [sys.executable, "-c", program, "compile", model, "--soc", "sm8650", "--json",
                   "--graph-sizes", sizes, "--out", f"{folder}/bundle"]  # fmt: skip
        peak = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
            while job.poll() is None:
                peak = max(peak, _private_of_tree(job.pid))
                time.sleep(0.05)
        seconds = time.perf_counter() - start
        entries = list(Path(folder, "bundle", "graphs").glob("*/*.bin"))
        nbytes = sum(entry.stat().st_size for entry in entries)
    print(
        f"{model}, sizes {sizes}: {len(entries)} graphs, {nbytes / MIB:,.0f} MiB, "
        f"{seconds / 60:.1f} minutes, {peak / 2**30:.2f} GiB of memory (exit {job.returncode})"
    )


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


def sharing(n: int = 2048, k: int = 2048) -> None:
    """One binary for 1, 32, 64 and 128 tokens over the binary of 32 alone; bound: 1.05."""
    for weight_format in (WeightFormat.W4A16, WeightFormat.W8A16, WeightFormat.F16):
        op = ops.MatMul(n=n, k=k, weight_format=weight_format)
        values = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32)
        weights: Any = {"weight": pack(values, weight_format.storage)}
        graphs = [catalog.graph(op, m, weights, "random") for m in (1, 32, 64, 128)]
        with tempfile.TemporaryDirectory() as folder, open_qnn(cache=folder) as device:
            store: GraphStore = device.store  # type: ignore[attr-defined]
            many = read_entry(store.compile_shared(graphs)).nbytes
            one = read_entry(store.compile(*graphs[1])).nbytes
        print(f"{weight_format}: {many} bytes for four sizes, {one} for one: {many / one:.3f}")


def layouts() -> None:
    """What the compiler makes of token counts, order, and long inputs."""
    scheduler = Scheduler("sm8650")
    print("| m | n | k | DRAM read, written MiB | HMX MiB | HVX MiB | HMX, HVX operations |")
    print("|---|---|---|---|---|---|---|")
    for n, k, counts in (
        (2048, 2048, (1, 8, 16, 31, 32, 33, 48, 64, 128, 256, 512, 1024)),
        (8192, 2048, (32, 128, 256)),
        (2048, 8192, (32, 128, 256)),
        (4096, 4096, (1, 128, 256)),
        (4096, 14336, (1, 64, 128)),
    ):
        for m in counts:
            found = scheduler.schedule(n, k, m)
            print(
                f"| {m} | {n} | {k} | {found.dram_read_bytes / MIB:.1f}, "
                f"{found.dram_write_bytes / MIB:.1f} | {found.hmx.vtcm_bytes / MIB:.0f} | "
                f"{found.hvx.vtcm_bytes / MIB:.0f} | {found.hmx.ops}, {found.hvx.ops} |",
                flush=True,
            )
    scheduler.close()


def integer_layouts() -> None:
    """What the compiler makes of integer activations, as a MatMul and as a 1×1 convolution."""
    scheduler = Scheduler("sm8650")
    shapes = (
        (2048, 2048, (1, 31, 32, 33, 64, 128, 256, 512, 1024)),
        (8192, 2048, (32, 128, 256, 512)),
        (2048, 8192, (32, 128, 256, 512)),
        (4096, 4096, (32, 128, 256, 512)),
    )
    print("| activations | weights | m | n | k | as | DRAM read, written MiB | HMX MiB | HVX MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for activations, weight_format, scales in FORMS[3:]:
        for n, k, counts in shapes:
            weight = _scaled_weight(weight_format, n, k, scales)
            for m in counts:
                for node in ("MatMul", "Conv"):
                    found = _integer_schedule(
                        scheduler, weight, weight_format, activations, m, node
                    )
                    print(
                        f"| {activations} | {weight_format} {scales} | {m} | {n} | {k} | {node} | "
                        f"{found}",
                        flush=True,
                    )
    scheduler.close()


def _scaled_weight(weight_format: WeightFormat, n: int, k: int, scales: str) -> PackedWeight:
    """A random weight whose scales are alike in the whole weight, in rows, or nowhere."""
    random = np.random.default_rng(0)
    values = random.standard_normal((n, k), dtype=np.float32).clip(-4, 4)
    if scales != "groups":
        values[:, ::32] = 4  # the largest of each group
    if scales != "whole":
        values *= random.uniform(0.5, 2, (n, 1)).astype(np.float32)
    return pack(values, weight_format.storage)


def _integer_schedule(
    scheduler: Scheduler,
    weight: PackedWeight,
    weight_format: WeightFormat,
    activations: Any,
    m: int,
    node: str,
) -> str:
    op = ops.MatMul(n=weight.n, k=weight.k, weight_format=weight_format)
    name = f"{op!r} {activations} {node}"
    identity = Identity(name, m, weights=weight_digest(weight))
    try:
        found = scheduler.store.find(
            identity,
            lambda: integer.matmul(op, m, weight, activations, convolution=node == "Conv"),
        )
    except DeviceError as error:
        return f"{error.code[:60]} | | |"
    return (
        f"{found.dram_read_bytes / MIB:.1f}, {found.dram_write_bytes / MIB:.1f} | "
        f"{found.hmx.vtcm_bytes / MIB:.0f} | {found.hvx.vtcm_bytes / MIB:.0f} |"
    )


def preparation() -> None:
    """Seconds to compile one graph in a warm child process."""
    scheduler = Scheduler("sm8650", Path(tempfile.mkdtemp()))
    scheduler.schedule(512, 512, 32)
    print("| n | k | " + " | ".join(f"m={m}" for m in (1, 32, 64, 128, 256)) + " |")
    print("|---|---|---|---|---|---|---|")
    for n, k in ((2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096)):
        times = [scheduler.schedule(n, k, m).prepare_s for m in (1, 32, 64, 128, 256)]
        print(f"| {n} | {k} | " + " | ".join(f"{seconds:.2f}" for seconds in times) + " |")
    scheduler.close()


def calibrate() -> None:
    """Fit the six NPU timings; print the model and each point with its error when left out."""
    data = json.loads(CALIBRATION.read_text())
    dram = data["bandwidth_GB_per_s"]["gpu_only"] * 1e9
    points = data["operator_latency_us"]
    scheduler = Scheduler("sm8650")
    works = [scheduler.work(p["n"], p["k"], p["m"]) for p in points]
    scheduler.close()
    seconds = [p["npu"] * 1e-6 for p in points]
    model = fit_model(works, seconds, dram)
    print(model)
    left_out = leave_one_out(works, seconds, dram)
    print("| n | k | m | measured µs | fitted µs | error | left out |")
    print("|---|---|---|---|---|---|---|")
    for point, work, loo in zip(points, works, left_out, strict=True):
        fitted = 1e6 * model.seconds(work)
        print(
            f"| {point['n']} | {point['k']} | {point['m']} | {point['npu']} | {fitted:.0f} | "
            f"{fitted / point['npu'] - 1:+.0%} | {loo:+.0%} |"
        )
    print(f"mean absolute error left out: {np.mean(np.abs(left_out)):.0%}")
    memory = [Work(0, work.dram_bytes, work.dram_bytes) for work in works]
    alone = leave_one_out(memory, seconds, 1e15)
    print(f"the same from DRAM traffic alone: {np.mean(np.abs(alone)):.0%}")


def text(model: str, tokens: int = 30) -> None:
    """Greedy tokens of `--device npu` and `hetero` on QNN against numpy float64."""
    with LLM(model, device="npu", npu="reference") as llm:
        ids = llm.encode("Once upon a time")
        expected = [llm.engine.prefill(llm.context, ids).copy()]
        while len(expected) < tokens:
            ids.append(int(expected[-1].argmax()))
            expected.append(llm.engine.decode(llm.context, ids[-1]).copy())
        answer = llm.model.tokenizer.decode(ids)
    start = len(ids) - tokens + 1
    for device in ("npu", "hetero"):
        with LLM(model, device=device, npu="qnn") as llm:  # type: ignore[arg-type]
            got = [llm.engine.prefill(llm.context, ids[:start]).copy()]
            got += [llm.engine.decode(llm.context, token).copy() for token in ids[start:]]
        _compare(device, got, expected)
    print(answer)


def _compare(device: str, got: Iterable[Any], expected: Iterable[Any]) -> None:
    equal = close = 0
    largest = 0.0
    for found, wanted in zip(got, expected, strict=True):
        second, best = np.sort(wanted)[-2:]
        same = found.argmax() == wanted.argmax()
        equal += bool(same)
        close += not same and best - second < CLOSE
        largest = max(largest, float(np.abs(found - wanted).max()))
    print(f"{device}: {equal} tokens equal, {close} others within {CLOSE}; logits ±{largest:.4f}")


def main() -> None:
    """Run one sub-command."""
    parser = argparse.ArgumentParser(description=__doc__)
    functions: tuple[Any, ...] = (
        accuracy, identity, loading, layouts, integer_layouts, preparation, bundle, sharing,
        calibrate, text,
    )  # fmt: skip
    commands = {f.__name__: f for f in functions}
    parser.add_argument("command", choices=[*commands, "_open"])
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_args()
    if asked.command == "_open":
        folder, *sizes = asked.arguments
        _open(folder, *map(int, sizes))
        return
    commands[asked.command](*asked.arguments)


if __name__ == "__main__":
    main()
