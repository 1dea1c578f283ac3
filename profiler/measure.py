"""Timing tasks: interleaved rounds, reference kernels, adaptive repetition.

A round takes one sample of each unfinished task. The reference kernels of the devices in the block
are timed before each round and a few times a second within it. Each sample is divided by how slow
its device was just then (1: as at the start of the run), so drift cancels. Memory and arithmetic
drift apart (other users of the machine take bandwidth, clocks go up and down): the decode reference
stands for one, the prefill reference for the other, and a task is compared with both, each as much
as it binds the task.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import Clock
from hetero.backends.protocol import DeviceKind
from hetero.profiler.grid import Task
from hetero.profiler.records import Flag, MatMulRow, Phase, ReferencePoint, typical
from hetero.profiler.stats import SMOOTHED_S, summarize
from hetero.profiler.workload import TaskRunner, Workload

Reference: TypeAlias = tuple[DeviceKind, Phase]

REFERENCE_SIZES: Final[dict[Phase, tuple[int, int, int]]] = {
    "decode": (1, 2048, 2048),
    "prefill": (128, 1024, 1024),
}


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """Settings of how carefully to measure.

    ci          stop when the relative half-width of the median's 95 % interval is below this
    least, most samples of a task at one speed; twice the most of all
    task_s      time after which a task stops although it has not converged
    scaled      whether samples are compared with the reference kernels (else: as they were timed)
    drift       change of the reference within a task from which it is measured again
    disturbed   share of a sample during which our threads may wait for a core

    Timings of a reference kernel:

    reference_samples        each time,
    first_reference_samples  at the start of the run,
    fresh_s                  and how long they are valid
    """

    ci: float = 0.03
    least: int = 5
    most: int = 40
    task_s: float = 2.0
    scaled: bool = True
    drift: float = 0.10
    disturbed: float = 0.02

    reference_samples: int = 3
    first_reference_samples: int = 15
    fresh_s: float = 0.4


@dataclass
class TaskSample:
    """One timing, what its reference was (1: as at the start), and time lost to other programs."""

    seconds: float
    reference: float
    waited_s: float


@dataclass
class Progress:
    """State of one task while its block runs."""

    task: Task
    runner: TaskRunner
    samples: list[TaskSample] = field(default_factory=list)
    spent_s: float = 0.0
    done: bool = False


class TaskMeter:
    """Measures blocks of tasks.

    `base` holds the reference kernels' times at the start of the run; give it back to continue a
    run in the same units. `between` is called before reference kernels are timed, some times a
    second: something else may run then.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        settings: MeasureSettings,
        reference_format: WeightFormat,
        base: dict[Reference, float] | None = None,
        seed: int = 0,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.clock: Clock = workload.clock
        self.base: dict[Reference, float] = dict(base or {})
        self.points: list[ReferencePoint] = []
        self._format = reference_format
        self._between = between or (lambda: None)
        self._rng = np.random.default_rng(seed)
        self._recent: dict[Reference, deque[tuple[float, float]]] = {}
        self._start_s = self.clock.now()
        self._blocks = 0

    def measure(
        self,
        tasks: Sequence[Task],
        *,
        until_s: float = math.inf,
        on_row: Callable[[MatMulRow], None] | None = None,
    ) -> list[MatMulRow]:
        """Return rows of a block of tasks; drifted ones are measured once more, then marked.

        After the moment `until_s` of the clock no further sample is taken beyond one for each task.
        """
        self._blocks += 1
        report = on_row or (lambda _: None)
        rows, again = self._run_block(tasks, until_s, report, final=False)
        if again:
            more, _ = self._run_block(again, until_s, report, final=True)
            rows += more
        return rows

    def _run_block(
        self,
        tasks: Sequence[Task],
        until_s: float,
        report: Callable[[MatMulRow], None],
        *,
        final: bool,
    ) -> tuple[list[MatMulRow], list[Task]]:
        entries = [self._start(task) for task in tasks]
        references = {(task.device, phase) for task in tasks for phase in REFERENCE_SIZES}
        rows, again = [], []
        while waiting := [entry for entry in entries if not entry.done]:
            for key in sorted(references):
                self.reference_ratio(key)
            for index in self._rng.permutation(len(waiting)):
                entry = waiting[index]
                self._sample(entry, self._slowness(entry.task))
                if self._finished(entry, until_s):
                    entry.done = True
                    row = self._row(entry)
                    if "drifted" in row.flags and not final and self.clock.now() < until_s:
                        again.append(entry.task)
                    else:
                        rows.append(row)
                        report(row)
        return rows, again

    def reference_ratio(self, key: Reference) -> float:
        """Time of a reference kernel now over its time at the start of the run.

        Now is the median of the last `SMOOTHED_S`: a few timings scatter more than a machine drifts
        in so short a time.
        """
        self._between()
        runner = self.reference_runner(key)
        settings = self.settings
        first = key not in self.base
        count = settings.first_reference_samples if first else settings.reference_samples
        samples = [self._clean_time(runner) for _ in range(count)]
        seconds = summarize([sample.seconds for sample in samples]).median
        base_s = self.base.setdefault(key, seconds)
        self.points.append(
            ReferencePoint(
                device=key[0],
                phase=key[1],
                at_s=self.clock.now() - self._start_s,
                seconds=seconds,
            )
        )
        now_s = self.clock.now()
        recent = self._recent.setdefault(key, deque())
        recent.append((now_s, seconds / base_s))
        while recent[0][0] < now_s - SMOOTHED_S:
            recent.popleft()
        return float(np.median([ratio for _, ratio in recent]))

    def _slowness(self, task: Task) -> float:
        """Return how slow the device is now for a task (1: as at the start of the run)."""
        ratios = {phase: self._ratio_now((task.device, phase)) for phase in REFERENCE_SIZES}
        sizes = (task.m, task.n, task.k)
        share = memory_share(sizes, self.reference_s(task.device))
        # Memory does not bind what the caches hold.
        return _blend(0.0 if self.workload.small else share, ratios)

    def reference_s(self, device: DeviceKind) -> dict[Phase, float]:
        """Return the seconds of a device's reference kernels at the start of the run."""
        return {phase: self.base[device, phase] for phase in REFERENCE_SIZES}

    def _ratio_now(self, key: Reference) -> float:
        """Do the same as `reference_ratio`, timing the reference again only if that is long ago."""
        recent = self._recent[key]
        if self.clock.now() - recent[-1][0] > self.settings.fresh_s:
            return self.reference_ratio(key)
        return float(np.median([ratio for _, ratio in recent]))

    def reference_runner(self, key: Reference) -> TaskRunner:
        """Return the reference kernel of a device and phase, warmed up at first use."""
        device, phase = key
        m, n, k = REFERENCE_SIZES[phase]
        sizes = self.workload.devices[device].capabilities.graph_sizes
        if sizes and m not in sizes:
            m = min(sizes, key=lambda size: abs(size - m))
        runner = self.workload.runner(Task(device, self._format, "plain", m, n, k))
        if runner.cycle == 0:
            self.workload.warm_up(runner)
        return runner

    def _start(self, task: Task) -> Progress:
        runner = self.workload.runner(task)
        if runner.cycle == 0:
            self.workload.warm_up(runner)
        return Progress(task, runner)

    def _sample(self, entry: Progress, reference: float) -> None:
        start_s = self.clock.now()
        sample = self._timed(entry.runner)
        sample.reference = reference if self.settings.scaled else 1.0
        entry.samples.append(sample)
        entry.spent_s += self.clock.now() - start_s

    def _timed(self, runner: TaskRunner) -> TaskSample:
        seconds, waited_s = self.workload.timed(runner)
        return TaskSample(seconds, 1.0, waited_s)

    def _clean_time(self, runner: TaskRunner, attempts: int = 3) -> TaskSample:
        """Return the first undisturbed sample, else the least disturbed, its waiting taken off."""
        samples: list[TaskSample] = []
        for _ in range(attempts):
            samples.append(self._timed(runner))
            if self._is_clean(samples[-1]):
                return samples[-1]
        best = min(samples, key=lambda sample: sample.waited_s / sample.seconds)
        return TaskSample(_without_wait(best), 1.0, best.waited_s)

    def _is_clean(self, sample: TaskSample) -> bool:
        return sample.waited_s <= self.settings.disturbed * sample.seconds

    def _finished(self, entry: Progress, until_s: float) -> bool:
        settings = self.settings
        if self.clock.now() >= until_s:
            return True
        _, steady = self._clean(entry)
        if len(steady) >= settings.least:
            ci = summarize([sample.seconds / sample.reference for sample in steady]).ci
            if ci <= settings.ci:
                return True
        spent = entry.spent_s >= settings.task_s and len(entry.samples) >= min(3, settings.least)
        many = len(steady) >= settings.most or len(entry.samples) >= 2 * settings.most
        return spent or many

    def _clean(self, entry: Progress) -> tuple[list[TaskSample], list[TaskSample]]:
        """Return a task's clean samples, and those of the speed at which most were taken.

        A core that is shared with other machines has two speeds, for seconds each, and what they
        make of a kernel differs from what they make of its reference.
        """
        clean = [sample for sample in entry.samples if self._is_clean(sample)]
        return clean, _of_one_speed(clean, self.settings.drift)

    def _row(self, entry: Progress) -> MatMulRow:
        flags: list[Flag] = []
        used, steady = self._clean(entry)
        if len(steady) >= max(min(self.settings.least, len(used)), len(used) / 2):
            used = steady
        if len(used) >= min(3, len(entry.samples)):
            times = [sample.seconds / sample.reference for sample in used]
        else:
            used = entry.samples
            times = [_without_wait(sample) / sample.reference for sample in used]
            flags.append("disturbed")
        summary = summarize(times)
        references = [sample.reference for sample in used]
        if summary.ci > self.settings.ci:
            flags.append("unconverged")
        if max(references) > (1 + self.settings.drift) * min(references):
            flags.append("drifted")
        task = entry.task
        return MatMulRow(
            device=task.device,
            weight_format=task.weight_format,
            order=task.order,
            m=task.m,
            n=task.n,
            k=task.k,
            seconds=summary.median,
            ci=summary.ci if math.isfinite(summary.ci) else None,
            spread=summary.spread,
            samples=summary.samples,
            reference=float(np.median(references)),
            skew=summary.skew,
            block=self._blocks,
            flags=tuple(flags),
        )


