"""Speed of the OpenCL matmul on one core, beside the core's roofline and ONNX Runtime.

    python bench/opencl_matmul.py --formats w4a8 w4a16 --tokens 1 256 --core 0

Decode-like token counts stream a working set of distinct matrices the size of a model; the rounds
of OpenCL and ONNX Runtime alternate, so that both see the same disturbances. Each cell is the
median over the rounds with [fastest-slowest]; GB/s count weights and scales once per call. The
clock is the process's CPU time, which other programs on the core do not stretch (`--clock wall`
for wall time): everything here runs on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pyopencl as cl
from onnx import TensorProto, helper, numpy_helper

from hetero.backends import opencl
from hetero.backends.host.files import atomic_write
from hetero.backends.memory import HostBuffer, Tensor, new_tensor
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.program_source import source, uncached
from hetero.backends.ops import MatMul, StorageFormat, WeightFormat
from hetero.backends.protocol import BoundCall
from hetero.backends.weights import PackedWeight, data_dtype, data_shape, scales_shape

SHAPES = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))  # Llama-3.2-1B: rows, features
ACCURACY_LEVEL = {WeightFormat.W4A16: 0, WeightFormat.W4A8: 4, WeightFormat.W8A16: 0}
ORT_FORMATS = (*ACCURACY_LEVEL, WeightFormat.F32)
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
STREAMED_TOKENS = 8  # up to this token count the weights, not the arithmetic, set the speed

PEAK_SOURCE = """
__kernel void peak_read(__global const float *a, __global float *out, const int n) {
  vfloat s[4] = {0, 0, 0, 0};
  for (size_t i = 0; i < n; i++)
    _Pragma("unroll") for (int j = 0; j < 4; j++) s[j] += VLOAD(a + (4 * i + j) * VEC);
  VSTORE(s[0] + s[1] + s[2] + s[3], out);
}
#define LOOP(name, type, as_type, step)                                           \\
  __kernel void name(__global const float *a, __global float *out, const int n) { \\
    type s[12], b = as_type(VLOAD(a));                                            \\
    for (int i = 0; i < 12; i++) s[i] = i;                                        \\
    for (int j = 0; j < n; j++)                                                   \\
      _Pragma("unroll") for (int i = 0; i < 12; i++) step;                        \\
    for (int i = 1; i < 12; i++) s[0] += s[i];                                    \\
    VSTORE(CAT(as_float, VEC)(s[0]), out);                                        \\
  }
LOOP(peak_float, vfloat, CAT(as_float, VEC), s[i] = s[i] * b + b)
#if VEC == 16 && defined(__AVX512VNNI__)
LOOP(peak_int8, int16, as_int16, s[i] = __builtin_ia32_vpdpbusd512(s[i], b, b))
#endif
"""


@dataclass(frozen=True)
class Roofline:
    """Measured limits of one core. `int8` is 0 where there is no integer dot product."""

    read_bytes_per_s: float
    float_flops: float
    int8_ops: float


@dataclass(frozen=True)
class Row:
    """One cell of the table: times of one call, by runtime."""

    weight_format: str
    n: int
    k: int
    m: int
    nbytes: int
    times_s: dict[str, list[float]]


def random_weight(rng: np.random.Generator, storage: StorageFormat, n: int, k: int) -> PackedWeight:
    """A packed weight of random bits (4 and 8 bits) or small normal values."""
    shape, dtype = data_shape(storage, n, k), data_dtype(storage)
    if storage in (StorageFormat.F16, StorageFormat.F32):
        data = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        return PackedWeight(storage, n, k, data)
    bits = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype=dtype)
    scales = rng.random(scales_shape(n, k), dtype=np.float32).astype(np.float16)
    return PackedWeight(storage, n, k, bits.reshape(shape), scales)


def random_tensor(rng: np.random.Generator, m: int, k: int) -> Tensor:
    """Activations."""
    x = new_tensor((m, k))
    x.array[:] = rng.standard_normal((m, k), dtype=np.float32)
    return x


class Candidate:
    """Distinct matrices of one shape on one runtime; `run` multiplies with each once."""

    def __init__(self, run: Callable[[], None], calls: int) -> None:
        self.run = run
        self.calls = calls

    def seconds_per_call(self, clock: Callable[[], float]) -> float:
        """Time of one round over the matrices, divided by their number."""
        start = clock()
        self.run()
        return (clock() - start) / self.calls


def opencl_candidate(
    device: OpenCLDevice, op: MatMul, weights: list[PackedWeight], x: Tensor, m: int
) -> Candidate:
    """Every call is enqueued, then the queue is drained: no polling on the worker's core."""
    y = new_tensor((m, op.n))
    calls: list[BoundCall] = [
        device.prepare(op, {"weight": weight}).bind({"x": x, "y": y}, m) for weight in weights
    ]

    def run() -> None:
        for call in calls:
            call.submit()
        device.queue.finish()

    return Candidate(run, len(calls))


