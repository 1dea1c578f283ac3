"""The processors of a chip on one virtual clock: queues, submission, and slowing each other down.

Work is measured in seconds that a launch takes alone. While several processors work, each runs at
1 / its contention factor, and the memory gives all together no more than its bandwidth.

The host's own code takes no time: what the control thread spends on a submission, a wait or a copy
is what `ChipTimes` says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.backends.host.clock import ManualClock
from hetero.backends.protocol import EVERY_KIND, DeviceKind

EVER: Final = float("inf")
SPIN_S: Final = 100e-6  # that a polling thread lets pass at most between two looks at the clock


class Load(NamedTuple):
    """Work of one launch: its seconds alone, and the bytes of memory that it streams in them."""

    seconds: float
    nbytes: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Return the bandwidth that it takes alone."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class ChipJob:
    """One launch: when it may start, the work that is left, and when it ended.

    `compute` makes its numbers; what that raises is the `error` of the launch.
    """

    name: str
    ready_s: float
    load: Load
    compute: Callable[[], None] | None = None
    start_s: float | None = None
    end_s: float | None = None
    error: DeviceError | None = None

    def __post_init__(self) -> None:
        self.left_s = self.load.seconds

    def end(self, at_s: float) -> None:
        """Complete: results are in memory from now on."""
        self.left_s, self.end_s = 0.0, at_s
        self.make_numbers()

    def make_numbers(self) -> None:
        """Compute, once."""
        compute, self.compute = self.compute, None  # which keeps its kernel and tensors
        try:
            if compute is not None:
                compute()
        except DeviceError as error:
            self.error = error


@dataclass(frozen=True)
class ChipTimes:
    """Costs between the processors, in seconds.

    submit_busy_s     host time of a submission after another launch
    submit_empty_s    how much later a launch starts in a queue that has run dry
    idle_gap_s, idle_slower_s    and how much more after such idle gaps (rising), linear between
    wait_s, finish_s  from the end of a launch until a polling host knows, and one that finishes the
                      whole queue
    copy_fixed_s, copy_s_per_byte    a copy between the host's memory and the GPU's own
    gpu_slowdown, npu_slowdown    factors (>= 1) while the other works too
    bytes_per_s       most that the memory gives all together; None: as much as they ask for
    """

    submit_busy_s: float = 0.0
    submit_empty_s: float = 0.0
    idle_gap_s: tuple[float, ...] = ()
    idle_slower_s: tuple[float, ...] = ()
    wait_s: float = 0.0
    finish_s: float = 0.0
    copy_fixed_s: float = 0.0
    copy_s_per_byte: float = 0.0
    gpu_slowdown: float = 1.0
    npu_slowdown: float = 1.0
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Rendering:
    """Another user of the GPU, as a game: every `period_s` a frame that takes it `busy_s`.

    Frames queue behind the launches that were submitted before. None begins before the last one is
    done: a late frame shifts those after it to later periods.
    """

    period_s: float
    busy_s: float


@dataclass
class SimulatedChip:
    """The state of all processors. Shared by the devices of one simulated chip.

    `frames` are those of `rendering` that were submitted, in order.
    """

    times: ChipTimes = ChipTimes()
    clock: ManualClock = field(default_factory=ManualClock)
    rendering: Rendering | None = None
    frames: list[ChipJob] = field(default_factory=list)
    finished: dict[DeviceKind, list[ChipJob]] = field(
        default_factory=lambda: {kind: [] for kind in EVERY_KIND}
    )

    def __post_init__(self) -> None:
        self._queues: dict[DeviceKind, deque[ChipJob]] = {kind: deque() for kind in EVERY_KIND}
        self._now_s = self.clock.now()
        self._polled: tuple[ChipJob, float] | None = None

    def submit(
        self, kind: DeviceKind, name: str, load: Load, compute: Callable[[], None] | None = None
    ) -> ChipJob:
        """Queue a launch now; a queue that has run dry starts it later."""
        self.advance()
        dry = not self._queues[kind]
        if kind == "gpu" and not dry:
            self.clock.sleep(self.times.submit_busy_s)
            self.advance()
            dry = not self._queues[kind]
        late = self._start_s() if kind == "gpu" and dry else 0.0
        job = ChipJob(name, self.clock.now() + late, load, compute)
        self._queues[kind].append(job)
        return job

    def run(
        self, kind: DeviceKind, name: str, load: Load, compute: Callable[[], None] | None = None
    ) -> ChipJob:
        """Return a blocking launch: time passes until it is done.

        It reads what is in memory at its start. A launch in a queue writes at its end, so
        that a reader which does not wait for it gets older values.
        """
        job = self.submit(kind, name, load, compute)
        job.make_numbers()
        self.finish(job)
        return job

    def finish(self, job: ChipJob, deadline_s: float = EVER) -> bool:
        """Let time go on until a job has ended, at most for `deadline_s`; whether it has."""
        give_up_s = self.clock.now() + deadline_s
        while job.end_s is None and self._now_s < give_up_s:
            self._step(give_up_s)
        self.clock.advance_to(self._now_s)
        return job.end_s is not None

    def finish_queue(self, kind: DeviceKind) -> None:
        """Let time go on until a queue is empty and a host that blocks on it knows."""
        self.advance()
        own = [job for job in self._queues[kind] if job not in self.frames[-1:]]
        while own and own[-1].end_s is None:
            self._step(EVER)
        if self.finished[kind]:
            ended_s = self.finished[kind][-1].end_s
            assert ended_s is not None
            self.clock.advance_to(ended_s + self.times.finish_s)
        self.advance()

    def poll(self, job: ChipJob) -> bool:
        """Return whether the host sees the end of a job.

        The first look takes no time. A host that looks again, and has done nothing else meanwhile,
        spins: time goes on until it sees the end, for `SPIN_S` at most.
        """
        self.advance()
        now_s = self.clock.now()
        if not self._seen(job) and self._polled == (job, now_s):
            until_s = now_s + SPIN_S
            while job.end_s is None and self._now_s < until_s:
                self._step(until_s)
            if job.end_s is not None:
                until_s = min(until_s, job.end_s + self.times.wait_s)
            self.clock.advance_to(until_s)
            self.advance()
        self._polled = (job, self.clock.now())
        return self._seen(job)

    def wait(self, job: ChipJob, deadline_s: float) -> bool:
        """Let time go on until the host sees the end of a job, or `deadline_s` has passed."""
        self.advance()
        if self._seen(job):
            return True
        if not self.finish(job, deadline_s):
            return False
        assert job.end_s is not None
        self.clock.advance_to(job.end_s + self.times.wait_s)
        self.advance()
        return True

    def advance(self) -> None:
        """Bring all processors to the clock's time."""
        now_s = self.clock.now()
        while self._now_s < now_s:
            self._step(now_s)

    def _start_s(self) -> float:
        """Return how much later a launch starts that is submitted now to the GPU's dry queue."""
        times, before = self.times, self.finished["gpu"]
        if not times.idle_gap_s or not before:
            return times.submit_empty_s
        gap_s = self.clock.now() - (before[-1].end_s or 0.0)
        gaps, costs = (0.0, *times.idle_gap_s), (0.0, *times.idle_slower_s)
        return times.submit_empty_s + float(np.interp(gap_s, gaps, costs))

    def _seen(self, job: ChipJob) -> bool:
        return job.end_s is not None and self.clock.now() >= job.end_s + self.times.wait_s

    def _draw(self) -> float:
        """Submit a frame that is due; return when the next one is, if that is known."""
        if self.rendering is None:
            return EVER
        due_s, period_s = 0.0, self.rendering.period_s
        if self.frames:
            last = self.frames[-1]
            if last.end_s is None:
                return EVER
            due_s = max(last.ready_s + period_s, math.ceil(last.end_s / period_s) * period_s)
        if due_s > self._now_s:
            return due_s
        self.frames.append(ChipJob("frame", due_s, Load(self.rendering.busy_s)))
        self._queues["gpu"].append(self.frames[-1])
        return EVER

    def _step(self, until_s: float) -> None:
        """Advance to the next start, end or `until_s`, whichever comes first."""
        until_s = min(until_s, self._draw())
        jobs = {kind: queue[0] for kind, queue in self._queues.items() if queue}
        active = {k: j for k, j in jobs.items() if j.ready_s <= self._now_s}
        slow = self._slowdowns(active)
        events = [until_s, *(j.ready_s for k, j in jobs.items() if k not in active)]
        events += [self._now_s + j.left_s * slow[k] for k, j in active.items()]
        then_s = min(events)
        if then_s == EVER:
            raise RuntimeError("a simulated chip cannot wait for work that was never queued")
        before_s, self._now_s = self._now_s, then_s
        for kind, job in active.items():
            if job.start_s is None:
                job.start_s = before_s
            ends_s = before_s + job.left_s * slow[kind]
            job.left_s -= (then_s - before_s) / slow[kind]
            if ends_s <= then_s:
                self._queues[kind].popleft()
                if job not in self.frames[-1:]:
                    self.finished[kind].append(job)
                job.end(then_s)

    def _slowdowns(self, active: dict[DeviceKind, ChipJob]) -> dict[DeviceKind, float]:
        if len(active) < 2:
            return dict.fromkeys(active, 1.0)
        shared = 1.0
        if self.times.bytes_per_s is not None:
            wanted = sum(job.load.bytes_per_s for job in active.values())
            shared = max(1.0, wanted / self.times.bytes_per_s)
        own = {"gpu": self.times.gpu_slowdown, "npu": self.times.npu_slowdown}
        return {kind: max(shared, own.get(kind, 1.0)) for kind in active}
