"""ONNX Runtime as the CPU besides GPU and NPU: rows of matmuls, computed by threads of its own.

The control thread submits a call and goes on; each core has a thread that takes pieces of calls
from one queue. Pieces are tokens: all threads run the same session, whose weights are packed once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeAlias

from hetero.backends import checks
from hetero.backends.errors import DeviceError, WaitTimeoutError
from hetero.backends.host.affinity import run_on, unpinned
from hetero.backends.host.time_limits import time_limit
from hetero.backends.memory import HostBuffer
from hetero.backends.ops import MatMul, Op, describe
from hetero.backends.optional import SupportsCompaction
from hetero.backends.ort_cpu.device import OrtCpuDevice
from hetero.backends.ort_cpu.session import BACKEND
from hetero.backends.protocol import (
    DEFAULT_DEADLINE_S,
    Acceptance,
    BoundCall,
    Completion,
    Device,
    Kernel,
    Operand,
    WeightValue,
    check_tensors,
    whole,
)

LEAST_TOKENS: Final = 16  # of a piece: each reads all weights of its matmul
PIECES: Final = 2  # for each thread, so that a slow core has fewer
END_S: Final = 5.0  # for a thread to finish the piece that it is at

Queue: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class WorkerDevice(Device, SupportsCompaction):
    """Sessions on threads, each on one of `cores`; on one thread anywhere without any.

    A call that fails loses the device. Calls complete in the order of their submission.
    """

    def __init__(self, sessions: OrtCpuDevice, cores: Sequence[int]) -> None:
        self._sessions, self._cores = sessions, tuple(cores) or (None,)
        details = {**sessions.info.details, "cores": str(len(self._cores))}
        self.info = replace(sessions.info, details=details)
        self.capabilities = replace(
            sessions.capabilities, asynchronous=True, attention_heads=False, experts=False
        )
        self.health = checks.Health(BACKEND, threads=True)
        self.order = Order()
        self._queue: Queue = SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def threads(self) -> int:
        """Return how many threads compute."""
        return len(self._cores)

    def map(self, buffer: HostBuffer) -> int:
        """Return the address: sessions work on the pages in place."""
        self.health.check("map")
        return self._sessions.map(buffer)

    def accepts(self, op: Op) -> Acceptance:
        """Accept matmuls of the declared formats."""
        if not isinstance(op, MatMul):
            return Acceptance(False, "a CPU besides GPU and NPU computes rows of matmuls only")
        return self._sessions.accepts(op)

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Kernel:
        """Build the session on the calling thread."""
        self.health.check(f"preparing {describe(op)}")
        if not isinstance(op, MatMul):
            raise ValueError(f"{describe(op)}: {self.accepts(op).reason}")
        return _WorkerKernel(self, self._sessions.prepare(op, weights))

    def compact_weights(self) -> None:
        """See `OrtCpuDevice.compact_weights`."""
        self._sessions.compact_weights()

    def drain(self, deadline_s: float) -> None:
        """See `Device.drain`."""
        self.order.wait(self.order.submitted - 1, "everything submitted", deadline_s)

    def state(self) -> str:
        """See `Device.state`."""
        return self.health.state

    def submit(self, name: str, pieces: Sequence[BoundCall]) -> WorkerCompletion:
        """Queue the pieces of a call; the threads are started by the first one."""
        self.health.check(name)
        if not self._threads:
            self._start()
        completion, left, begun = None, len(pieces), self.order.submitted
        try:
            completion = WorkerCompletion(self, name, left)
            for piece in pieces:
                self._queue.put(partial(completion.compute, piece.run))
                left -= 1
        except BaseException:  # Ctrl-C: calls after this one do not wait for what is not queued
            if completion is not None:
                for _ in range(left):
                    completion.compute(_nothing)
            elif self.order.submitted > begun:
                self.order.end(begun)
            raise
        return completion

    def close(self) -> None:
        """End the threads; sessions that one still runs are left to it."""
        if not self.health.alive and not self._threads:
            return
        self.health.lose("closed")
        threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(time_limit(END_S))
        if not any(thread.is_alive() for thread in threads):
            self._sessions.close()

    def _start(self) -> None:
        for number, core in enumerate(self._cores):
            arguments = (self._queue, core)
            name = f"hetero-cpu-{number}"
            thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)


class Order:
    """Numbers the submitted calls, and knows up to which all are complete."""

    def __init__(self) -> None:
        self.submitted = self._complete = 0
        self._early: set[int] = set()
        self._changed = threading.Condition()

    def begin(self) -> int:
        """Return the number of the next call."""
        with self._changed:
            self.submitted += 1
            return self.submitted - 1

    def end(self, number: int) -> None:
        """Note that a call has ended."""
        with self._changed:
            self._early.add(number)
            while self._complete in self._early:
                self._early.discard(self._complete)
                self._complete += 1
            self._changed.notify_all()

    def is_complete(self, number: int) -> bool:
        """Return whether a call and all before it have ended."""
        return number < self._complete

    def wait(self, number: int, name: str, deadline_s: float) -> None:
        """Block until a call is complete. Raises `WaitTimeoutError`."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self.is_complete(number), time_limit(deadline_s))
        if not ended:
            raise WaitTimeoutError(BACKEND, name, deadline_s, "cpu")


