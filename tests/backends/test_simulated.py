"""The simulated chip: exact numbers on a virtual clock."""

from __future__ import annotations

import pytest

from hetero.backends.simulated.chip import ChipTimes, Load, Rendering, SimulatedChip


def test_launches_of_a_queue_follow_each_other() -> None:
    chip = SimulatedChip()
    first, second = chip.submit("gpu", "a", Load(2.0)), chip.submit("gpu", "b", Load(3.0))
    chip.finish(second)
    assert (first.start_s, first.end_s, second.start_s, second.end_s) == (0.0, 2.0, 2.0, 5.0)
    assert chip.clock.now() == 5.0


def test_both_processors_work_at_once() -> None:
    chip = SimulatedChip()
    gpu = chip.submit("gpu", "a", Load(3.0))
    chip.run("npu", "b", Load(2.0))
    assert chip.clock.now() == 2.0
    chip.finish(gpu)
    assert chip.clock.now() == 3.0


def test_they_slow_each_other_down_while_both_work() -> None:
    chip = SimulatedChip(ChipTimes(gpu_slowdown=2.0, npu_slowdown=1.5))
    gpu = chip.submit("gpu", "a", Load(3.0))
    npu = chip.run("npu", "b", Load(2.0))
    assert npu.end_s == 3.0  # 2 × 1.5; the GPU did 1.5 of its 3 in that time
    chip.finish(gpu)
    assert gpu.end_s == pytest.approx(4.5)


def test_a_dry_queue_starts_late_and_a_busy_one_costs_the_host() -> None:
    chip = SimulatedChip(ChipTimes(submit_busy_s=0.1, submit_empty_s=0.5))
    first = chip.submit("gpu", "a", Load(1.0))
    assert chip.clock.now() == 0.0
    second = chip.submit("gpu", "b", Load(1.0))
    assert chip.clock.now() == pytest.approx(0.1)
    chip.finish(second)
    assert first.start_s == 0.5
    assert second.end_s == pytest.approx(2.5)


def test_a_deadline_ends_the_wait() -> None:
    chip = SimulatedChip()
    job = chip.submit("gpu", "a", Load(9.0))
    assert not chip.finish(job, deadline_s=2.0)
    assert chip.clock.now() == 2.0
    assert chip.finish(job)
    assert chip.clock.now() == 9.0


def test_a_gpu_that_was_idle_starts_later_the_longer_it_was() -> None:
    chip = SimulatedChip(ChipTimes(submit_empty_s=0.5, idle_gap_s=(1.0,), idle_slower_s=(0.2,)))
    first = chip.run("gpu", "a", Load(1.0))
    chip.clock.sleep(0.5)
    second = chip.run("gpu", "b", Load(1.0))
    chip.clock.sleep(9.0)
    third = chip.run("gpu", "c", Load(1.0))
    ends = (first.end_s, second.end_s, third.end_s)
    assert ends == pytest.approx((1.5, 1.5 + 0.5 + 0.6 + 1.0, 3.6 + 9.0 + 0.7 + 1.0))


def test_memory_gives_both_no_more_than_its_bandwidth() -> None:
    chip = SimulatedChip(ChipTimes(bytes_per_s=60.0))
    gpu = chip.submit("gpu", "a", Load(2.0, 80.0))  # 40 bytes a second, and the NPU's 35
    npu = chip.run("npu", "b", Load(1.0, 35.0))
    assert npu.end_s == pytest.approx(75 / 60)
    chip.finish(gpu)
    assert gpu.end_s == pytest.approx(75 / 60 + 1.0)


def test_a_polling_host_sees_the_end_a_moment_later() -> None:
    chip = SimulatedChip(ChipTimes(wait_s=5e-6))
    job = chip.submit("gpu", "a", Load(1e-3))
    assert not chip.poll(job)
    assert chip.clock.now() == 0.0
    while not chip.poll(job):
        pass
    assert chip.clock.now() == pytest.approx(1e-3 + 5e-6)


def test_frames_are_drawn_once_a_period_on_an_idle_gpu() -> None:
    chip = SimulatedChip(rendering=Rendering(period_s=10.0, busy_s=4.0))
    chip.clock.sleep(35.0)
    chip.advance()
    assert [(x.ready_s, x.end_s) for x in chip.frames[:3]] == [(0, 4), (10, 14), (20, 24)]
    assert [x.ready_s for x in chip.frames[3:]] == [30]
    assert chip.finished["gpu"] == []  # which are the model's


def test_a_frame_waits_for_what_was_submitted_before_and_a_late_one_skips_periods() -> None:
    chip = SimulatedChip(rendering=Rendering(period_s=10.0, busy_s=4.0))
    chip.clock.sleep(5.0)
    jobs = [chip.submit("gpu", "a", Load(9.0)) for _ in range(3)]
    chip.finish(jobs[-1])
    chip.clock.sleep(20.0)
    chip.advance()
    first, late, after = chip.frames[:3]
    assert (first.end_s, jobs[-1].end_s) == (4.0, 32.0)
    assert (late.ready_s, late.start_s, late.end_s) == (10.0, 32.0, 36.0)
    assert after.ready_s == 40.0


def test_launches_wait_for_a_frame_and_the_host_does_not() -> None:
    """Another process's frames are not waited for when a queue is finished."""
    chip = SimulatedChip(rendering=Rendering(period_s=10.0, busy_s=6.0))
    chip.clock.sleep(1.0)
    job = chip.submit("gpu", "a", Load(3.0))
    chip.finish(job)
    assert (job.start_s, job.end_s) == (6.0, 9.0)
    chip.clock.sleep(2.0)
    chip.finish_queue("gpu")
    assert chip.clock.now() == 11.0
