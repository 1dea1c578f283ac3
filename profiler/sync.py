"""The cost of submitting, waiting, copying, sleeping and waking (paper sections 3.1 and 4.2)."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from hetero.backends.errors import DeviceError, KernelBuildError
from hetero.backends.host.clock import Clock, ManualClock
from hetero.backends.host.timers import lateness, timer_slack
from hetero.backends.memory import HostBuffer, Tensor, new_tensor
from hetero.backends.ops import Add
from hetero.backends.optional import SupportsFusedLaunch, SupportsQueueControl, flag_of, signal_of
from hetero.backends.protocol import BoundCall, Completion, Device
from hetero.profiler.records import DeviceSync, HostSync, IdleCost, Sleep

COPIED_BYTES: Final = (4096, 1 << 18, 1 << 22)
SLEEPS_S: Final = (50e-6, 200e-6, 1e-3)
GAPS_S: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)  # what a GPU waits for an NPU between two matmuls
NOTICEABLE: Final = 4.0  # standard errors that a difference has which is no noise


@dataclass(frozen=True, kw_only=True)
class SyncPolicy:
    """Policy of timing synchronisation.

    small       elements of the operation that stands for an empty kernel
    medium      elements of one that takes some tens of microseconds
    queue       launches of a full queue
    more_waits  times as many waits as other repeats: they are short, and others' work is not
    idle_s      a device is idle so long before a launch to an empty queue: about what the GPU waits
                for the NPU between two matmuls
    deadline_s  of a wait
    """

    small: int = 256
    medium: int = 1 << 16
    queue: int = 32
    more_waits: int = 3
    idle_s: float = 500e-6
    deadline_s: float = 1.0


DEFAULT: Final = SyncPolicy()


def measure_device(
    device: Device, clock: Clock, *, repeats: int = 60, policy: SyncPolicy = DEFAULT
) -> DeviceSync:
    """Return every synchronisation cost of one device; what it does not offer is in `notes`."""
    small = _call(device, policy.small)
    small.run()
    call_s = _median(clock, small.run, repeats)
    copy_fixed_s, copy_s_per_byte = _copy(device, clock)
    costs: dict[str, Any] = {
        "call_s": call_s,
        "copy_fixed_s": copy_fixed_s,
        "copy_s_per_byte": copy_s_per_byte,
        "map_s": _mapping(device, clock, repeats, policy.small),
    }
    if not device.capabilities.asynchronous:
        notes = {"submit": "calls block", "event": "calls block", "flag": "calls block"}
        return DeviceSync(**costs, wait_s={"finish": 0.0, "fast": 0.0}, notes=notes)
    busy_s, each_s = _queue(clock, small, repeats, policy)
    idle_call_s = _median_after_idle(clock, small.run, repeats, policy.idle_s)
    with _timed(device):
        waits, notes = _waits(device, clock, policy.more_waits * repeats, policy)
        ring_s = _signal(device, clock, repeats, policy)
    empty_s = max(idle_call_s - each_s - waits.get("finish", 0.0), 0.0)
    return DeviceSync(
        **costs,
        submit_busy_s=busy_s,
        submit_empty_s=empty_s,
        idle=idle_costs(device, clock, repeats=repeats // 3, empty_s=empty_s, policy=policy),
        ring_s=ring_s,
        chain_s=_fused(device, clock, repeats, policy),
        wait_s=waits,
        notes=notes,
    )


def measure_host(clock: Clock, *, repeats: int = 60, wake: bool = True) -> HostSync:
    """Sleep and thread wake-up; `wake=False` on a virtual clock, where threads have no meaning."""
    rows = [measure_sleep(clock, wanted, None, repeats) for wanted in SLEEPS_S]
    with timer_slack(1) as possible:
        if possible:
            rows += [measure_sleep(clock, wanted, 1, repeats) for wanted in SLEEPS_S]
    return HostSync(sleep=tuple(rows), thread_wake_s=_thread_wake(repeats) if wake else None)


@contextmanager
def _timed(device: Device) -> Iterator[None]:
    """Let the device record when its launches run, where it can."""
    if not isinstance(device, SupportsQueueControl):
        yield
        return
    device.set_timing(True)
    try:
        yield
    finally:
        device.set_timing(False)


def _call(device: Device, width: int) -> BoundCall:
    sizes = device.capabilities.graph_sizes
    m = min(sizes) if sizes else 1
    tensors = {port: _tensor(device, m, width) for port in ("x", "residual", "y")}
    return device.prepare(Add(d=width), {}).bind(tensors, m)


def _tensor(device: Device, m: int, width: int) -> Tensor:
    return Tensor(device.allocate(4 * m * width), (m, width))


def _median(clock: Clock, action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start_s = clock.now()
        action()
        times.append(clock.now() - start_s)
    return statistics.median(times)


def _median_after_idle(
    clock: Clock, action: Callable[[], object], repeats: int, idle_s: float
) -> float:
    """Do the same as `_median` after the device was idle.

    Its worker or clock sleeps then.
    """
    times = []
    for _ in range(repeats):
        clock.sleep(idle_s)
        start_s = clock.now()
        action()
        times.append(clock.now() - start_s)
    return statistics.median(times)


def idle_costs(
    device: Device, clock: Clock, *, repeats: int, empty_s: float, policy: SyncPolicy = DEFAULT
) -> tuple[IdleCost, ...]:
    """Return how much longer a burst of launches takes after each of `GAPS_S`.

    It is compared with a burst right after another one, in turns, less `empty_s`. Differences that
    the scatter of the times explains are 0; without any other the result is empty.
    """
    call = _call(device, policy.medium)

    def burst() -> None:
        completions = [call.submit() for _ in range(policy.queue)]
        completions[-1].wait(policy.deadline_s)

    times: dict[float, list[float]] = {gap_s: [] for gap_s in (0.0, *GAPS_S)}
    for _ in range(max(repeats, 8)):
        for gap_s, spent in times.items():
            burst()
            if gap_s:
                clock.sleep(gap_s)
            start_s = clock.now()
            burst()
            spent.append(clock.now() - start_s)
    at_once_s, error_s = _median_error(times.pop(0.0))
    costs = []
    for gap_s, spent in times.items():
        median_s, own_s = _median_error(spent)
        slower_s = median_s - at_once_s - empty_s
        noticed = slower_s > NOTICEABLE * math.hypot(error_s, own_s)
        costs.append(IdleCost(gap_s=gap_s, slower_s=slower_s if noticed else 0.0))
    return tuple(costs) if any(cost.slower_s for cost in costs) else ()


def _median_error(times: Sequence[float]) -> tuple[float, float]:
    """Return the median and its standard error, from the quartiles (normal scatter)."""
    low, median, high = np.percentile(times, (25, 50, 75))
    return float(median), float(1.2533 * (high - low) / 1.349 / math.sqrt(len(times)))


def _queue(clock: Clock, call: BoundCall, repeats: int, policy: SyncPolicy) -> tuple[float, float]:
    """Return (host time of one submit after others, time of one launch in a full queue)."""
    submits, eaches = [], []
    for _ in range(max(3, repeats // 6)):
        start_s = clock.now()
        completions = [call.submit() for _ in range(policy.queue)]
        submitted_s = clock.now()
        completions[-1].wait(policy.deadline_s)
        submits.append((submitted_s - start_s) / policy.queue)
        eaches.append((clock.now() - start_s) / policy.queue)
    return statistics.median(submits), statistics.median(eaches)


def _fused(device: Device, clock: Clock, repeats: int, policy: SyncPolicy) -> float | None:
    """Return the time of a launch in a full queue less that of one in a fused launch.

    Both in turns and after longer ones, during which they are submitted; None where calls are not
    fused, or a fused launch does not compile.
    """
    if not isinstance(device, SupportsFusedLaunch):
        return None
    call, warm_up = _call(device, policy.small), _call(device, policy.medium)
    try:
        fused = device.fuse([[[call]] * policy.queue]) if call.fusible else None
    except KernelBuildError:  # as for a model, which then decodes call by call
        return None
    if not fused:
        return None
    saved = []
    for _ in range(max(3, repeats // 6)):
        times = []
        for calls in ([call] * policy.queue, fused):
            before = [warm_up.submit() for _ in range(policy.queue)]
            last = [each.submit() for each in calls]
            before[-1].wait(policy.deadline_s)
            start_s = clock.now()
            last[-1].wait(policy.deadline_s)
            times.append(clock.now() - start_s)
        saved.append((times[0] - times[1]) / policy.queue)
    return max(statistics.median(saved), 0.0)


def _signal(device: Device, clock: Clock, repeats: int, policy: SyncPolicy) -> float | None:
    """Return the seconds from a signal until a flag after the wait starts.

    That is by the device's clock, or until it is seen where it has none; None where there are no
    signals.
    """
    flag = flag_of(device)
    signal = signal_of(device) if flag is not None else None
    if flag is None or signal is None:
        return None
    signal.reset()
    times = []
    for _ in range(repeats):
        signal.wait_value.submit()
        end = flag.submit()
        clock.sleep(policy.idle_s)
        start_s = clock.now()
        signal.signal()
        _poll(end, clock, policy.deadline_s)
        seen_s, span = clock.now(), end.span()
        times.append((span[0] if span is not None else seen_s) - start_s)
    return max(statistics.median(times), 0.0)


def _waits(
    device: Device, clock: Clock, repeats: int, policy: SyncPolicy = DEFAULT
) -> tuple[dict[str, float], dict[str, str]]:
    """Return added latency of each way to learn of a kernel's end.

    It counts from the end by the device's clock, all ways in turns. Without such a clock what a
    launch takes over its time in a full queue; that contains the start in an empty one.
    """
    call = _call(device, policy.medium)
    call.run()
    _, kernel_s = _queue(clock, call, repeats, policy)
    deadline_s = policy.deadline_s
    methods: dict[str, Callable[[Completion], None]] = {
        "finish": lambda completion: completion.wait(deadline_s),
        "event": lambda completion: _poll(completion, clock, deadline_s),
    }
    notes = {}
    if (flag := flag_of(device)) is None:
        notes["flag"] = "the host does not see a flag and the data before it in time (probed)"
    else:
        methods["flag"] = lambda _: _poll(flag.submit(), clock, deadline_s)
    added: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, wait in methods.items():
            start_s = clock.now()
            completion = call.submit()
            wait(completion)
            seen_s, span = clock.now(), completion.span()
            known_s = seen_s - span[1] if span is not None else seen_s - start_s - kernel_s
            added[name].append(known_s)
    waits = {name: max(statistics.median(times), 0.0) for name, times in added.items()}
    return waits | {"fast": min(waits.values())}, notes


def _poll(completion: Completion, clock: Clock, deadline_s: float) -> None:
    give_up_s = clock.now() + deadline_s
    while not completion.done():
        if clock.now() > give_up_s:
            raise DeviceError("host", "polling an event", "no completion", "reboot the device")
        _pass(clock)


def _pass(clock: Clock) -> None:
    """Let virtual time go on while polling; real time does by itself."""
    if isinstance(clock, ManualClock):
        clock.sleep(1e-6)


def _copy(device: Device, clock: Clock) -> tuple[float, float]:
    """Return (fixed seconds, seconds per byte) of copies from and to a pool buffer."""
    points = []
    for nbytes in COPIED_BYTES:
        source, target = HostBuffer(nbytes), device.allocate(nbytes)
        source.bytes[:] = 1
        copy = partial(np.copyto, target.bytes, source.bytes)
        copy()
        points.append((source.nbytes, _median(clock, copy, 11)))
    (small, small_s), (large, large_s) = points[0], points[-1]
    per_byte = max(large_s - small_s, 0.0) / (large - small)
    return max(small_s - per_byte * small, 0.0), per_byte


def _mapping(device: Device, clock: Clock, repeats: int, width: int) -> float:
    """Return mapping a buffer that the device knows: what zero copies cost instead of a copy."""
    tensor = new_tensor((1, width), allocate=device.allocate)
    device.map(tensor.buffer)
    return _median(clock, lambda: device.map(tensor.buffer), repeats)


def measure_sleep(clock: Clock, wanted_s: float, slack_ns: int | None, repeats: int) -> Sleep:
    """Return how late sleeps of so many seconds return, with the caller's timer slack."""
    late = lateness(clock, wanted_s, repeats)
    return Sleep(
        requested_s=wanted_s,
        timer_slack_ns=slack_ns,
        late_median_s=statistics.median(late),
        late_p99_s=float(np.percentile(late, 99)),
    )


def _thread_wake(repeats: int) -> float:
    """Return the seconds from setting an event to the waiting thread running, by the wall clock."""
    wake, ready = threading.Event(), threading.Event()
    woken: list[float] = []
    running = True

    def wait() -> None:
        while running:
            ready.set()
            wake.wait()
            woken.append(time.perf_counter())
            wake.clear()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    late = []
    for i in range(repeats):
        ready.wait()
        ready.clear()
        time.sleep(200e-6)  # long enough for the thread to be asleep
        if i == repeats - 1:
            running = False
        start_s = time.perf_counter()
        wake.set()
        while len(woken) <= i:
            time.sleep(0)
        late.append(woken[-1] - start_s)
    thread.join(DEFAULT.deadline_s)
    return statistics.median(late)
