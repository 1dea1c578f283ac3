"""Bound kernels to time: random weights, shared activations, and a cache that never holds them.

A model streams all its weights for each token, so a kernel that is timed twice in a row must not
find its weight in cache: before a launch, enough other memory is read (`Workload.evict`) that the
last use of the weight is at least `cold_bytes` of reading away, or as much as the weights of the
model that a profile is taken for: a small one's stay in the caches.

Only the weight shall be cold. In a step the same code ran a moment ago and the GPU's worker is
awake; after so much reading the first call would also pay for its instructions, page tables and a
sleeping core (70 to 150 µs on a PC: more than a small matmul of one token, a tenth of one of 64).
So a launch follows a *warm-up launch*, the same kernel on a small weight: on an asynchronous device
right before it in the queue.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends import checks
from hetero.backends.formats import GROUP_SIZE, ROWS_OF_BLOCK, StorageFormat
from hetero.backends.host.clock import Clock
from hetero.backends.memory import PAGE_BYTES, HostBuffer, Tensor
from hetero.backends.ops import MatMul
from hetero.backends.optional import SupportsCompaction
from hetero.backends.protocol import (
    BoundCall,
    Device,
    DeviceKind,
    Kernel,
    WeightValue,
    memory_owner,
)
from hetero.backends.weights import (
    PackedWeight,
    data_dtype,
    data_shape,
    pack,
    padded,
    scales_dtype,
    scales_shape,
    stacked,
)
from hetero.profiler.grid import Task
from hetero.profiler.interference import Interference, NoInterference, longest_wait_s
from hetero.profiler.predict import weight_bytes
from hetero.profiler.timing import DEFAULT, TimingPolicy, cold_bytes, time_after, time_calls

# Storages of a usual GGUF file (Q4_K_M), and how many of its weights each has.
USUAL_PARTS: Final = ((StorageFormat.Q4_K, 0.8), (StorageFormat.Q6_K, 0.2))


def usual_rows(n: int) -> list[tuple[StorageFormat, int]]:
    """Return how many of n rows a weight has in each storage of a usual file, in whole blocks."""
    (most, share), (rest, _) = USUAL_PARTS
    first = min(max(round(share * n / ROWS_OF_BLOCK), 1) * ROWS_OF_BLOCK, n)
    return [(most, first), (rest, n - first)]


class WeightPool:
    """Random weights of any shape as views of one block of memory per storage format.

    Another block has their scales. Weights of `nbytes` in all are in places of their own.
    """

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.nbytes = nbytes
        self._rng = np.random.default_rng(seed)
        self._blocks: dict[str, HostBuffer] = {}
        self._cursor: dict[str, int] = {}
        self._scales: dict[tuple[StorageFormat, int], Any] = {}

    def weight(self, storage: StorageFormat, n: int, k: int) -> PackedWeight:
        """Return the next weight: another place in memory each time, until the block is used up.

        A mixed one has the parts of a usual file.
        """
        if storage is StorageFormat.MIXED:
            rows = usual_rows(n)
            return stacked([self.weight(kind, count, k) for kind, count in rows if count])
        data = self._take(storage.value, data_dtype(storage), data_shape(storage, n, k))
        if not storage.quantised:
            return PackedWeight(storage, n, k, data)
        if storage.scales == "block":
            return PackedWeight(storage, n, k, data, self._block_scales(storage, n, k))
        dtype = scales_dtype(storage)
        name = "scales" if storage.scales == "group" else "row scales"
        scales = self._take(name, dtype, scales_shape(storage, n, k))
        return PackedWeight(storage, n, k, data, scales)

    def table(self, storage: StorageFormat, n: int, k: int) -> PackedWeight:
        """Return the next weight for lookups of rows: a mixed one is of one part."""
        if storage is not StorageFormat.MIXED:
            return self.weight(storage, n, k)
        return stacked([self.weight(USUAL_PARTS[0][0], n, k)])

    def weights(self, op: MatMul) -> dict[str, WeightValue]:
        """Return what a matmul without a bias takes.

        The next weight, and the scale of its input, which is standard normal here.
        """
        values: dict[str, WeightValue] = {
            "weight": self.weight(op.weight_format.storage, op.n, op.k)
        }
        if op.weight_format.activations.static:
            values["x_scale"] = np.full(1, 4 / op.weight_format.activations.largest, np.float32)
        return values

    def _block_scales(self, storage: StorageFormat, n: int, k: int) -> npt.NDArray[Any]:
        """Return scales of blocks, repeating the scales of 16 rows.

        They are numbers of several types, and not every byte will do.
        """
        if (storage, k) not in self._scales:
            rows = self._rng.standard_normal((ROWS_OF_BLOCK, k), dtype=np.float32)
            self._scales[storage, k] = pack(rows * np.float32(0.05), storage).scales
        shape = scales_shape(storage, n, k)
        return np.ascontiguousarray(np.broadcast_to(self._scales[storage, k], shape))

    def _take(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # For the scales of as many 4-bit weights, of two bytes for each group.
        share = GROUP_SIZE // 4 if name.endswith("scales") else 1
        block = self._block(name, max(self.nbytes // share, nbytes))
        start = self._cursor[name]
        if start + nbytes > block.nbytes:
            start = 0
        self._cursor[name] = padded(start + nbytes, PAGE_BYTES)
        return block.array(dtype, shape, start)

    def _block(self, name: str, nbytes: int) -> HostBuffer:
        if name not in self._blocks or self._blocks[name].nbytes < nbytes:
            block = HostBuffer(nbytes, huge=True)  # as a model's weights
            self._fill(name, block)
            self._blocks[name], self._cursor[name] = block, 0
        return self._blocks[name]

    def _fill(self, name: str, block: HostBuffer) -> None:
        """Repeat a megabyte of random values; its length is prime, so that rows differ."""
        count = 1048573
        if name.endswith("scales"):
            kind = np.float16 if name == "scales" else np.float32
            values = (self._rng.uniform(0.5, 1.5, count) * 0.01).astype(kind)
        elif StorageFormat(name).quantised:
            values = self._rng.integers(0, 256, count, dtype=np.uint8)
        else:
            kind = np.float16 if name == "f16" else np.float32
            values = (self._rng.standard_normal(count) * 0.05).astype(kind)
        target = block.bytes.view(values.dtype)
        for start in range(0, len(target), count):
            part = target[start : start + count]
            part[:] = values[: len(part)]


@dataclass
class TaskRunner:
    """One task's calls, one for each copy of its weight.

    `cycle` counts launches; `warm_ups` has the calls that go before a timed one.
    """

    device: Device
    calls: list[BoundCall]
    weights: list[PackedWeight]
    x: Tensor
    y: Tensor
    batch: int = 1
    cycle: int = 0
    last_read: list[int] = field(default_factory=list)
    warm_ups: list[BoundCall] = field(default_factory=list)

    def next_copies(self, count: int | None = None) -> list[int]:
        """Return indices of the copies that the next `count` launches use (default: a batch)."""
        first, count = self.cycle, count or self.batch
        self.cycle += count
        return [(first + i) % len(self.calls) for i in range(count)]

    def launch(self, copies: list[int]) -> None:
        """Run these copies: as one queue where the device is asynchronous, else one by one."""
        if not self.device.capabilities.asynchronous:
            for copy in copies:
                self.calls[copy].run()
            return
        completions = [self.calls[copy].submit() for copy in copies]
        completions[-1].wait()


class Workload:
    """Makes runners for tasks on open devices and keeps them while memory lasts.

    caches    bytes of reading that leave nothing in them; 0: never read
    cold      bytes that are read between two uses of a weight
    small     whether weights may so stay in the caches
    policy    the numbers that all timing depends on
    """

    def __init__(
        self,
        devices: Mapping[DeviceKind, Device],
        *,
        clock: Clock,
        interference: Interference | None = None,
        cold: int | None = None,
        seed: int = 0,
        policy: TimingPolicy = DEFAULT,
    ) -> None:
        self.devices = devices
        self.policy = policy
        self.interference = interference or NoInterference()
        self.clock = clock
        self.caches = 0 if cold == 0 else cold_bytes(policy)
        self.cold = self.caches if cold is None else min(cold, self.caches)
        self.small = self.cold < self.caches
        self._steps = min(policy.uses, max(self.caches // max(self.cold, 1), 1))
        self._copied = min(policy.copied_bytes, self.cold) if self.small else policy.copied_bytes
        self.pool = WeightPool(max(self.cold, 1 << 24), seed)
        self.read_bytes = 0
        self._evict = HostBuffer(max(self.cold, PAGE_BYTES))
        self._evict.bytes[:] = 1
        self._rng = np.random.default_rng(seed)
        self._activations: dict[str, HostBuffer] = {}
        self._kernels: OrderedDict[tuple[DeviceKind, MatMul], _Prepared] = OrderedDict()
        self._runners: dict[Task, TaskRunner] = {}
        self._leads: dict[Task, list[BoundCall]] = {}

    def runner(self, task: Task) -> TaskRunner:
        """Return the bound calls of a task, made at first use."""
        if task not in self._runners:
            self._runners[task] = self._bind(task, self._prepare(task))
        key = (task.device, task.op)
        if key in self._kernels:
            self._kernels.move_to_end(key)
        return self._runners[task]

    def evict(self, runner: TaskRunner, copies: list[int]) -> None:
        """Read other memory until the last use of these copies is `cold` bytes away."""
        newest = max(runner.last_read[copy] for copy in copies)
        missing = newest + self.cold - self.read_bytes
        if missing > 0:
            size = min(padded(missing, PAGE_BYTES), self._evict.nbytes)
            self._evict.bytes[:size].view(np.uint64).max()
            self.read_bytes += size
        for copy in copies:  # which are read now
            self.read_bytes += runner.weights[copy].nbytes
            runner.last_read[copy] = self.read_bytes

    def _use(self, runner: TaskRunner, copies: list[int]) -> None:
        """Launch these copies, not timed, as a step before would.

        In a small model a call's last use is no longer ago than reading all its weights, and its
        weight, code and session are still in the caches; here other tasks came between.

        A blocking call is used as several steps would: what the other tasks have pushed out comes
        to a place where it is pushed out first, and stays only when it has been used again.
        """
        steps = 1 if runner.device.capabilities.asynchronous else self._steps
        for _ in range(steps):
            self.evict(runner, copies)
            runner.launch(copies)

    def time(self, runner: TaskRunner) -> float:
        """Return the seconds of one launch, out of cache, by the clock."""
        return self.timed(runner)[0]

    def timed(self, runner: TaskRunner) -> tuple[float, float]:
        """Return the seconds of one launch out of cache, and of our threads' waits for a core."""
        copies = runner.next_copies()
        if self.small:
            self._use(runner, copies)
        self.evict(runner, copies)
        before = self.interference.waits_s()
        seconds = self._after_warm_ups(runner, copies)
        if seconds is None:
            # A batch that was seen late is forgotten. To read the counters pushes a blocking
            # call's code out of the caches, as the large weight of a call before it does.
            if runner.device.capabilities.asynchronous or not self.small:
                before = self.interference.waits_s()
            calls = [runner.calls[copy] for copy in copies]
            seconds = time_calls(calls, runner.device, self.clock)
        waited_s = longest_wait_s(before, self.interference.waits_s())
        return seconds / len(copies), waited_s / len(copies)

    def _after_warm_ups(self, runner: TaskRunner, copies: list[int]) -> float | None:
        """Return the seconds of a batch in a queue, from the end of its warm-up launches.

        None where the batch is still to be launched: where there is no queue (the warm-ups have run
        then), or if a thread of ours had to wait for a core meanwhile, because a thread that sees
        the warm-ups' end late finds the batch too short.
        """
        if not runner.warm_ups or not runner.device.capabilities.asynchronous:
            for call in runner.warm_ups:
                call.run()
            return None
        calls = [runner.calls[copy] for copy in copies]
        seconds, late_s = time_after(
            runner.warm_ups, calls, self.clock, self.interference, self.policy
        )
        if late_s <= self.policy.late * seconds:
            return seconds
        self.evict(runner, copies)
        return None

    def warm_up(
        self, runner: TaskRunner, repeats: int | None = None, max_s: float = math.inf
    ) -> float:
        """Launch every copy once within `max_s`, then choose how many launches make a batch.

        Returns seconds.

        The length of a batch follows from the shortest of several timings (`repeats`, or the
        policy's): one that was interrupted would make batches of one launch, and each sample the
        time to see it end. Of a small model a batch chooses the next one's length, because one
        launch is mostly the time to see it end.
        """
        policy = self.policy
        start_s = self.clock.now()
        for copy in range(len(runner.calls)):
            runner.launch([copy])
            if self.clock.now() - start_s > max_s:
                break
        seconds = self.time(runner)
        if runner.device.capabilities.asynchronous and 0 < seconds < policy.interrupted_s:
            # Of a small model copies come again.
            most = policy.longest_batch if self.small else len(runner.calls)
            repeats = policy.repeats if repeats is None else repeats
            for _ in range(policy.small_repeats if self.small else repeats):
                if self.small:
                    runner.batch = policy.batch(seconds, most)
                seconds = min(seconds, self.time(runner))
            runner.batch = policy.batch(seconds, most)
        return seconds

    def activation(self, name: str, rows: int, width: int) -> Tensor:
        """Return a [rows, width] float32 tensor in memory that all tasks share, filled once."""
        nbytes = 4 * rows * width
        if name not in self._activations or self._activations[name].nbytes < nbytes:
            buffer = self._allocate(nbytes)
            values = buffer.array(np.float32, (buffer.nbytes // 4,))
            values[:] = self._rng.standard_normal(len(values), dtype=np.float32)
            self._activations[name] = buffer
        return Tensor(self._activations[name], (rows, width))

    def forget(self) -> None:
        """Drop every kernel."""
        self._runners.clear()
        self._kernels.clear()
        self._leads.clear()

    def make_runner(self, task: Task, *, copies: int) -> TaskRunner:
        """Return a runner of its own, with so many copies of the weight; the caller keeps it."""
        return self._bind(task, self._kernels_of(task, copies))

    def _bind(self, task: Task, prepared: _Prepared) -> TaskRunner:
        x = self.activation("x", task.m, task.k)
        y = self.activation("y", task.m, task.n)
        tensors = {"x": x, "y": y}
        calls = [kernel.bind(tensors, task.m) for kernel in prepared.kernels]
        long_ago = [-self.cold] * len(calls)
        device = self.devices[task.device]
        warm_ups = self._warm_ups(task)
        return TaskRunner(
            device, calls, prepared.weights, x, y, last_read=long_ago, warm_ups=warm_ups
        )

    def _warm_ups(self, task: Task) -> list[BoundCall]:
        """Return calls of a small weight to go before those of a task."""
        n, k = self.policy.warm_up_size
        small = task._replace(n=n, k=k)
        if small not in self._leads:
            tensors = {
                "x": self.activation("x", small.m, small.k),
                "y": self.activation("y", small.m, small.n),
            }
            kernel = self._kernels_of(small, 1).kernels[0]
            self._leads[small] = self._long_enough(kernel.bind(tensors, small.m), task.device)
        return self._leads[small]

    def _long_enough(self, call: BoundCall, device: DeviceKind) -> list[BoundCall]:
        """Return so many of a call that they keep a queue busy for `warm_up_s`."""
        policy = self.policy
        if not self.devices[device].capabilities.asynchronous:
            return [call] * policy.warm_up_calls
        call.run()
        start_s = self.clock.now()
        call.run()
        if self.clock.now() - start_s >= policy.interrupted_s:  # as many more would take seconds
            return [call]
        start_s = self.clock.now()
        [call.submit() for _ in range(policy.max_copies)][-1].wait()
        each_s = max((self.clock.now() - start_s) / policy.max_copies, 1e-6)
        return [call] * policy.warm_ups(policy.warm_up_s, each_s)

    def _prepare(self, task: Task) -> _Prepared:
        key = (task.device, task.op)
        if key not in self._kernels:
            device = self.devices[task.device]
            copies = 1
            if device.capabilities.asynchronous:
                least, most = self.policy.min_copies, self.policy.max_copies
                size = int(weight_bytes(task.weight_format, task.n, task.k))
                places = max(self.pool.nbytes // size, 1)  # where copies share none
                copies = min(max(self._copied // size, least), most, places)
            self._kernels[key] = self._kernels_of(task, copies)
            self._drop_old()
        return self._kernels[key]

    def _kernels_of(self, task: Task, copies: int) -> _Prepared:
        weights = [self.pool.weights(task.op) for _ in range(copies)]
        device = self.devices[task.device]
        kernels = [device.prepare(task.op, w) for w in weights]
        if isinstance(device, SupportsCompaction):
            device.compact_weights()
        return _Prepared(kernels, [checks.packed(w) for w in weights])

    def _drop_old(self) -> None:
        while len(self._kernels) > 1 and self._cached() > self.policy.kept_bytes:
            (device, op), _ = self._kernels.popitem(last=False)
            gone = [t for t in self._runners if (t.device, t.op) == (device, op)]
            for task in gone:
                del self._runners[task]

    def _cached(self) -> int:
        return sum(kernel.nbytes for p in self._kernels.values() for kernel in p.kernels)

    def _allocate(self, nbytes: int) -> HostBuffer:
        return memory_owner(self.devices).allocate(nbytes, huge=True)  # as the runtime's pool


@dataclass(frozen=True)
class _Prepared:
    kernels: list[Kernel]
    weights: list[PackedWeight]
