"""Speed of the OpenCL matmul on one core, beside ONNX Runtime."""

from __future__ import annotations

import os
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from common import Rounds, finish, in_turns, integers, random_weight, table

from hetero.backends import opencl
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.ops import MatMul

SHAPES = "3072x2048,2048x2048,16384x2048,2048x8192"  # Llama-3.2-1B: rows, features
ACCURACY_LEVEL = {WeightFormat.W4A16: 0, WeightFormat.W4A8: 4, WeightFormat.W8A16: 0}
STREAMED_TOKENS = 8  # up to this token count the weights, not the arithmetic, set the speed


X_SCALE = np.full(1, 0.03, np.float32)  # of w8a8's activations


def ort_model(op: MatMul) -> Any:
    """ONNX Runtime on one random matrix of its own layout, one thread."""
    if op.weight_format is WeightFormat.W8A8:
        return static_model(op)
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(1)
    if op.weight_format is WeightFormat.F32:
        values: dict[str, Any] = {"w": rng.standard_normal((op.k, op.n), dtype=np.float32)}
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
    else:
        bits = 8 if op.weight_format is WeightFormat.W8A16 else 4
        data = rng.integers(0, 256, (op.n, op.k // 32, 4 * bits), dtype=np.uint8)
        values = {"w": data, "s": rng.random((op.n, op.k // 32), dtype=np.float32)}
        sizes: dict[str, Any] = {"K": op.k, "N": op.n, "bits": bits, "block_size": 32}
        sizes["accuracy_level"] = ACCURACY_LEVEL[op.weight_format]
        node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"],
                                domain="com.microsoft", **sizes)  # fmt: skip
    info = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(value, name) for name, value in values.items()]
    inputs, outputs = (
        [info(name, TensorProto.FLOAT, ["m", size])] for name, size in (("x", op.k), ("y", op.n))
    )
    graph = helper.make_graph([node], "matmul", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    providers = ["CPUExecutionProvider"]
    return ort.InferenceSession(model.SerializeToString(), options, providers=providers)


def static_model(op: MatMul) -> Any:
    """The graph of `ort-cpu` for w8a8, which reads the scales where they lie."""
    from hetero.backends.onnx_common.packing import stage_by_feature
    from hetero.backends.ort_cpu import graphs, session
    from hetero.backends.ort_cpu.integers import exact_codes

    codes = exact_codes()
    staged = stage_by_feature(random_weight(op.weight_format.storage, op.n, op.k), codes)
    arrays = {name: value.array for name, value in staged.items()}
    made = session.new_session(graphs.static_matmul(op, codes), arrays)
    weakref.finalize(made, staged.clear)
    return made


def contenders(
    device: Any, op: MatMul, m: int, count: int, baseline: bool, clock: Callable[[], float]
) -> dict[str, Callable[[], float]]:
    """Seconds of a call, by runtime, over `count` distinct matrices."""
    x, y = new_tensor((m, op.k)), new_tensor((m, op.n))
    x.array[:] = np.random.default_rng(0).standard_normal((m, op.k), dtype=np.float32)
    weights = [random_weight(op.weight_format.storage, op.n, op.k) for _ in range(count)]
    extra = {"x_scale": X_SCALE} if op.weight_format.activations.static else {}
    calls = [device.prepare(op, {"weight": w, **extra}).bind({"x": x, "y": y}, m) for w in weights]

    def ours() -> float:
        start_s = clock()
        for call in calls:
            call.submit()
        device.queue.finish()  # no polling on the worker's core
        return (clock() - start_s) / count

    found: dict[str, Callable[[], float]] = {"opencl": ours}
    if baseline and op.weight_format is not WeightFormat.F16:
        models = [ort_model(op) for _ in range(count)]

        def theirs() -> float:
            start_s = clock()
            for model in models:
                model.run(None, {"x": x.array, **extra})
            return (clock() - start_s) / count

        found["onnxruntime"] = theirs
    return found


def matmul(
    formats: str = ",".join(WeightFormat),
    tokens: str = "1,4,32,256",
    shapes: str = SHAPES,
    r: Rounds = 7,
    core: int = 0,
    family: Annotated[str | None, typer.Option(help="tuning family to force")] = None,
    streamed_mb: Annotated[int, typer.Option(help="of weights, for few tokens")] = 512,
    baseline: Annotated[bool, typer.Option(help="ONNX Runtime beside it")] = True,
    clock: Annotated[str, typer.Option(help="cpu or wall")] = "cpu",
) -> None:
    """Speed of the OpenCL matmul on one core, beside ONNX Runtime.

    Decode-like token counts stream a working set of distinct matrices the size of a model. GB/s
    count weights and scales once per call. The clock is the process's CPU time, which other
    programs on the core do not stretch: everything here runs on one core.
    """
    if clock not in ("cpu", "wall"):
        raise typer.BadParameter(f"the clock is cpu or wall, got {clock}")
    os.sched_setaffinity(0, {core})
    now = time.process_time if clock == "cpu" else time.perf_counter
    head = "format|n x k|m|runtime|ms (median)|min|max|GOP/s|GB/s|× opencl"
    with opencl.open(cpu=core, family=family) as device:
        print(f"measured; {device.info.fingerprint}; {r} rounds\n")
        rows = []
        for name in formats.split(","):
            for shape in shapes.split(","):
                n, k = map(int, shape.split("x"))
                op = MatMul(n=n, k=k, weight_format=WeightFormat(name))
                nbytes = random_weight(op.weight_format.storage, n, k).nbytes
                for m in integers(tokens):
                    count = max(1, (streamed_mb << 20) // nbytes) if m <= STREAMED_TOKENS else 1
                    found = in_turns(contenders(device, op, m, count, baseline, now), r)
                    for runtime, times in found.items():
                        rows.append([name, shape, m, runtime, *cells(op, m, nbytes, times, found)])
        table(head, rows)
    finish()


def cells(
    op: MatMul, m: int, nbytes: int, times: list[float], found: dict[str, list[float]]
) -> list[str]:
    """Times, rates, and the median of the rounds' ratios."""
    middle = statistics.median(times)
    ratios = (a / b for a, b in zip(times, found["opencl"], strict=True))
    ms = [f"{1e3 * s:.3f}" for s in (middle, min(times), max(times))]
    rates = f"{2 * m * op.n * op.k / middle / 1e9:.0f}", f"{nbytes / middle / 1e9:.1f}"
    return [*ms, *rates, f"{statistics.median(ratios):.2f}"]
