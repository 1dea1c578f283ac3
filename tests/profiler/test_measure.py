"""Timing on a virtual clock: exact medians, drift, disturbance, budgets."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.host.clock import ManualClock
from hetero.backends.memory import PAGE_BYTES
from hetero.backends.ops import MatMul, Op
from hetero.profiler.grid import Task
from hetero.profiler.interference import longest_wait_s
from hetero.profiler.measure import MeasureSettings, TaskMeter, rescale, to_means
from hetero.profiler.predict import Floats
from hetero.profiler.records import MatMulRow
from hetero.profiler.stats import relative_errors, summarize
from hetero.profiler.timing import TimingPolicy, cold_bytes
from hetero.profiler.workload import TaskRunner, WeightPool, Workload
from tests.profiler.fakes import W4, Cost, devices, gpu_cost, npu_cost

SHAPES = ((1, 512, 512), (8, 1024, 512), (32, 512, 512), (256, 1024, 1024))
TASKS = [Task(kind, W4, "plain", *shape) for shape in SHAPES for kind in ("gpu", "npu")]
COSTS: dict[str, Cost] = {"gpu": gpu_cost, "npu": npu_cost}


def true_s(task: Task) -> float:
    return COSTS[task.device](task.op, task.m)


def meter(clock: ManualClock, *, gpu: Cost = gpu_cost, **settings: float) -> TaskMeter:
    workload = Workload(devices(clock, gpu=gpu), clock=clock, cold=0)
    return TaskMeter(workload, settings=MeasureSettings(**settings), reference_format=W4)  # type: ignore[arg-type]


def test_times_are_exact_and_converge_at_the_least_number_of_samples() -> None:
    rows = meter(ManualClock()).measure(TASKS)
    assert {row.key for row in rows} == {task.key for task in TASKS}
    by_key = {row.key: row for row in rows}
    for task in TASKS:
        row = by_key[task.key]
        assert row.seconds == pytest.approx(true_s(task), rel=1e-9)
        assert (row.samples, row.flags, row.reference) == (5, (), pytest.approx(1.0))


def test_something_else_may_run_between_samples() -> None:
    """Its time is in no sample."""
    clock = ManualClock()
    moments: list[float] = []

    def between() -> None:
        moments.append(clock.now())
        clock.sleep(0.05)

    workload = Workload(devices(clock), clock=clock, cold=0)
    rows = TaskMeter(
        workload, settings=MeasureSettings(), reference_format=W4, between=between
    ).measure(TASKS)
    assert len(moments) >= 5 * 4  # each round, before each reference kernel
    wanted = {task.key: true_s(task) for task in TASKS}
    assert {row.key: row.seconds for row in rows} == pytest.approx(wanted, rel=1e-9)


def test_each_task_is_visited_once_a_round() -> None:
    clock = ManualClock()
    workload = Workload(devices(clock), clock=clock, cold=0)
    counted = TaskMeter(workload, settings=MeasureSettings(least=4), reference_format=W4)
    npu = workload.devices["npu"]
    shapes = [(8, 1024, 512), (32, 512, 1024), (256, 1024, 1024)]
    counted.measure([Task("npu", W4, "plain", *shape) for shape in shapes])
    wanted = {(m, n, k) for m, n, k in shapes}
    order = [
        (launch.m, launch.op.n, launch.op.k)
        for launch in npu.launches  # type: ignore[attr-defined]
        if isinstance(launch.op, MatMul)
    ]
    visits = [shape for shape in order if shape in wanted][-12:]
    for start in range(0, 12, 3):
        assert set(visits[start : start + 3]) == wanted


def test_drift_cancels_and_is_recorded() -> None:
    """The GPU becomes 1.5 times slower between two blocks; the rows do not notice."""
    clock = ManualClock()

    def drifting(op: Op, m: int) -> float:
        return gpu_cost(op, m) * (1.5 if clock.now() > 5.0 else 1.0)

    found = meter(clock, gpu=drifting)
    tasks = [task for task in TASKS if task.device == "gpu"]
    before = found.measure(tasks)
    assert clock.now() < 5.0
    clock.sleep(5.0)
    after = found.measure(tasks)
    for rows, reference in ((before, 1.0), (after, 1.5)):
        for row in rows:
            task = next(task for task in tasks if task.key == row.key)
            assert row.seconds == pytest.approx(true_s(task), rel=1e-6)
            assert row.reference == pytest.approx(reference, rel=1e-6)
            assert row.flags == ()


@pytest.mark.full
def test_a_slow_ramp_cancels_within_a_task() -> None:
    clock = ManualClock()

    def ramp(op: Op, m: int) -> float:
        return gpu_cost(op, m) * (1 + clock.now() / 50)

    found = meter(clock, gpu=ramp, least=200, most=200, task_s=1e9)
    task = Task("gpu", W4, "plain", 256, 4096, 4096)
    (row,) = found.measure([task], until_s=clock.now() + 12)
    assert clock.now() > 12.0
    assert row.reference > 1.08
    first = next(point for point in found.points if point.phase == "prefill")
    at_first = true_s(task) * (1 + first.at_s / 50)  # rows are in units of that moment's speed
    assert row.seconds == pytest.approx(at_first, rel=0.02)


def test_memory_and_arithmetic_drift_separately() -> None:
    """Memory becomes 1.4 times slower between two blocks: neither kind of task notices."""
    clock = ManualClock()

    def cost(op: Op, m: int) -> float:
        if not isinstance(op, MatMul):
            return 5e-6
        streaming_s = 0.5625 * op.n * op.k / 20e9 * (1.4 if clock.now() > 5.0 else 1.0)
        return max(streaming_s, 2.0 * m * op.n * op.k / 1e12)

    found = meter(clock, gpu=cost)
    tasks = [Task("gpu", W4, "plain", m, 2048, 1024) for m in (1, 256)]
    before = found.measure(tasks)
    assert clock.now() < 5.0
    clock.sleep(5.0)
    after = {row.m: row for row in found.measure(tasks)}
    for row in before:
        assert after[row.m].seconds == pytest.approx(row.seconds, rel=0.02)
    assert after[1].reference == pytest.approx(1.4, rel=0.02)
    assert after[256].reference == pytest.approx(1.0, rel=0.02)


@pytest.mark.full
def test_a_task_that_drifts_is_measured_again_and_then_marked() -> None:
    """No speed has half of the samples."""
    clock = ManualClock()

    def wild(op: Op, m: int) -> float:
        return gpu_cost(op, m) * (1.0 + 0.5 * (int(clock.now() / 1.7) % 3))

    found = meter(clock, gpu=wild, least=400, most=400, task_s=1e9, drift=0.1)
    task = Task("gpu", W4, "plain", 256, 4096, 4096)
    (row,) = found.measure([task])
    assert "drifted" in row.flags
    assert row.block == 1
    launches = found.workload.devices["gpu"].launches  # type: ignore[attr-defined]
    timed = sum(launch.op == task.op for launch in launches)
    assert timed >= 800  # twice


def test_samples_of_the_speed_that_most_have_are_used() -> None:
    """The GPU has two speeds, of which a kernel makes less than its reference does."""
    clock = ManualClock()

    def two_speeds(op: Op, m: int) -> float:
        slow = int(clock.now() / 4) % 3 == 0
        of_reference = isinstance(op, MatMul) and (op.n, op.k) in ((2048, 2048), (1024, 1024))
        return gpu_cost(op, m) * ((1.5 if of_reference else 1.1) if slow else 1.0)

    timing = meter(clock, gpu=two_speeds, least=30, most=90, task_s=1e9)
    task = Task("gpu", W4, "plain", 1024, 4096, 4096)
    clock.sleep(5)  # the speed of the start is the fast one
    (row,) = timing.measure([task])
    assert row.flags == ()
    launches = timing.workload.devices["gpu"].launches  # type: ignore[attr-defined]
    assert row.samples < sum(launch.op == task.op for launch in launches) - 5  # the slow ones
    assert row.seconds == pytest.approx(true_s(task), rel=0.01)


class Waits:
    """Two samples in five lose 5 ms to another program."""

    def __init__(self) -> None:
        self.rng, self.reads, self.total_s = np.random.default_rng(0), 0, 0.0

    def waits_s(self) -> Mapping[int, float]:
        self.reads += 1
        if self.reads % 2 == 0 and self.rng.random() < 0.4:  # the reading after a sample
            self.total_s += 5e-3
        return {1: self.total_s}


def test_disturbed_samples_are_thrown_away() -> None:
    clock = ManualClock()
    made = Workload(devices(clock), clock=clock, cold=0, interference=Waits())
    found = TaskMeter(made, settings=MeasureSettings(), reference_format=W4)
    (row,) = found.measure([Task("npu", W4, "plain", 32, 512, 512)])
    assert row.flags == ()
    assert row.seconds == pytest.approx(npu_cost(TASKS[5].op, 32), rel=1e-9)


def test_what_is_always_disturbed_is_marked() -> None:
    class Always(Waits):
        def waits_s(self) -> Mapping[int, float]:
            self.total_s += 1e-6
            return {1: self.total_s}

    clock = ManualClock()
    made = Workload(devices(clock), clock=clock, cold=0, interference=Always())
    found = TaskMeter(made, settings=MeasureSettings(), reference_format=W4)
    (row,) = found.measure([Task("npu", W4, "plain", 1, 512, 512)])
    assert "disturbed" in row.flags


def test_no_more_than_one_sample_after_the_end() -> None:
    clock = ManualClock()
    rows = meter(clock).measure(TASKS, until_s=clock.now())
    assert len(rows) == len(TASKS)
    assert {row.samples for row in rows} == {1}
    assert {row.ci for row in rows} == {None}


def test_rows_are_rescaled_to_the_median_speed_of_the_run() -> None:
    clock = ManualClock()
    found = meter(clock, gpu=lambda op, m: gpu_cost(op, m) * (2.0 if clock.now() > 5e-3 else 1.0))
    tasks = [task for task in TASKS if task.device == "gpu"]
    rows = rescale(found.measure(tasks), found.points)
    prefill = next(row for row in rows if row.m == 256)
    assert prefill.seconds == pytest.approx(2 * true_s(TASKS[6]), rel=0.02)
    assert prefill.reference == pytest.approx(1.0, rel=0.02)


def test_rows_add_up_to_the_median_step_of_a_machine_that_is_disturbed_now_and_then() -> None:
    rng = np.random.default_rng(5)

    def seconds(count: int) -> Floats:
        """Of launches of 1 ms, of which one in eight takes 1.7 times as long."""
        return 1e-3 * rng.normal(1, 0.01, count) * np.where(rng.random(count) < 1 / 8, 1.7, 1.0)

    rows = []
    for n in range(40):
        found = summarize(seconds(25).tolist())
        rows.append(
            MatMulRow(
                device="gpu", weight_format=WeightFormat.W4A8, m=1, n=64 * n + 64, k=64,
                seconds=found.median, spread=found.spread, samples=25, skew=found.skew,
            )
        )  # fmt: skip
    few = rows[0].model_copy(update={"n": 1, "seconds": 1e-3, "samples": 3, "skew": 1.5})
    other = few.model_copy(update={"device": "npu"})
    *means, few_mean, other_mean = to_means([*rows, few, other])
    step_s = float(np.median([seconds(40).sum() for _ in range(500)]))
    assert sum(row.seconds for row in rows) < 0.93 * step_s
    assert sum(row.seconds for row in means) == pytest.approx(step_s, rel=0.02)
    assert few_mean.seconds == pytest.approx(step_s / 40, rel=0.02)
    assert other_mean.seconds == 1e-3  # nothing is known of its kind
    assert summarize([1.0] * 9 + [1000.0]).skew == pytest.approx(1.1)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=60))
def test_a_summary_is_inside_its_samples(samples: list[float]) -> None:
    found = summarize(samples)
    assert min(samples) <= found.median <= max(samples)
    assert found.ci >= 0
    assert found.spread >= 0
    assert found.samples == len(samples)


def test_the_interval_covers_the_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        samples = rng.exponential(1.0, 25)
        found = summarize(samples.tolist())
        reach = 2 * found.ci * found.median  # the interval is not centred on the median
        hits += abs(found.median - math.log(2)) <= reach
    assert hits / 400 > 0.9


def test_summaries_of_constants_and_single_samples() -> None:
    assert summarize([2.0]) == (2.0, math.inf, 0.0, 1, 1.0)
    assert summarize([2.0] * 5) == (2.0, 0.0, 0.0, 5, 1.0)
    assert relative_errors([1.1, 0.9], [1.0, 1.0]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_overlapping_waits_count_once() -> None:
    assert longest_wait_s({1: 1.0, 2: 5.0}, {1: 1.5, 2: 5.2, 3: 0.1}) == pytest.approx(0.5)
    assert longest_wait_s({}, {}) == 0.0


class Sleepy(Workload):
    """Reading other memory leaves code and cores cold: the next call takes 100 µs more."""

    cold_call = False

    def evict(self, runner: TaskRunner, copies: list[int]) -> None:
        super().evict(runner, copies)
        self.cold_call = True

    def warmed(self, cost: Cost) -> Cost:
        def seconds(op: Op, m: int) -> float:
            extra_s, self.cold_call = 1e-4 * self.cold_call, False
            return cost(op, m) + extra_s

        return seconds


@pytest.mark.parametrize("task", [t for t in TASKS if t.m <= 8], ids=lambda t: f"{t.device}-{t.m}")
def test_a_call_of_few_tokens_pays_for_a_cold_weight_but_not_for_cold_code(task: Task) -> None:
    clock = ManualClock()
    opened = devices(clock)
    workload = Sleepy(opened, clock=clock, cold=0)
    for kind, device in opened.items():
        device._cost = workload.warmed(COSTS[kind])
    runner = workload.runner(task)
    workload.warm_up(runner)
    assert workload.time(runner) == pytest.approx(true_s(task), rel=1e-9)


@pytest.mark.parametrize("of_model", [1 << 16, 1 << 40])
def test_no_more_is_read_between_two_uses_than_a_model_has(of_model: int) -> None:
    clock = ManualClock()
    made = Workload(devices(clock), clock=clock, cold=of_model)
    assert made.cold == min(of_model, cold_bytes())
    runner = made.runner(Task("npu", W4, "plain", 1, 64, 64))
    made.evict(runner, [0])
    before = made.read_bytes
    made.evict(runner, [0])
    size = runner.weights[0].nbytes
    assert made.read_bytes - before == pytest.approx(made.cold + size, abs=PAGE_BYTES)


SMALL_SHAPES = tuple((1, n, 256) for n in (64, 128, 192, 256, 320, 384))
OF_MODEL = {"small": 1 << 16, "large": 1 << 40}


@pytest.mark.parametrize("of_model", OF_MODEL)
def test_a_small_models_call_was_made_a_moment_ago(of_model: str) -> None:
    """13 µs more where others came since, as they do in a profile of many tasks."""
    clock = ManualClock()
    opened = devices(clock)
    recent: deque[Op] = deque(maxlen=4)

    def seconds(op: Op, m: int) -> float:
        extra_s = 0.0 if op in recent else 13e-6
        recent.append(op)
        return npu_cost(op, m) + extra_s

    opened["npu"]._cost = seconds
    workload = Workload(opened, clock=clock, cold=OF_MODEL[of_model])
    runners = {shape: workload.runner(Task("npu", W4, "plain", *shape)) for shape in SMALL_SHAPES}
    for runner in runners.values():
        workload.warm_up(runner)
    extra_s = 0.0 if of_model == "small" else 13e-6
    for shape, runner in runners.items():
        wanted_s = true_s(Task("npu", W4, "plain", *shape)) + extra_s
        assert workload.time(runner) == pytest.approx(wanted_s, rel=1e-9)


@pytest.mark.parametrize("of_model", OF_MODEL)
def test_reading_counters_cools_what_a_large_weight_would(of_model: str) -> None:
    cold = False

    class Cooling:
        def waits_s(self) -> Mapping[int, float]:
            nonlocal cold
            cold = True
            return {1: 0.0}

    def seconds(op: Op, m: int) -> float:
        nonlocal cold
        extra_s, cold = 1e-5 * cold, False
        return npu_cost(op, m) + extra_s

    clock = ManualClock()
    opened = devices(clock)
    opened["npu"]._cost = seconds
    workload = Workload(opened, clock=clock, cold=OF_MODEL[of_model], interference=Cooling())
    task = Task("npu", W4, "plain", *SMALL_SHAPES[0])
    runner = workload.runner(task)
    workload.warm_up(runner)
    extra_s = 0.0 if of_model == "small" else 1e-5
    assert workload.time(runner) == pytest.approx(true_s(task) + extra_s, rel=1e-9)


@pytest.mark.parametrize(
    ("of_model", "timings", "batches"),
    [
        ("small", (4.1e-3, 70e-6, 30e-6), (1, 1, 57, 64)),  # the first was interrupted
        ("small", (80e-6, 4e-3, 3e-3), (1, 50, 50, 50)),
        ("small", (400e-6, 350e-6, 500e-6), (1, 10, 11, 11)),
        ("small", (50e-3,), (1, 1)),  # too long for a batch: not timed again
        ("large", (4.1e-3, 400e-6), (1, 1, 4)),  # at most one of each copy
        ("large", (2e-3, 8e-3), (1, 1, 2)),
    ],
)
def test_an_interrupted_launch_does_not_choose_the_batch(
    monkeypatch: pytest.MonkeyPatch,
    of_model: str,
    timings: tuple[float, ...],
    batches: tuple[int, ...],
) -> None:
    clock = ManualClock()
    workload = Workload(devices(clock), clock=clock, cold=OF_MODEL[of_model])
    runner = workload.make_runner(Task("gpu", W4, "plain", 64, 256, 256), copies=4)
    left, seen = list(timings), []

    def timed(_: object) -> float:
        seen.append(runner.batch)
        return left.pop(0)

    monkeypatch.setattr(workload, "time", timed)
    workload.warm_up(runner)
    assert (*seen, runner.batch) == batches
    assert left == []


@pytest.mark.full
def test_a_drift_of_memory_is_not_one_of_a_small_model() -> None:
    clock = ManualClock()

    def memory_drifts(op: Op, m: int) -> float:
        streams = isinstance(op, MatMul) and (m, op.n, op.k) == (1, 2048, 2048)
        return gpu_cost(op, m) * (1 + 10 * clock.now() if streams else 1.0)

    made = Workload(devices(clock, gpu=memory_drifts), clock=clock, cold=OF_MODEL["small"])
    found = TaskMeter(made, settings=MeasureSettings(), reference_format=W4)
    tasks = [Task("gpu", W4, "plain", *shape) for shape in SMALL_SHAPES]
    rows = found.measure(tasks)
    for row in rescale(rows, found.points, small=True):
        wanted_s = true_s(Task("gpu", W4, "plain", row.m, row.n, row.k))
        assert row.seconds == pytest.approx(wanted_s, rel=1e-9)
        assert row.flags == ()
    others = rescale(rows, found.points)
    assert all(other.seconds > 1.1 * row.seconds for other, row in zip(others, rows, strict=True))


@pytest.mark.parametrize("storage", [StorageFormat.Q4, StorageFormat.Q8, StorageFormat.F16])
def test_copies_of_a_weight_share_no_memory(storage: StorageFormat) -> None:
    """In one batch they are read one after the other: shared scales, a ninth of the bytes, would be
    in the caches, where a model's never are.
    """
    pool = WeightPool(1 << 22)
    n, k = 512, 896
    count = pool.nbytes // pool.weight(storage, n, k).nbytes
    pool = WeightPool(1 << 22)
    weights = [pool.weight(storage, n, k) for _ in range(count)]
    for part in ("data", "scales"):
        arrays = [getattr(w, part) for w in weights if getattr(w, part) is not None]
        starts = sorted(array.ctypes.data for array in arrays)
        assert all(b - a >= arrays[0].nbytes for a, b in itertools.pairwise(starts)), part


@pytest.mark.parametrize(("n", "k"), [(16, 32), (200, 96), (576, 576), (1000, 1536)])
def test_a_mixed_weight_has_the_parts_of_a_usual_file(n: int, k: int) -> None:
    pool = WeightPool(1 << 20)
    first, second = (pool.weight(StorageFormat.MIXED, n, k) for _ in range(2))
    assert sum(part.n for part in first.parts) == n
    assert first.parts[0].storage is StorageFormat.Q4_K
    assert not any(part.n % 16 for part in first.parts[:-1])
    if n > 100:
        rows = {part.storage: part.n / n for part in first.parts}
        assert rows[StorageFormat.Q6_K] == pytest.approx(0.2, abs=0.05)
        assert first.nbytes == pytest.approx(21 / 32 * n * k, rel=0.25)  # padding
    for one, other in zip(first.parts, second.parts, strict=True):
        assert not np.shares_memory(one.data, other.data) or n * k > 1 << 19
    values = first.dequantize()
    assert np.isfinite(values).all()
    assert 0.001 < values.std() < 1
    assert len(pool.table(StorageFormat.MIXED, n, k).parts) == 1


def test_a_weight_larger_than_the_pool_is_not_timed_behind_itself() -> None:
    clock = ManualClock()
    policy = TimingPolicy(max_cold_bytes=1 << 24)
    workload = Workload(devices(clock), clock=clock, policy=policy)
    small, large = (workload.runner(Task("gpu", W4, "plain", 1, n, 2048)) for n in (1024, 32768))
    for runner in (small, large):
        workload.warm_up(runner)
    assert len(small.calls) > 4
    assert len({w.data.ctypes.data for w in small.weights}) == len(small.weights)
    assert large.weights[0].nbytes > workload.cold
    assert (len(large.calls), large.batch) == (1, 1)
