"""Two processors on one virtual clock: queues, submission, and slowing each other down.

Work is measured in seconds that a job takes alone. While both processors work, each runs at
1 / its contention factor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hetero.backends.host.clock import Clock, ManualClock
from hetero.backends.protocol import DeviceKind

EVER = float("inf")


@dataclass
class ChipJob:
    """One launch: when it may start, the work that is left, and when it ended."""

    name: str
    ready_s: float
    left_s: float
    start_s: float | None = None
    end_s: float | None = None


@dataclass(frozen=True)
class ChipTimes:
    """Costs between the processors, seconds.

    submit_busy_s     host time of a submission after another launch
    submit_empty_s    how much later a launch starts in a queue that has run dry
    wait_s            from the end of a launch until the host knows
    gpu_slowdown, npu_slowdown    factors (>= 1) while the other works too
    """

    submit_busy_s: float = 0.0
    submit_empty_s: float = 0.0
    wait_s: float = 0.0
    gpu_slowdown: float = 1.0
    npu_slowdown: float = 1.0


@dataclass
class SimulatedChip:
    """The state of both processors. Shared by the devices of one simulated chip."""

    times: ChipTimes = ChipTimes()
    clock: Clock = field(default_factory=ManualClock)
    finished: dict[DeviceKind, list[ChipJob]] = field(
        default_factory=lambda: {"gpu": [], "npu": []}
    )

    def __post_init__(self) -> None:
        self._queues: dict[DeviceKind, deque[ChipJob]] = {"gpu": deque(), "npu": deque()}
        self._now_s = self.clock.now()

    def submit(self, kind: DeviceKind, name: str, work_s: float) -> ChipJob:
        """Queue a launch now; a queue that has run dry starts it later."""
        self.advance()
        dry = not self._queues[kind]
        if kind == "gpu" and not dry:
            self.clock.sleep(self.times.submit_busy_s)
            self.advance()
            dry = not self._queues[kind]
        late = self.times.submit_empty_s if kind == "gpu" and dry else 0.0
        job = ChipJob(name, self.clock.now() + late, work_s)
        self._queues[kind].append(job)
        return job

    def run(self, kind: DeviceKind, name: str, work_s: float) -> ChipJob:
        """Return a blocking launch: time passes until it is done."""
        job = self.submit(kind, name, work_s)
        self.finish(job)
        return job

    def finish(self, job: ChipJob, deadline_s: float = EVER) -> bool:
        """Let time go on until a job has ended, at most for `deadline_s`; whether it has."""
        give_up_s = self.clock.now() + deadline_s
        while job.end_s is None and self._now_s < give_up_s:
            self._step(give_up_s)
        if self._now_s > self.clock.now():
            self.clock.sleep(self._now_s - self.clock.now())
        return job.end_s is not None

    def advance(self) -> None:
        """Bring both processors to the clock's time."""
        now_s = self.clock.now()
        while self._now_s < now_s:
            self._step(now_s)

    def _step(self, until_s: float) -> None:
        """Advance to the next start, end or `until_s`, whichever comes first."""
        jobs = {kind: queue[0] for kind, queue in self._queues.items() if queue}
        active = {k: j for k, j in jobs.items() if j.ready_s <= self._now_s}
        slow = self._slowdowns(active)
        events = [until_s, *(j.ready_s for k, j in jobs.items() if k not in active)]
        events += [self._now_s + j.left_s * slow[k] for k, j in active.items()]
        then_s = min(events)
        if then_s == EVER:
            raise RuntimeError("a simulated chip cannot wait for work that was never queued")
        for kind, job in active.items():
            if job.start_s is None:
                job.start_s = self._now_s
            ends = self._now_s + job.left_s * slow[kind]
            job.left_s -= (then_s - self._now_s) / slow[kind]
            if ends <= then_s:
                job.left_s, job.end_s = 0.0, then_s
                self.finished[kind].append(self._queues[kind].popleft())
        self._now_s = then_s

    def _slowdowns(self, active: dict[DeviceKind, ChipJob]) -> dict[DeviceKind, float]:
        if len(active) < 2:
            return dict.fromkeys(active, 1.0)
        return {"gpu": self.times.gpu_slowdown, "npu": self.times.npu_slowdown}
