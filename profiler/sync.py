"""What it costs to submit, to wait, to copy, to sleep and to wake (paper sections 3.1 and 4.2)."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.host.clock import Clock, ManualClock
from hetero.backends.host.timers import lateness, timer_slack
from hetero.backends.memory import HostBuffer, Tensor, new_tensor
from hetero.backends.ops import Add
from hetero.backends.protocol import BoundCall, Completion, Device
from hetero.profiler.records import DeviceSync, HostSync, Sleep

SMALL: Final = 256  # elements of the operation that stands for an empty kernel
MEDIUM: Final = 1 << 16  # elements of one that takes some tens of microseconds
QUEUE: Final = 32
TURNS: Final = 3  # times as many waits: they are short, and bursts of others' work are not
COPIED_BYTES: Final = (4096, 1 << 18, 1 << 22)
SLEEPS_S: Final = (50e-6, 200e-6, 1e-3)
DEADLINE_S: Final = 1.0
IDLE_S: Final = 500e-6  # between two matmuls of a model the GPU waits for the NPU about so long


def measure_device(device: Device, clock: Clock, *, repeats: int = 60) -> DeviceSync:
    """Every synchronisation cost of one device; what it does not offer is in `notes`."""
    small = _call(device, SMALL)
    small.run()
    call_s = _median(clock, small.run, repeats)
    copy_fixed_s, copy_s_per_byte = _copy(device, clock)
    costs = {
        "call_s": call_s,
        "copy_fixed_s": copy_fixed_s,
        "copy_s_per_byte": copy_s_per_byte,
        "map_s": _mapping(device, clock, repeats),
    }
    if not device.capabilities.asynchronous:
        notes = {"submit": "calls block", "event": "calls block", "flag": "calls block"}
        return DeviceSync(**costs, wait_s={"finish": 0.0, "fast": 0.0}, notes=notes)
    busy_s, each_s = _queue(clock, small, repeats)
    idle_call_s = _median_after_idle(clock, small.run, repeats)
    device.set_timing(True)
    try:
        waits, notes = _waits(device, clock, TURNS * repeats)
        ring_s = _ring(device, clock, repeats)
    finally:
        device.set_timing(False)
    return DeviceSync(
        **costs,
        submit_busy_s=busy_s,
        submit_empty_s=max(idle_call_s - each_s - waits.get("finish", 0.0), 0.0),
        ring_s=ring_s,
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


def _median_after_idle(clock: Clock, action: Callable[[], object], repeats: int) -> float:
    """As `_median`, but the device has been idle before: its worker or clock has gone to sleep."""
    times = []
    for _ in range(repeats):
        clock.sleep(IDLE_S)
        start_s = clock.now()
        action()
        times.append(clock.now() - start_s)
    return statistics.median(times)


def _queue(clock: Clock, call: BoundCall, repeats: int) -> tuple[float, float]:
    """(host time of one submit behind others, time of one launch in a full queue)."""
    submits, eaches = [], []
    for _ in range(max(3, repeats // 6)):
        start_s = clock.now()
        completions = [call.submit() for _ in range(QUEUE)]
        submitted_s = clock.now()
        completions[-1].wait(DEADLINE_S)
        submits.append((submitted_s - start_s) / QUEUE)
        eaches.append((clock.now() - start_s) / QUEUE)
    return statistics.median(submits), statistics.median(eaches)


def _ring(device: Device, clock: Clock, repeats: int) -> float | None:
    """From opening a gate until a flag behind it starts by the device's clock, or is seen where it
    has none; None where there are no gates.
    """
    flag = device.flag()
    bell = device.doorbell() if flag is not None else None
    if flag is None or bell is None:
        return None
    bell.settle()
    times = []
    for _ in range(repeats):
        bell.gate.submit()
        end = flag.submit()
        clock.sleep(IDLE_S)
        start_s = clock.now()
        bell.ring()
        _poll(end, clock)
        seen_s, span = clock.now(), end.span()
        times.append((span[0] if span is not None else seen_s) - start_s)
    return max(statistics.median(times), 0.0)


def _waits(device: Device, clock: Clock, repeats: int) -> tuple[dict[str, float], dict[str, str]]:
    """Added latency of each way to learn of a kernel's end: from its end by the device's clock, all
    ways in turns. Without such a clock what a launch takes over its time in a full queue; that
    contains the start in an empty one.
    """
    call = _call(device, MEDIUM)
    call.run()
    _, kernel_s = _queue(clock, call, repeats)
    methods: dict[str, Callable[[Completion], None]] = {
        "finish": lambda completion: completion.wait(DEADLINE_S),
        "event": lambda completion: _poll(completion, clock),
    }
    notes = {}
    if (flag := device.flag()) is None:
        notes["flag"] = "the host does not see a flag and the data before it in time (probed)"
    else:
        methods["flag"] = lambda _: _poll(flag.submit(), clock)
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


def _poll(completion: Completion, clock: Clock) -> None:
    give_up_s = clock.now() + DEADLINE_S
    while not completion.done():
        if clock.now() > give_up_s:
            raise DeviceError("host", "polling an event", "no completion", "reboot the device")
        _pass(clock)


def _pass(clock: Clock) -> None:
    """Let virtual time go on while polling; real time does by itself."""
    if isinstance(clock, ManualClock):
        clock.sleep(1e-6)


def _copy(device: Device, clock: Clock) -> tuple[float, float]:
    """(fixed seconds, seconds per byte) of copying between a pool buffer and other memory."""
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


def _mapping(device: Device, clock: Clock, repeats: int) -> float:
    """Mapping a buffer that the device knows: what zero copies cost instead of a copy."""
    tensor = new_tensor((1, SMALL))
    device.map(tensor.buffer)
    return _median(clock, lambda: device.map(tensor.buffer), repeats)


def measure_sleep(clock: Clock, wanted_s: float, slack_ns: int | None, repeats: int) -> Sleep:
    """How late sleeps of so many seconds return, with the timer slack that the caller has set."""
    late = lateness(clock, wanted_s, repeats)
    return Sleep(
        requested_s=wanted_s,
        timer_slack_ns=slack_ns,
        late_median_s=statistics.median(late),
        late_p99_s=float(np.percentile(late, 99)),
    )


def _thread_wake(repeats: int) -> float:
    """From setting an event to the waiting thread running, by the wall clock."""
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
    thread.join(DEADLINE_S)
    return statistics.median(late)
