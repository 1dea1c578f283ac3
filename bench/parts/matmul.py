"""Speed of the OpenCL matmul on one core, beside ONNX Runtime."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
import typer
from common import Rounds, finish, in_turns, integers, random_weight, spread, table

from hetero.backends import opencl, ort_cpu
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.ops import MatMul
from hetero.backends.optional import SupportsQueueControl
from hetero.backends.protocol import Device

SHAPES = "3072x2048,2048x2048,16384x2048,2048x8192"  # Llama-3.2-1B: rows, features
STREAMED_TOKENS = 8  # up to this token count the weights, not the arithmetic, set the speed
X_SCALE = np.full(1, 0.03, np.float32)  # of w8a8's activations
HEAD = "format|n x k|m|runtime|ms (median)|min|max|GOP/s|GB/s|× the first"


def contender(
    device: Device, op: MatMul, m: int, count: int, clock: Callable[[], float]
) -> Callable[[], float]:
    """Seconds of a call, over `count` distinct matrices."""
    x, y = new_tensor((m, op.k)), new_tensor((m, op.n))
    x.array[:] = np.random.default_rng(0).standard_normal((m, op.k), dtype=np.float32)
    weights = [random_weight(op.weight_format.storage, op.n, op.k) for _ in range(count)]
    extra = {"x_scale": X_SCALE} if op.weight_format.activations.static else {}
    calls = [device.prepare(op, {"weight": w, **extra}).bind({"x": x, "y": y}, m) for w in weights]

    def run() -> float:
        start_s = clock()
        for call in calls:
            call.submit() if device.capabilities.asynchronous else call.run()
        if isinstance(device, SupportsQueueControl):  # no polling on the worker's core
            device.finish()
        return (clock() - start_s) / count

    return run


def speeds(
    found: dict[str, list[float]], operations: int, nbytes: int
) -> Iterator[tuple[str, list[str]]]:
    """Of each runtime times, rates, and the median of the rounds' ratios to the first one's."""
    first = next(iter(found.values()))
    for runtime, times in found.items():
        middle = statistics.median(times)
        rates = f"{1e-9 * operations / middle:.0f}", f"{1e-9 * nbytes / middle:.1f}"
        ratio = statistics.median(np.divide(times, first).tolist())
        yield runtime, [*spread(times, 1e3, 3), *rates, f"{ratio:.2f}"]


def matmul(
    formats: str = ",".join(WeightFormat),
    tokens: str = "1,4,32,256",
    shapes: str = SHAPES,
    r: Rounds = 7,
    core: int = 0,
    streamed_mb: Annotated[int, typer.Option(help="of weights, for few tokens")] = 512,
    clock: Annotated[str, typer.Option(help="cpu or wall")] = "cpu",
) -> None:
    """Speed of the OpenCL matmul on one core, beside ONNX Runtime: both as our backends run them.

    Decode-like token counts stream a working set of distinct matrices the size of a model. GB/s
    count packed weights and scales once per call. The clock is the process's CPU time, which other
    programs on the core do not stretch: everything here runs on one core.
    """
    if clock not in ("cpu", "wall"):
        raise typer.BadParameter(f"the clock is cpu or wall, got {clock}")
    os.sched_setaffinity(0, {core})
    now = time.process_time if clock == "cpu" else time.perf_counter
    counts, rows = integers(tokens), []
    with opencl.open(cpu=core) as gpu, ort_cpu.open(graph_sizes=tuple(counts)) as npu:
        devices: dict[str, Device] = {"opencl": gpu, "onnxruntime": npu}
        print(f"measured; {gpu.info.fingerprint}; {r} rounds\n")
        for name in formats.split(","):
            for shape in shapes.split(","):
                n, k = map(int, shape.split("x"))
                op = MatMul(n=n, k=k, weight_format=WeightFormat(name))
                able = {x: device for x, device in devices.items() if device.accepts(op)}
                nbytes = random_weight(op.weight_format.storage, n, k).nbytes
                for m in counts:
                    count = max(1, (streamed_mb << 20) // nbytes) if m <= STREAMED_TOKENS else 1
                    runs = {x: contender(d, op, m, count, now) for x, d in able.items()}
                    for runtime, cells in speeds(in_turns(runs, r), 2 * m * n * k, nbytes):
                        rows.append([name, shape, m, runtime, *cells])
    table(HEAD, rows)
    finish()