def to_means(rows: Sequence[MatMulRow]) -> list[MatMulRow]:
    """Return rows whose seconds are means instead of medians.

    They follow from the skew that is typical of the rows of their device, phase and format: rows of
    few samples say little of it.

    A step is a sum of a hundred kernels, so it takes the sum of their means, and almost never that
    of their medians: where now and then a neighbour takes the memory for a millisecond, that is in
    one sample of ten, but in every step.
    """
    skews = typical(rows, lambda row: row.skew)
    return [
        row.model_copy(update={"seconds": row.seconds * skews.get(row.kind, 1.0)}) for row in rows
    ]


def _of_one_speed(samples: Sequence[TaskSample], drift: float) -> list[TaskSample]:
    """Return the largest group of samples whose references differ by `drift` at most."""
    ordered = sorted(samples, key=lambda sample: sample.reference)
    best: list[TaskSample] = []
    first = 0
    for last, sample in enumerate(ordered):
        while sample.reference > (1 + drift) * ordered[first].reference:
            first += 1
        if last - first >= len(best):
            best = ordered[first : last + 1]
    return best


def _without_wait(sample: TaskSample) -> float:
    """Return seconds less the time that our threads waited for a core, at least a tenth of them."""
    return max(sample.seconds - sample.waited_s, 0.1 * sample.seconds)