class WorkerCompletion(Completion):
    """One call in the queue."""

    def __init__(self, device: WorkerDevice, name: str, pieces: int) -> None:
        self._device, self._name, self._left = device, name, pieces
        self._number = device.order.begin()
        self._lock = threading.Lock()
        self._error: DeviceError | None = None
        self._start_s, self._end_s = float("inf"), 0.0

    def compute(self, run: Callable[[], None]) -> None:
        """Compute a piece, on a thread of the device."""
        start_s = time.perf_counter()
        try:
            run()
        except Exception as error:  # it is raised on the thread that waits
            self._fail(error)
        with self._lock:
            self._start_s = min(self._start_s, start_s)
            self._end_s = max(self._end_s, time.perf_counter())
            self._left -= 1
            last = not self._left
        if last:
            self._device.order.end(self._number)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, DeviceError):
            error = DeviceError(BACKEND, self._name, repr(error))
        self._error = error
        self._device.health.lose(str(self._error))

    def done(self) -> bool:
        if not self._device.order.is_complete(self._number):
            if not self._device.health.alive:
                self._raise()
            time.sleep(0)  # a poll that holds the interpreter lock holds up what it waits for
            return False
        self._raise()
        return True

    def wait(self, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._device.order.wait(self._number, self._name, deadline_s)
        self._raise()

    def span(self) -> tuple[float, float] | None:
        complete = self._device.order.is_complete(self._number)
        return (self._start_s, self._end_s) if complete else None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        self._device.health.check(self._name)


class _WorkerKernel(Kernel):
    def __init__(self, device: WorkerDevice, kernel: Kernel) -> None:
        self.op, self.nbytes = kernel.op, kernel.nbytes
        self._device, self._kernel = device, kernel

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        self._device.health.check(f"binding {describe(self.op)}")
        check_tensors(self.op, tensors, m)
        pieces = [
            self._kernel.bind({x: whole(y).rows(*piece) for x, y in tensors.items()}, _size(piece))
            for piece in pieces_of(m, self._device.threads)
        ]
        return _WorkerCall(self._device, f"{describe(self.op)} m={m}", m, pieces)


class _WorkerCall(BoundCall):
    def __init__(
        self, device: WorkerDevice, name: str, m: int, pieces: Sequence[BoundCall]
    ) -> None:
        self.name, self.m = name, m
        self._device, self._pieces = device, pieces

    def run(self) -> None:
        self.submit().wait()

    def submit(self) -> Completion:
        return self._device.submit(self.name, self._pieces)


def pieces_of(m: int, threads: int) -> list[tuple[int, int]]:
    """Return the tokens of each piece of a call: one for a single thread, or for few tokens."""
    count = 1 if threads == 1 else max(1, min(m // LEAST_TOKENS, PIECES * threads))
    return [(m * i // count, m * (i + 1) // count) for i in range(count)]


def _nothing() -> None:
    """Stand for a piece that was not queued."""


def _size(piece: tuple[int, int]) -> int:
    return piece[1] - piece[0]


def _work(queue: Queue, core: int | None) -> None:
    """Compute what is in the queue until it says to end."""
    if core is not None:
        run_on((core,))
    else:
        unpinned()
    while (piece := queue.get()) is not None:
        piece()
