"""`hetero sync-bench`: the cost of a wait here, by method and by length of the wait.

A matmul of a known length is submitted and waited for. Its end is known from the driver's clock, so
that the added latency is the host's alone. `spin` polls the event's status without a pause: its CPU
time is what the others are compared with. CPU time is that of the wait, with the submission of a
flag where one is watched, without the kernel's own. A method that sleeps takes at least as long as
a sleep does.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import pinned
from hetero.backends.host.clock import SystemClock
from hetero.backends.host.timers import timer_slack
from hetero.backends.memory import Tensor
from hetero.backends.ops import MatMul
from hetero.backends.optional import SupportsQueueControl
from hetero.backends.protocol import BoundCall, Completion, Device
from hetero.backends.weights import pack
from hetero.errors import UserError
from hetero.measuring.benchmark import environment
from hetero.measuring.constants import MAX_ROUNDS
from hetero.placement.device_set import open_devices
from hetero.profiler.records import IdleCost
from hetero.profiler.sync import GAPS_S, idle_costs, measure_sleep
from hetero.profiler.table_data import TableData
from hetero.runtime.waits import Synchroniser, SyncMethod, WaitPoint

WAITS_S: Final = (50e-6, 200e-6, 500e-6, 1e-3, 3e-3)
ROWS, FEATURES = 64, 1024


@dataclass(frozen=True, kw_only=True)
class BenchPolicy:
    """Parameters of the comparison of waits.

    length_s    of all waits of one method and length together, in at most `MAX_ROUNDS`
    warm_up     rounds before them
    sleep_s     the sleep that is timed
    fits        tries of a kernel's length,
    most        to between the wanted one and so many times that
    deadline_s  of a wait that spins
    """

    length_s: float = 1.0
    warm_up: int = 12
    sleep_s: float = 500e-6
    fits: int = 10
    most: float = 1.2
    deadline_s: float = 10.0

    def rounds(self, wait_s: float) -> int:
        """Return the rounds of waits of this length."""
        return min(MAX_ROUNDS, round(self.length_s / wait_s))


DEFAULT: Final = BenchPolicy()


@dataclass(frozen=True, kw_only=True)
class WaitCost:
    """One method at one length of wait. Seconds; `cpu_share` of the CPU time of spinning."""

    method: str
    kernel_s: float
    added_median_s: float
    added_p95_s: float
    cpu_share: float


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """All costs, measured on this machine, with the machine."""

    rows: tuple[WaitCost, ...]
    idle: tuple[IdleCost, ...]
    flag: bool
    sleep_late_s: float
    sleep_cpu_s: float
    environment: dict[str, Any]

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self) | {"idle": [x.model_dump() for x in self.idle]})

    def remarks(self) -> list[str]:
        """Return where it was measured, and the conclusion for `--sync`."""
        watched = "a flag in shared memory" if self.flag else "the event's status"
        lines = [
            f"measured on {self.environment['cpu']}; `fast` watches {watched}",
            f"a sleep returns {1e6 * self.sleep_late_s:.0f} µs late and takes "
            f"{1e6 * self.sleep_cpu_s:.0f} µs of CPU time",
        ]
        lines.append(_of_idle_gaps(self.idle))
        mean = {
            method: statistics.fmean(x.added_median_s for x in self.rows if x.method == method)
            for method in dict.fromkeys(row.method for row in self.rows)
        }
        waits = {method: mean[method] for method in mean if method != "spin"}
        if waits:
            best = min(waits, key=lambda method: waits[method])
            lines.append(
                f"least added on the average: --sync {best}, {1e6 * waits[best]:.1f} µs a wait"
            )
        return lines

    def table(self) -> TableData:
        """Return a line for each method at each length."""
        head = ("kernel µs", "method", "added latency µs (median)", "95 %", "CPU time × spinning")
        rows = (
            (
                f"{1e6 * r.kernel_s:.0f}",
                r.method,
                f"{1e6 * r.added_median_s:.1f}",
                f"{1e6 * r.added_p95_s:.1f}",
                f"{r.cpu_share:.2f}",
            )
            for r in self.rows
        )
        numbers = tuple(name for name in head if name != "method")
        return TableData("", head, tuple(rows), lead=2, numbers=numbers)


def run_sync_bench(
    *, gpu: str = "auto", rounds: int | None = None, policy: BenchPolicy = DEFAULT
) -> SyncReport:
    """Measure every method on the GPU backend, in `rounds` waits of each length or for a second.

    Predictions are learned from wait to wait and the machine changes its speed, so that a few dozen
    waits say little. Raises `UserError` where the GPU is not asynchronous.
    """
    opened = open_devices("gpu", gpu=gpu)
    try:
        device = opened.devices.get("gpu")
        if device is None or not device.capabilities.asynchronous:
            raise UserError(
                "sync-bench measures waits for an asynchronous GPU, and none is here: see "
                "`hetero doctor`"
            )
        with pinned(opened.control_core), timer_slack(1):
            if isinstance(device, SupportsQueueControl):
                device.set_timing(True)
            fast = Synchroniser({"gpu": device}, "fast")
            rows = [
                row
                for wait_s in WAITS_S
                for row in _measure(device, fast, wait_s, rounds or policy.rounds(wait_s), policy)
            ]
            repeats = rounds or policy.rounds(max(GAPS_S))
            idle = idle_costs(device, SystemClock(), repeats=min(repeats, 100), empty_s=0.0)
            late_s, cpu_s = _sleep_cost(policy.sleep_s, rounds or policy.rounds(policy.sleep_s))
        return SyncReport(
            rows=tuple(rows),
            idle=idle,
            flag="gpu" in fast.flags,
            sleep_late_s=late_s,
            sleep_cpu_s=cpu_s,
            environment=environment(),
        )
    finally:
        opened.close()


def _measure(
    device: Device, fast: Synchroniser, wait_s: float, rounds: int, policy: BenchPolicy
) -> Sequence[WaitCost]:
    """Return all methods in turns on a kernel that takes about `wait_s`."""
    call = _kernel_of(device, wait_s, policy)
    methods = _methods(device, fast, wait_s, policy.deadline_s)
    added: dict[str, list[float]] = {name: [] for name in methods}
    cpu: dict[str, float] = dict.fromkeys(methods, 0.0)
    kernels = []
    for i in range(rounds + policy.warm_up):
        for name, (submit, wait) in methods.items():
            completion = call.submit()
            cpu_s = time.thread_time()
            wait(submit(completion))
            seen_s = time.perf_counter()
            cpu_s = time.thread_time() - cpu_s
            span = completion.span()
            if i >= policy.warm_up and span is not None:
                added[name].append(seen_s - span[1])
                kernels.append(span[1] - span[0])
                cpu[name] += cpu_s
    if not kernels:
        raise UserError(
            "sync-bench needs a driver that reports when a kernel ran, which this one does not"
        )
    return [
        WaitCost(
            method=name,
            kernel_s=statistics.median(kernels),
            added_median_s=statistics.median(times),
            added_p95_s=float(np.percentile(times, 95)),
            cpu_share=cpu[name] / cpu["spin"],
        )
        for name, times in added.items()
    ]


def _of_idle_gaps(idle: Sequence[IdleCost]) -> str:
    if not idle:
        return "launches after an idle gap of 0.1 to 2 ms take no longer than others"
    costs = ", ".join(f"{1e6 * x.slower_s:.0f} after {1e3 * x.gap_s:g} ms" for x in idle)
    return f"32 launches take longer after an idle gap, in µs: {costs}"


def _sleep_cost(sleep_s: float, rounds: int) -> tuple[float, float]:
    """Return how late a sleep of `sleep_s` is (median), and its CPU time (mean), in seconds."""
    cpu_s = time.thread_time()
    sleep = measure_sleep(SystemClock(), sleep_s, 1, rounds)
    return sleep.late_median_s, (time.thread_time() - cpu_s) / rounds


Submit = Callable[[Completion], Completion]


def _methods(
    device: Device, fast: Synchroniser, wait_s: float, deadline_s: float
) -> dict[str, tuple[Submit, Callable[[Completion], object]]]:
    """Return what is submitted after the kernel, and how to wait for its end."""
    flag = fast.flags.get("gpu")

    def site(name: str, method: SyncMethod) -> WaitPoint:
        owner = (
            fast if method == "fast" else Synchroniser({"gpu": device}, method, sleep=fast.sleep)
        )
        return owner.wait_point((name, (round(1e9 * wait_s),), name, name), "gpu", name)

    def same(completion: Completion) -> Completion:
        return completion

    methods: dict[str, tuple[Submit, Callable[[Completion], object]]] = {
        "spin": (same, lambda completion: _spin(completion, deadline_s)),
        "finish": (same, site("finish", "finish").wait),
        "event": (same, site("event", "event").wait),
        "fast": ((lambda _: flag.submit()) if flag else same, site("fast", "fast").wait),
    }
    return methods


def _spin(completion: Completion, deadline_s: float) -> None:
    give_up_s = time.perf_counter() + deadline_s
    while not completion.done():
        if time.perf_counter() > give_up_s:
            completion.wait(0.0)  # raises


def _kernel_of(device: Device, wanted_s: float, policy: BenchPolicy) -> BoundCall:
    """Return a matmul that takes at least about `wait_s`: its time grows with its tokens."""
    rng = np.random.default_rng(0)
    weight = pack(rng.standard_normal((ROWS, FEATURES), dtype=np.float32), WeightFormat.F32.storage)
    op = MatMul(n=ROWS, k=FEATURES, weight_format=WeightFormat.F32)
    kernel = device.prepare(op, {"weight": weight})
    tokens = 16
    for _ in range(policy.fits):
        call = kernel.bind({"x": _tensor(device, tokens, FEATURES),
                            "y": _tensor(device, tokens, ROWS)}, tokens)  # fmt: skip
        taken_s = statistics.median(_once(call, policy.deadline_s) for _ in range(policy.warm_up))
        if wanted_s <= taken_s <= policy.most * wanted_s:
            break
        aim = math.sqrt(policy.most) * wanted_s / taken_s
        tokens = max(1, math.ceil(tokens * min(aim, 4.0)))
    return call


def _once(call: BoundCall, deadline_s: float) -> float:
    completion = call.submit()
    _spin(completion, deadline_s)
    start_s, end_s = completion.span() or (0.0, 1.0)
    return end_s - start_s


def _tensor(device: Device, tokens: int, width: int) -> Tensor:
    tensor = Tensor(device.allocate(4 * tokens * width), (tokens, width))
    tensor.array[:] = 1.0
    return tensor