def memory_share(sizes: tuple[int, int, int], reference_s: Mapping[Phase, float]) -> float:
    """Return how much streaming weights binds a matmul (m, n, k).

    1 memory alone, 0 arithmetic alone.

    From what its bytes would take at the decode reference's speed and its arithmetic at the prefill
    reference's; squares, because the two overlap.
    """
    m, n, k = sizes
    _, decode_n, decode_k = REFERENCE_SIZES["decode"]
    streaming_s = reference_s["decode"] * n * k / (decode_n * decode_k)
    computing_s = reference_s["prefill"] * m * n * k / math.prod(REFERENCE_SIZES["prefill"])
    return streaming_s**2 / (streaming_s**2 + computing_s**2)


def _blend(share: float, ratios: Mapping[Phase, float]) -> float:
    return float(ratios["decode"] ** share * ratios["prefill"] ** (1 - share))


def rescale(
    rows: Iterable[MatMulRow], points: Sequence[ReferencePoint], *, small: bool = False
) -> list[MatMulRow]:
    """Return the rows in units of the run's median speed rather than of the speed at its start.

    `small` as in `Workload`.
    """
    series: dict[Reference, list[float]] = {}
    for point in points:
        series.setdefault((point.device, point.phase), []).append(point.seconds)
    start_s: dict[DeviceKind, dict[Phase, float]] = {}
    ratios: dict[DeviceKind, dict[Phase, float]] = {}
    for (device, phase), times in series.items():
        start_s.setdefault(device, {})[phase] = times[0]
        ratios.setdefault(device, {})[phase] = float(np.median(times)) / times[0]
    scaled = []
    for row in rows:
        factor = 1.0
        if len(ratios.get(row.device, {})) == len(REFERENCE_SIZES):
            share = 0.0 if small else memory_share((row.m, row.n, row.k), start_s[row.device])
            factor = _blend(share, ratios[row.device])
        scaled.append(
            row.model_copy(
                update={"seconds": row.seconds * factor, "reference": row.reference / factor}
            )
        )
    return scaled