def ort_candidate(op: MatMul, count: int, x: npt.NDArray[np.float32]) -> Candidate:
    """ONNX Runtime on `count` random matrices of its own layout, one thread."""
    rng = np.random.default_rng(1)
    sessions = [_session(_ort_model(rng, op)) for _ in range(count)]

    def run() -> None:
        for session in sessions:
            session.run(None, {"x": x})

    return Candidate(run, count)


def _ort_model(rng: np.random.Generator, op: MatMul) -> onnx.ModelProto:
    if op.weight_format is WeightFormat.F32:
        value = rng.standard_normal((op.k, op.n), dtype=np.float32)
        return _graph(op, helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": value})
    bits = 8 if op.weight_format is WeightFormat.W8A16 else 4
    data = rng.integers(0, 256, (op.n, op.k // 32, 4 * bits), dtype=np.uint8)
    scales = rng.random((op.n, op.k // 32), dtype=np.float32)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "w", "s"],
        ["y"],
        domain="com.microsoft",
        K=op.k,
        N=op.n,
        bits=bits,
        block_size=32,
        accuracy_level=ACCURACY_LEVEL[op.weight_format],
    )
    return _graph(op, node, {"w": data, "s": scales})


def _graph(op: MatMul, node: Any, initializers: dict[str, npt.NDArray[Any]]) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node],
        "matmul",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", op.k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", op.n])],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def measure(
    device: OpenCLDevice,
    weight_format: WeightFormat,
    shape: tuple[int, int],
    tokens: list[int],
    *,
    rounds: int,
    streamed_bytes: int,
    baseline: bool,
    clock: Callable[[], float],
) -> list[Row]:
    """Rows for one format and shape, all token counts on the same matrices."""
    n, k = shape
    rng = np.random.default_rng(0)
    op = MatMul(n=n, k=k, weight_format=weight_format)
    first = random_weight(rng, weight_format.storage, n, k)
    count = max(1, -(-streamed_bytes // first.nbytes))
    weights = [_copy(first) for _ in range(count)]
    rows = []
    for m in tokens:
        used = weights if m <= STREAMED_TOKENS else weights[:1]
        x = random_tensor(rng, m, k)
        candidates = {"opencl": opencl_candidate(device, op, used, x, m)}
        if baseline and weight_format in ORT_FORMATS:
            candidates["ort"] = ort_candidate(op, len(used), x.array)
        times = interleaved(candidates, rounds=rounds, clock=clock)
        rows.append(Row(weight_format, n, k, m, first.nbytes, times))
        print(line(rows[-1]), flush=True)
    return rows


def interleaved(
    candidates: dict[str, Candidate], *, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds per call of every candidate in every round, after one round of warming up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate.run()
    for _ in range(rounds):
        for name, candidate in candidates.items():
            times[name].append(candidate.seconds_per_call(clock))
    return times


def _copy(weight: PackedWeight) -> PackedWeight:
    """The same numbers at another address: what streams is memory, not values."""
    scales = None if weight.scales is None else aligned(weight.scales)
    return PackedWeight(weight.storage, weight.n, weight.k, aligned(weight.data), scales)


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy at a multiple of 64 bytes, as in a model file."""
    copy = HostBuffer(array.nbytes).array(array.dtype, array.shape)
    copy[:] = array
    return copy


def measure_roofline(device: OpenCLDevice) -> Roofline:
    """Best of five of three small kernels on the device's own worker."""
    width = device.tuning.vector
    program = uncached(device.context, source("common.cl") + PEAK_SOURCE)
    program.build(["-cl-mad-enable", f"-DVEC={width}"])
    data = np.ones(1 << 26, dtype=np.float32)
    operand, out = device.constant(data), device.shared_scratch(4096)

    def best_s(name: str, count: int) -> float:
        kernel = cl.Kernel(program, name)
        kernel.set_args(operand, out, np.int32(count))
        times = []
        for _ in range(6):
            start = time.process_time()
            cl.enqueue_nd_range_kernel(device.queue, kernel, (1,), (1,))
            device.queue.finish()
            times.append(time.process_time() - start)
        return min(times[1:])

    loops = 1 << 20
    int8 = "peak_int8" in program.kernel_names.split(";")
    return Roofline(
        read_bytes_per_s=data.nbytes / best_s("peak_read", data.size // (4 * width)),
        float_flops=2 * width * 12 * loops / best_s("peak_float", loops),
        int8_ops=8 * width * 12 * loops / best_s("peak_int8", loops) if int8 else 0.0,
    )


def line(row: Row) -> str:
    """One row of the table."""
    cells = [f"{row.weight_format:6} n={row.n:6} k={row.k:5} m={row.m:4}"]
    flops = 2 * row.m * row.n * row.k
    for name, times in row.times_s.items():
        middle = statistics.median(times)
        spread = f"[{min(times) * 1e3:.3f}-{max(times) * 1e3:.3f}]"
        cells.append(
            f"{name:6} {middle * 1e3:8.3f} ms {spread:17} {flops / middle / 1e9:5.0f} GOP/s "
            f"{row.nbytes / middle / 1e9:5.1f} GB/s"
        )
    if len(row.times_s) > 1:
        ratios = [b / a for a, b in zip(*row.times_s.values(), strict=True)]
        cells.append(f"{statistics.median(ratios):.2f}x")
    return " | ".join(cells)


def environment(device: OpenCLDevice) -> dict[str, str]:
    """What a reader needs to judge the numbers."""
    versions = {"onnxruntime": ort.__version__, "pyopencl": cl.VERSION_TEXT}
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    cpu = next(
        (text for text in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in text),
        platform.processor(),
    )
    return {"device": device.info.fingerprint, "cpu": cpu, "load": load, **versions}


def main() -> None:
    """Parse, measure, print; `--json` keeps every sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=[str(f) for f in WeightFormat])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 32, 256])
    parser.add_argument("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--family", help="tuning family to force")
    parser.add_argument("--streamed-mb", type=int, default=512)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    with opencl.open(cpu=options.core, family=options.family) as device:
        report: dict[str, Any] = {"environment": environment(device), "rows": []}
        roofline = measure_roofline(device)
        print(report["environment"], roofline, sep="\n")
        for name in options.formats:
            for shape in options.shapes:
                n, k = map(int, shape.split("x"))
                rows = measure(
                    device,
                    WeightFormat(name),
                    (n, k),
                    options.tokens,
                    rounds=options.rounds,
                    streamed_bytes=options.streamed_mb << 20,
                    baseline=not options.no_baseline,
                    clock=CLOCKS[options.clock],
                )
                report["rows"] += [asdict(row) for row in rows]
    if options.json:
        atomic_write(options.json, json.dumps(report | {"roofline": asdict(roofline)}, indent=1))


if __name__ == "__main__":
    main()
