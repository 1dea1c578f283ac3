"""Wait points on a fake clock: what they predict, sleep, poll and give up."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from hetero.backends.errors import WaitTimeoutError
from hetero.backends.host import time_limits
from hetero.backends.host.clock import ManualClock
from hetero.backends.host.timers import waited_for_core_s
from hetero.backends.protocol import Completion
from hetero.backends.registry import open_device
from hetero.runtime.waits import SleepTimes, Synchroniser, WaitPoint, WaitPolicy
from hetero.runtime.waits.trials import Trials

LOOK_S = 1e-6
LATE_S = 60e-6
POLICY = WaitPolicy()


class BusyClock(ManualClock):
    """A manual clock on a machine: looks at it cost a microsecond, sleeps return late, and `gap_s`
    is lost at the next look.
    """

    def __init__(self) -> None:
        super().__init__(100.0)
        self.gap_s = 0.0
        self.slept: list[float] = []
        self.late_s: Callable[[], float] = lambda: LATE_S

    def now(self) -> float:
        self.advance(LOOK_S + self.gap_s)
        self.gap_s = 0.0
        return super().now()

    def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.slept.append(duration_s)
        self.advance(duration_s + self.late_s())

    def advance(self, duration_s: float) -> None:
        super().sleep(duration_s)

    @property
    def now_s(self) -> float:
        """The time, without a look."""
        return super().now()


class At(Completion):
    """Complete at a moment."""

    def __init__(self, clock: BusyClock, in_s: float) -> None:
        self.clock, self.end_s = clock, clock.now_s + in_s

    def done(self) -> bool:
        self.clock.advance(LOOK_S)
        return self.clock.now_s >= self.end_s

    def wait(self, deadline_s: float = 1.0) -> None:
        self.clock.advance(max(self.end_s - self.clock.now_s, 0.0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> BusyClock:
    monkeypatch.delenv(
        time_limits.VARIABLE, raising=False
    )  # a slow machine sets it for the other tests
    return BusyClock()


def site_of(clock: BusyClock, **options: Any) -> WaitPoint:
    device = open_device("reference", kind="gpu", asynchronous=True)
    owner = Synchroniser({"gpu": device}, "fast", sleep=SleepTimes(LATE_S), clock=clock, **options)
    return owner.wait_point(("decode", (1,), "o", "qkv"), "gpu", "a kernel")


def owner_of(clock: BusyClock, **options: Any) -> Synchroniser:
    owner = site_of(clock, **options).owner
    assert isinstance(owner, Synchroniser)
    return owner


def wait(site: WaitPoint, clock: BusyClock, in_s: float) -> float:
    """Seconds that the end was noticed late."""
    completion = At(clock, in_s)
    site.wait(completion)
    return clock.now_s - completion.end_s


@pytest.mark.parametrize("length_s", [0.5e-3, 1e-3, 5e-3])
def test_a_wait_of_known_length_is_slept_through_and_noticed_at_once(
    clock: BusyClock, length_s: float
) -> None:
    site = site_of(clock)
    late = [wait(site, clock, length_s) for _ in range(40)]
    assert max(late[5:]) < 10 * LOOK_S
    assert site.prediction.expected_s == pytest.approx(length_s, rel=0.02, abs=8e-6)
    totals = site.owner.totals
    assert (
        totals.asleep_s / (totals.asleep_s + totals.polling_s)
        > 1 - 1.3 * (LATE_S + length_s / 20) / length_s
    )


@pytest.mark.parametrize("late_s", [6e-6, 40e-6, 150e-6])
def test_only_waits_much_longer_than_sleeps_are_late_are_slept_in(
    clock: BusyClock, late_s: float
) -> None:
    site = site_of(clock)
    site.owner.sleep.late_s = late_s
    min_s = min(POLICY.worth * late_s, POLICY.long_s)
    for length_s, slept in ((0.9 * min_s, False), (1.5 * min_s, True)):
        for _ in range(40):
            wait(site, clock, length_s)
            site.owner.sleep.late_s = late_s
        assert (site.owner.totals.asleep_s > 0) == slept


def test_how_late_sleeps_are_is_learned(clock: BusyClock) -> None:
    site = site_of(clock)
    site.owner.sleep.late_s = 10e-6  # the machine was quieter when this was measured
    late = [wait(site, clock, 1e-3) for _ in range(120)]
    assert max(late[:20]) > 20e-6
    assert site.owner.sleep.late_s == pytest.approx(LATE_S, abs=4e-6)
    assert max(late[100:]) < 10 * LOOK_S


def test_a_disturbed_start_does_not_end_sleeping_for_good(clock: BusyClock) -> None:
    site = site_of(clock)
    site.owner.sleep.late_s = 5e-3  # something else had the core while sleeps were measured
    for _ in range(600):
        wait(site, clock, 1e-3)
    assert clock.slept
    assert site.owner.sleep.late_s < 0.2e-3


def test_an_outlier_is_forgotten_and_a_change_is_followed(clock: BusyClock) -> None:
    site = site_of(clock)
    for _ in range(20):
        wait(site, clock, 1e-3)
    wait(site, clock, 0.5)
    assert site.prediction.expected_s < 1.2e-3
    for _ in range(60):
        wait(site, clock, 2e-3)
    assert site.prediction.expected_s == pytest.approx(2e-3, rel=0.1)
    late = [wait(site, clock, 0.4e-3) for _ in range(60)]  # how long it was is not seen asleep
    assert max(late[50:]) < 10 * LOOK_S


@pytest.mark.parametrize("first_s", [30e-3, 0.5])
def test_a_slow_first_wait_delays_none_of_the_next(clock: BusyClock, first_s: float) -> None:
    """By more than a piece of a sleep: the first step of a model touches its memory."""
    site = site_of(clock)
    wait(site, clock, first_s)
    late = [wait(site, clock, 20e-3) for _ in range(12)]
    assert max(late) < max(POLICY.max_sleep_s, POLICY.sleep_slice * first_s) + 2 * LATE_S
    assert site.prediction.expected_s == pytest.approx(20e-3, rel=0.1)
    assert max(late[10:]) < POLICY.max_sleep_s


def test_a_piece_of_a_sleep_may_end_long_after_the_whole(clock: BusyClock) -> None:
    site = site_of(clock)
    for _ in range(5):
        wait(site, clock, 5e-3)
    delays = itertools.cycle([LATE_S, 30e-3, LATE_S, 2.5e-3, 0.0])
    clock.late_s = lambda: next(delays)
    late = [wait(site, clock, 5e-3) for _ in range(50)]
    assert max(late) < 35e-3
    clock.late_s = lambda: LATE_S
    late = [wait(site, clock, 5e-3) for _ in range(200)]
    assert max(late[150:]) < LATE_S


@pytest.mark.parametrize("length_s", [0.9e-3, 20e-3, 0.5])
def test_a_long_wait_is_looked_at_a_few_dozen_times(clock: BusyClock, length_s: float) -> None:
    site = site_of(clock)
    for _ in range(5):
        wait(site, clock, length_s)
    clock.slept.clear()
    wait(site, clock, length_s)
    assert 1 <= len(clock.slept) <= 1 + 1 / POLICY.sleep_slice
    assert sum(clock.slept) > 0.9 * (length_s - len(clock.slept) * LATE_S)


def test_each_phase_and_length_predicts_for_itself(clock: BusyClock) -> None:
    site = site_of(clock)
    assert isinstance(site.owner, Synchroniser)
    other = site.owner.wait_point(("prefill", (64,), "o", "qkv"), "gpu", "a kernel")
    assert site.owner.wait_point(("decode", (1,), "o", "qkv"), "gpu", "again") is site
    for _ in range(20):
        wait(site, clock, 1e-3)
        wait(other, clock, 20e-3)
    assert other.prediction.expected_s > 15 * site.prediction.expected_s


def test_a_new_length_begins_with_what_another_takes_at_least(clock: BusyClock) -> None:
    owner = owner_of(clock)

    def prompt(*chunks: int) -> WaitPoint:
        return owner.wait_point(("prefill", chunks, "end", "lm_head"), "gpu", "a kernel")

    first = prompt(64)
    for _ in range(5):
        wait(first, clock, 8e-3)
    assert prompt(32).prediction.expected_s == pytest.approx(4e-3, rel=0.05)
    for _ in range(5):
        wait(prompt(32), clock, 6e-3)
    assert prompt(128).prediction.expected_s == pytest.approx(6e-3, rel=0.05)
    assert prompt(64, 64).prediction.expected_s == 0.0
    clock.slept.clear()
    wait(prompt(16), clock, 3.2e-3)
    assert len(clock.slept) < 8


@pytest.mark.parametrize("length_s", [1e-3, 30e-3, 0.5])
def test_a_device_that_is_not_polled_keeps_its_cores(clock: BusyClock, length_s: float) -> None:
    """Nothing is known of the wait: looks become rarer, and the end is noticed soon after it."""
    site = site_of(clock)
    site.owner.unpolled = frozenset({"gpu"})
    late_s = wait(site, clock, length_s)
    assert len(clock.slept) < 130 + length_s / POLICY.max_sleep_s
    assert late_s < max(POLICY.min_sleep_s, POLICY.sleep_slice * length_s) + 2 * LATE_S


class Preempted(At):
    """The core is lost at the second look."""

    def __init__(self, clock: BusyClock, in_s: float, lost_s: float) -> None:
        super().__init__(clock, in_s)
        self.lost_s, self.looks = lost_s, 0

    def done(self) -> bool:
        self.looks += 1
        if self.looks == 2:
            self.clock.gap_s = self.lost_s
        return super().done()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("lost_s", "times"), [(4e-3, 1), (1e-3, POLICY.contended_gaps)])
def test_a_core_that_others_use_is_not_polled_on(
    clock: BusyClock, lost_s: float, times: int, told: bool
) -> None:
    waits = itertools.count(0.6 * lost_s, 0.6 * lost_s)  # of the scheduler, if it tells
    site = site_of(clock, queued_s=lambda: next(waits) if told else None)
    for _ in range(10):
        wait(site, clock, 0.1e-3)
    before = len(clock.slept)
    for _ in range(times):
        assert site.owner.contention.contended_left == 0
        site.prediction.expected_s = 0.0
        site.wait(Preempted(clock, 8e-3, lost_s))
    assert site.owner.contention.contended_left == POLICY.contended_waits
    assert not site.owner.contention.wait_values_now()
    for _ in range(POLICY.contended_waits):
        wait(site, clock, 0.1e-3)
    assert site.owner.contention.contended_left == 0
    assert len(clock.slept) >= before + POLICY.contended_waits


def test_a_device_on_every_core_is_not_polled(clock: BusyClock) -> None:
    site = site_of(clock)
    site.owner.unpolled.add(site.kind)
    for _ in range(100):
        wait(site, clock, 8e-3)
        assert site.owner.totals.polling_s == 0.0
    before, start_s = len(clock.slept), clock.now_s
    wait(site, clock, 8e-3)
    assert clock.now_s - start_s == pytest.approx(8e-3, abs=3 * LATE_S)
    assert len(clock.slept) - before < 8 + 8  # a look each millisecond, and some at the end


@pytest.mark.parametrize("lost_s", [1e-3, 20e-3])
def test_a_core_that_a_hypervisor_takes_is_polled_on(clock: BusyClock, lost_s: float) -> None:
    waits = itertools.count(1e-4, 0.3 * lost_s)
    owner = owner_of(clock, queued_s=lambda: next(waits))
    for i in range(20):
        owner.contention.preempted(1e-3 * i, lost_s)
        assert owner.contention.contended_left == 0
        assert owner.wait_values_now()


def test_gaps_now_and_then_mean_nothing_where_the_scheduler_does_not_tell(
    clock: BusyClock,
) -> None:
    owner = owner_of(clock, queued_s=lambda: None)
    for i in range(20):
        owner.contention.preempted(i * POLICY.contended_s, 1e-3)
        assert owner.contention.contended_left == 0
        assert owner.wait_values_now()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/thread-self/schedstat")
def test_the_scheduler_tells_what_this_thread_waited_for_others() -> None:
    first = waited_for_core_s()
    assert first is not None
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    cores = os.sched_getaffinity(0)
    try:
        core = min(cores)
        os.sched_setaffinity(0, {core})
        for process in spinning:
            os.sched_setaffinity(process.pid, {core})
        give_up_s = time.perf_counter() + 30
        while (waited_for_core_s() or 0.0) - first < 0.05:
            assert time.perf_counter() < give_up_s
    finally:
        os.sched_setaffinity(0, cores)
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.parametrize("contended_left", [0, 5])
def test_a_wait_past_its_deadline_is_an_error(clock: BusyClock, contended_left: int) -> None:
    site = site_of(clock, deadline_s=0.05)
    site.owner.contention.contended_left = contended_left
    start_s = clock.now_s
    with pytest.raises(WaitTimeoutError, match=r"a kernel \(gpu: reference open\)"):
        wait(site, clock, float("inf"))
    assert clock.now_s - start_s < 0.06


def test_a_trial_gives_up_as_late_as_the_scale_of_time_limits_says(
    clock: BusyClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never(Completion):
        def done(self) -> bool:
            clock.advance(1.0)
            return False

        def wait(self, deadline_s: float = 1.0) -> None:
            raise WaitTimeoutError("reference", "a kernel", deadline_s, "gpu")

    monkeypatch.setenv(time_limits.VARIABLE, "4")
    start_s = clock.now_s
    with pytest.raises(WaitTimeoutError):
        Trials({}, POLICY, clock)._spin(Never())
    assert clock.now_s - start_s == pytest.approx(240, abs=2)


def test_a_step_of_many_tokens_is_waited_for_longer(clock: BusyClock) -> None:
    owner = owner_of(clock, deadline_s=0.05, token_s=0.01)
    long = owner.wait_point(("prefill", (60, 40), "o", "qkv"), "gpu", "a kernel")
    assert wait(long, clock, 0.9) < 0.01
    start_s = clock.now_s
    with pytest.raises(WaitTimeoutError, match=r"not complete after 1\.05 s"):
        wait(long, clock, float("inf"))
    assert 1.05 <= clock.now_s - start_s < 1.1


@pytest.mark.parametrize("contended_left", [0, 5])
def test_a_process_that_was_stopped_has_its_deadline_left(
    clock: BusyClock, contended_left: int
) -> None:
    site = site_of(clock, deadline_s=0.05)
    site.owner.contention.contended_left = contended_left
    end_s = clock.now_s + 70.0

    class Stopped(At):
        def done(self) -> bool:
            if self.clock.now_s < end_s - 1:
                self.clock.gap_s = 69.99
            return super().done()

    assert site.wait(Stopped(clock, 70.0)) >= 0.0
    assert clock.now_s >= end_s


def test_every_field_of_the_policy_is_explained() -> None:
    explained = inspect.cleandoc(WaitPolicy.__doc__ or "")  # Python 3.13 strips indentation itself
    for field in fields(WaitPolicy):
        assert f"\n{field.name} " in explained
