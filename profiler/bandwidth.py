"""Both processors at once.

Memory bandwidth and slowdown (paper section 3.3, figure 6), and what it costs a thread to turn from
one to the other.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Final

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import KINDS, Completion, DeviceKind
from hetero.profiler.features import weight_bytes
from hetero.profiler.grid import Shape, Task
from hetero.profiler.records import Bandwidth, Contention, Phase
from hetero.profiler.timing import poll_until_done
from hetero.profiler.workload import TaskRunner, Workload

# m, n, k: a weight larger than any private cache for decode; compute-bound for prefill.
SIZES: Final[dict[Phase, tuple[int, int, int]]] = {
    "decode": (1, 8192, 2048),
    "prefill": (128, 2048, 2048),
}


@dataclass(frozen=True, kw_only=True)
class ConcurrentPolicy:
    """Policy of timing both devices concurrently.

    window_s         the GPU's queue in one round,
    longest_queue    and at most so many launches
    npu_share        share of the GPU's time that the NPU works concurrently
    outlasted        the NPU must be done before this share of the time together
    restart_size     n, k of the weight of an NPU call after other work,
    submissions      and launches of the GPU before it
    """

    window_s: float = 0.06
    longest_queue: int = 512
    npu_share: float = 0.7
    outlasted: float = 0.97
    restart_size: tuple[int, int] = (1024, 1024)
    submissions: int = 3


DEFAULT: Final = ConcurrentPolicy()


@dataclass(frozen=True)
class ConcurrentTimes:
    """Times of one experiment: each device's launches alone, and side by side."""

    gpu_alone_s: float
    npu_alone_s: float
    gpu_factor: float
    npu_factor: float


def measure_concurrent(
    workload: Workload,
    weight_formats: Sequence[WeightFormat],
    *,
    shapes: Sequence[Shape] = (),
    rounds: int = 7,
    policy: ConcurrentPolicy = DEFAULT,
) -> tuple[Bandwidth, tuple[Contention, ...]]:
    """Return the bandwidth of each device alone and together, and contention.

    Contention is by phase and weight format.

    Needs both devices. With one device, only its bandwidth alone. The bandwidth is that of the
    first format. In decoding, `shapes` of a model are stood for by the largest matmul of a block. A
    round takes some four of the policy's windows.
    """
    sizes = SIZES | {"decode": decode_size(shapes)}
    if len(workload.devices) < 2:
        return _alone(workload, weight_formats[0], sizes["decode"], rounds), ()
    contention = []
    bandwidth = Bandwidth()
    phases: tuple[Phase, ...] = ("decode", "prefill")
    for weight_format, phase in itertools.product(_shared(workload, weight_formats), phases):
        runners = {k: _runner(workload, k, weight_format, sizes[phase]) for k in KINDS}
        times = _experiment(workload, runners["gpu"], runners["npu"], rounds, policy)
        contention.append(
            Contention(
                phase=phase,
                weight_format=weight_format,
                gpu=times.gpu_factor,
                npu=times.npu_factor,
            )
        )
        if phase == "decode" and weight_format == weight_formats[0]:
            size = {kind: runner.weights[0].nbytes for kind, runner in runners.items()}
            bandwidth = Bandwidth(
                gpu_alone_bytes_per_s=size["gpu"] / times.gpu_alone_s,
                npu_alone_bytes_per_s=size["npu"] / times.npu_alone_s,
                gpu_together_bytes_per_s=size["gpu"] / times.gpu_alone_s / times.gpu_factor,
                npu_together_bytes_per_s=size["npu"] / times.npu_alone_s / times.npu_factor,
            )
    return bandwidth, tuple(contention)


