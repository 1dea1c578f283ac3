"""Both processors at once: memory bandwidth and slowdown (paper section 3.3, figure 6)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hetero.backends.ops import WeightFormat
from hetero.backends.protocol import Completion, DeviceKind
from hetero.profiler.grid import Task
from hetero.profiler.predict import weight_bytes
from hetero.profiler.records import Bandwidth, Contention, Phase
from hetero.profiler.workload import Runner, Workload

# m, n, k: a weight larger than any private cache for decode; compute-bound for prefill.
SIZES: Final[dict[Phase, tuple[int, int, int]]] = {
    "decode": (1, 8192, 2048),
    "prefill": (128, 2048, 2048),
}
WINDOW_S: Final = 0.04  # the GPU's queue in one experiment
NPU_SHARE: Final = 0.7  # of the GPU's time that the NPU works beside it
LONGEST_QUEUE: Final = 64


@dataclass(frozen=True)
class Together:
    """Times of one experiment: each device's launches alone, and side by side."""

    gpu_alone_s: float
    npu_alone_s: float
    gpu_factor: float
    npu_factor: float


def measure_together(
    workload: Workload, weight_format: WeightFormat, *, repeats: int = 7
) -> tuple[Bandwidth, tuple[Contention, ...]]:
    """Bandwidth of each device alone and together, and contention by phase; needs both devices.

    With one device, only its bandwidth alone.
    """
    if len(workload.devices) < 2:
        return _alone(workload, weight_format, repeats), ()
    contention = []
    bandwidth = Bandwidth()
    phases: tuple[Phase, ...] = ("decode", "prefill")
    for phase in phases:
        runners = {kind: _runner(workload, kind, weight_format, phase) for kind in _KINDS}
        found = _experiment(workload, runners["gpu"], runners["npu"], repeats)
        contention.append(Contention(phase=phase, gpu=found.gpu_factor, npu=found.npu_factor))
        if phase == "decode":
            size = {kind: runner.weights[0].nbytes for kind, runner in runners.items()}
            bandwidth = Bandwidth(
                gpu_alone_bytes_per_s=size["gpu"] / found.gpu_alone_s,
                npu_alone_bytes_per_s=size["npu"] / found.npu_alone_s,
                gpu_together_bytes_per_s=size["gpu"] / found.gpu_alone_s / found.gpu_factor,
                npu_together_bytes_per_s=size["npu"] / found.npu_alone_s / found.npu_factor,
            )
    return bandwidth, tuple(contention)


_KINDS: Final[tuple[DeviceKind, ...]] = ("gpu", "npu")


def load(workload: Workload, weight_format: WeightFormat, who: str) -> Callable[[], None]:
    """Work of some tens of milliseconds for `gpu`, `npu` or `both`, to measure power under."""
    runners = {kind: _runner(workload, kind, weight_format, "prefill") for kind in workload.devices}

    def run() -> None:
        queued = None
        if who in ("gpu", "both") and "gpu" in runners:
            gpu = runners["gpu"]
            if gpu.device.capabilities.asynchronous:
                queued = gpu.calls[0].submit()
            else:
                gpu.calls[0].run()
        if who in ("npu", "both") and "npu" in runners:
            runners["npu"].calls[0].run()
        if queued is not None:
            queued.wait()

    return run


def _runner(
    workload: Workload, kind: DeviceKind, weight_format: WeightFormat, phase: Phase
) -> Runner:
    m, n, k = SIZES[phase]
    sizes = workload.devices[kind].capabilities.graph_sizes
    if sizes and m not in sizes:
        m = min(sizes, key=lambda size: abs(size - m))
    task = Task(kind, weight_format, "plain", m, n, k)
    size = weight_bytes(weight_format, n, k)
    copies = math.ceil(workload.cold / size) if phase == "decode" else 2
    runner = workload.make_runner(task, copies=max(copies, 2))
    for copy in range(len(runner.calls)):
        runner.calls[copy].run()
    return runner


def _experiment(workload: Workload, gpu: Runner, npu: Runner, repeats: int) -> Together:
    """The GPU's queue is filled, the NPU runs beside it on this thread, and both are timed.

    The GPU's queue takes T0 alone. Beside an NPU that works for W it takes T: in W it does what
    alone takes W / f, then the rest at full speed, so f = W / (T0 - T + W).
    """
    clock = workload.clock
    gpu_alone_s = statistics.median(_queue(workload, gpu, 1) for _ in range(5))
    count = int(min(max(WINDOW_S / gpu_alone_s, 2), LONGEST_QUEUE))
    gpu_times, npu_times, both = [], [], []
    for _ in range(repeats):
        gpu_times.append(_queue(workload, gpu, count) * count)
        npu_times.append(_serial(workload, npu, 1))
        launches = max(1, int(NPU_SHARE * gpu_times[-1] / npu_times[-1]))
        npu_alone_s = _serial(workload, npu, launches)
        start_s = clock.now()
        queued = _submit(gpu, count)
        for copy in npu.next_copies(launches):
            npu.calls[copy].run()
        npu_s = clock.now() - start_s
        if queued:
            queued[-1].wait()
        both.append((gpu_times[-1], clock.now() - start_s, npu_alone_s * launches, npu_s))
    return Together(
        gpu_alone_s=statistics.median(gpu_times) / count,
        npu_alone_s=statistics.median(npu_times),
        gpu_factor=max(1.0, statistics.median(_gpu_factor(*entry) for entry in both)),
        npu_factor=max(1.0, statistics.median(npu / alone for _, _, alone, npu in both)),
    )


def _gpu_factor(alone_s: float, together_s: float, _: float, npu_s: float) -> float:
    if npu_s >= together_s * 0.999:  # the GPU was done before the NPU: slowed all along
        return together_s / alone_s if together_s < npu_s else 1.0
    left_s = alone_s - together_s + npu_s
    return npu_s / left_s if left_s > 0 else together_s / alone_s


def _submit(runner: Runner, count: int) -> list[Completion]:
    """Launches in the queue of an asynchronous device; none where calls block."""
    if not runner.device.capabilities.asynchronous:
        return []
    return [runner.calls[copy].submit() for copy in runner.next_copies(count)]


def _queue(workload: Workload, runner: Runner, count: int) -> float:
    """Seconds of one of `count` launches in one queue."""
    start_s = workload.clock.now()
    runner.launch(runner.next_copies(count))
    return (workload.clock.now() - start_s) / count


def _serial(workload: Workload, runner: Runner, count: int) -> float:
    """Seconds of one of `count` blocking calls."""
    start_s = workload.clock.now()
    for copy in runner.next_copies(count):
        runner.calls[copy].run()
    return (workload.clock.now() - start_s) / count


def _alone(workload: Workload, weight_format: WeightFormat, repeats: int) -> Bandwidth:
    found = {}
    for kind in workload.devices:
        runner = _runner(workload, kind, weight_format, "decode")
        seconds = statistics.median(_serial(workload, runner, 4) for _ in range(repeats))
        found[f"{kind}_alone_bytes_per_s"] = runner.weights[0].nbytes / seconds
    return Bandwidth(**found)