def decode_size(shapes: Sequence[Shape]) -> tuple[int, int, int]:
    """Return (m, n, k) at which decoding is measured.

    For a model it is the largest matmul of a block, because how much the devices slow each other
    depends on k, and the largest is cut most. At most 2^24 weights, because every copy of it is
    read cold.
    """
    block = [shape for shape in shapes if shape.name != "lm_head"]
    if not block:
        return SIZES["decode"]
    largest = max(block, key=lambda shape: shape.n * shape.k)
    return 1, min(largest.n, max((1 << 24) // largest.k, 1)), largest.k


def measure_restart(
    workload: Workload,
    weight_format: WeightFormat,
    *,
    rounds: int,
    policy: ConcurrentPolicy = DEFAULT,
) -> float:
    """Return how much longer an NPU call takes after its thread has used the GPU, in seconds.

    It has submitted to the GPU and polled it; compared with a call after another NPU call, as in a
    model whose matmuls are all on the NPU, by medians of so many turns. 0 where the NPU's calls do
    not block a thread, or the GPU's do.
    """
    devices = workload.devices
    if len(devices) < 2 or not devices["gpu"].capabilities.asynchronous:
        return 0.0
    if devices["npu"].capabilities.asynchronous:
        return 0.0
    runners = {}
    for kind in KINDS:
        m = min(devices[kind].capabilities.graph_sizes, default=1)
        runners[kind] = workload.runner(Task(kind, weight_format, "plain", m, *policy.restart_size))
        workload.warm_up(runners[kind])
    gpu, npu, clock = runners["gpu"], runners["npu"], workload.clock
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for restarted, seconds in times.items():
            (copy,) = npu.next_copies(1)
            workload.evict(npu, [copy])
            for call in npu.warm_ups:
                call.run()
            if restarted:
                poll_until_done(_submit(gpu, policy.submissions)[-1], clock)
            start_s = clock.now()
            npu.calls[copy].run()
            seconds.append(clock.now() - start_s)
    return max(0.0, statistics.median(times[True]) - statistics.median(times[False]))


def _shared(workload: Workload, weight_formats: Sequence[WeightFormat]) -> list[WeightFormat]:
    """Return formats that every device computes."""
    known = [device.capabilities.weight_formats for device in workload.devices.values()]
    return [x for x in weight_formats if all(x in formats for formats in known)]


def load(workload: Workload, weight_format: WeightFormat, who: str) -> Callable[[], None]:
    """Return some tens of milliseconds of work for `gpu`, `npu` or `both`, to measure power."""
    size = SIZES["prefill"]
    runners = {kind: _runner(workload, kind, weight_format, size) for kind in workload.devices}

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
    workload: Workload, kind: DeviceKind, weight_format: WeightFormat, size: tuple[int, int, int]
) -> TaskRunner:
    m, n, k = size
    sizes = workload.devices[kind].capabilities.graph_sizes
    if sizes and m not in sizes:
        m = min(sizes, key=lambda size: abs(size - m))
    task = Task(kind, weight_format, "plain", m, n, k)
    nbytes = weight_bytes(weight_format, n, k)
    copies = max(math.ceil(workload.cold / nbytes), 2)  # a prompt reads each weight once as well
    runner = workload.make_runner(task, copies=copies)
    for copy in range(len(runner.calls)):
        runner.calls[copy].run()
    return runner


def _experiment(
    workload: Workload, gpu: TaskRunner, npu: TaskRunner, rounds: int, policy: ConcurrentPolicy
) -> ConcurrentTimes:
    """Return rounds of the GPU's queue alone, the NPU's calls alone, both, and each alone again.

    Alone is the mean of before and after, and a round's factors are ratios within it, so that drift
    from round to round cancels. What the factors are is the medians over the rounds.
    """
    count = int(min(max(policy.window_s / _queue(workload, gpu, 2), 2), policy.longest_queue))
    concurrent_s = policy.npu_share * _queue(workload, gpu, count)
    launches = max(1, round(concurrent_s / _calls(workload, npu, 1)[0]))
    used: list[ConcurrentTimes] = []
    for _ in range(2 * rounds):
        times, outlasted = _round(workload, gpu, npu, count, launches, policy.outlasted)
        if outlasted and launches > 1:
            launches -= max(1, launches // 8)
            continue
        used.append(times)
        if len(used) == rounds:
            break
    used = used or [times]  # the NPU outlasts the GPU even with one call
    return ConcurrentTimes(
        *(statistics.median(values) for values in zip(*map(astuple, used), strict=True))
    )


def _round(
    workload: Workload, gpu: TaskRunner, npu: TaskRunner, count: int, launches: int, share: float
) -> tuple[ConcurrentTimes, bool]:
    """Return one round.

    Whether the NPU worked for more than that share of it: where it is still at work when the GPU is
    done, it hides the GPU's end.

    The GPU's queue takes T0 alone. With an NPU that works for W it takes T: in W it does what
    alone takes W / f, then the rest at full speed, so f = W / (T0 - T + W). Of the NPU's calls the
    medians count, as in rows of a profile: the first ones after the wait for the GPU find their
    code evicted from all caches.
    """
    gpu_before_s, alone_s = _queue(workload, gpu, count), _calls(workload, npu, launches)
    start_s = workload.clock.now()
    queued = _submit(gpu, count)
    submitted_s = workload.clock.now()
    together_calls_s = _calls(workload, npu, launches)
    npu_end_s = workload.clock.now()
    if queued:
        queued[-1].wait()
    together_s = workload.clock.now() - start_s
    gpu_s = (gpu_before_s + _queue(workload, gpu, count)) / 2
    npu_s = statistics.median([*alone_s, *_calls(workload, npu, launches)])
    concurrent_s = npu_end_s - submitted_s
    left_s = gpu_s - together_s + concurrent_s
    outlasted = npu_end_s - start_s > share * together_s
    gpu_factor = concurrent_s / left_s if queued and left_s > 0 else 1.0
    times = ConcurrentTimes(
        gpu_alone_s=gpu_s / count,
        npu_alone_s=npu_s,
        gpu_factor=max(1.0, gpu_factor),
        npu_factor=max(1.0, statistics.median(together_calls_s) / npu_s),
    )
    return times, outlasted


def _submit(runner: TaskRunner, count: int) -> list[Completion]:
    """Return launches in the queue of an asynchronous device; none where calls block."""
    if not runner.device.capabilities.asynchronous:
        return []
    return [runner.calls[copy].submit() for copy in runner.next_copies(count)]


def _queue(workload: Workload, runner: TaskRunner, count: int) -> float:
    """Return the seconds of `count` launches in one queue."""
    start_s = workload.clock.now()
    runner.launch(runner.next_copies(count))
    return workload.clock.now() - start_s


def _calls(workload: Workload, runner: TaskRunner, count: int) -> list[float]:
    """Return the seconds of each of `count` blocking calls."""
    seconds, end_s = [], workload.clock.now()
    for copy in runner.next_copies(count):
        runner.calls[copy].run()
        start_s, end_s = end_s, workload.clock.now()
        seconds.append(end_s - start_s)
    return seconds


def _alone(
    workload: Workload, weight_format: WeightFormat, size: tuple[int, int, int], rounds: int
) -> Bandwidth:
    speeds = {}
    for kind in workload.devices:
        runner = _runner(workload, kind, weight_format, size)
        seconds = statistics.median(_calls(workload, runner, 4 * rounds))
        speeds[f"{kind}_alone_bytes_per_s"] = runner.weights[0].nbytes / seconds
    return Bandwidth(**speeds)
