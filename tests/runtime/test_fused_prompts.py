"""Prompts in fused launches: which ones, what they compute, what binding them makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("pyopencl")

from hetero import LLM
from hetero.backends.opencl.calls import OpenCLCall
from hetero.backends.opencl.device import OpenCLDevice
from hetero.profiler.interference import NoInterference, find_interference
from hetero.runtime.cache_calls import CacheCall
from hetero.runtime.fused_prompts import CONTENDED, PAUSE, SHORT, FusedPrompts
from hetero.runtime.program import SUBMIT
from hetero.runtime.step import Step
from hetero.solver.fused_limit import LONGEST_FUSED
from tests.support.checkpoints import CASES, make_checkpoint

LAUNCHES = 10


class Prompt:
    """A step of so many FLOPs for each launch, where a token has one for each launch."""

    def __init__(self, flops: float) -> None:
        self.tokens, self.launches = round(flops), [None] * LAUNCHES


def prompt(flops: float) -> Step:
    return cast("Step", Prompt(flops))


class Waits:
    """Threads that have waited for cores so long, at one look after the other."""

    def __init__(self, looks: list[dict[int, float]]) -> None:
        self._looks = iter(looks)

    def waits_s(self) -> dict[int, float]:
        return next(self._looks)


def policy(*looks: dict[int, float]) -> FusedPrompts:
    return FusedPrompts(LAUNCHES, Waits([*looks]))


def test_long_launches_are_not_fused() -> None:
    fused = policy()
    assert fused.fit(prompt(SHORT))
    assert fused.fit(prompt(LONGEST_FUSED))
    assert not fused.fit(prompt(LONGEST_FUSED * 1.01))


def test_launches_that_are_not_short_pause_while_other_programs_take_cores() -> None:
    middle, wall_s = prompt(2 * SHORT), 0.5
    each = 0.55 * CONTENDED * wall_s  # of two threads
    fused = policy({1: 1.0, 2: 3.0}, {1: 1.0 + each, 2: 3.0 + each}, {1: 2.0}, {1: 2.0, 3: 0.0})
    fused.observe(fused.waits_s(middle), wall_s)
    assert fused.fit(prompt(SHORT))
    assert [fused.fit(middle) for _ in range(PAUSE)] == [False] * PAUSE
    assert fused.fit(middle)
    fused.observe(fused.waits_s(middle), wall_s)
    assert fused.fit(middle)


def test_where_waiting_is_not_known_prompts_are_fused() -> None:
    fused = FusedPrompts(LAUNCHES, NoInterference())
    for _ in range(2):
        fused.observe(fused.waits_s(prompt(2 * SHORT)), 1e-9)
    assert fused.fit(prompt(2 * SHORT))
    assert fused.waits_s(prompt(SHORT)) is None


def test_a_process_waits_for_cores_ever_longer() -> None:
    waits = find_interference()
    first, second = waits.waits_s(), waits.waits_s()
    assert all(second[thread] >= first[thread] >= 0 for thread in first.keys() & second.keys())


def device_that_fuses(llm: LLM) -> OpenCLDevice:
    """Return the GPU; skip the test on one that does not fuse."""
    device = llm.devices.devices["gpu"]
    assert isinstance(device, OpenCLDevice)
    if not device.fuses:
        pytest.skip(f"{device.tuning.family} has no fused launches")
    return device


def submissions(llm: LLM) -> int:
    return sum(action.code == SUBMIT for action in llm.engine.runner.last_step.program)


def kernel_objects(llm: LLM) -> int:
    """Calls of the last step that have kernel objects of the driver."""
    calls = [x.call for x in llm.engine.runner.last_step.launches]
    calls = [x.call if isinstance(x, CacheCall) else x for x in calls]
    return sum(isinstance(x, OpenCLCall) and "_bound" in vars(x) for x in calls)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama-tied", "qwen3.5", "gemma2"])
def test_a_prompt_in_fused_launches_has_the_logits_of_its_calls(tmp_path: Path, name: str) -> None:
    make_checkpoint(next(x for x in CASES if x.name == name), tmp_path)
    with LLM(str(tmp_path), device="gpu", gpu="opencl", max_seq_len=96) as llm:
        device_that_fuses(llm)
        engine, context = llm.engine, llm.context

        def logits(pieces: tuple[int, ...]) -> list[bytes]:
            context.truncate(0)
            rows = [engine.prefill(context, [3 + i % 50 for i in range(m)]) for m in pieces]
            return [row.tobytes() for row in rows]

        for pieces in ((32,), (9, 23), (40, 17, 1, 2)):
            whole = logits(pieces)
            made = submissions(llm)
            llm.engine.runner.start_trace()  # each call for itself
            assert logits(pieces) == whole
            llm.engine.runner.stop_trace()
            if pieces[-1] > 8:
                assert made < submissions(llm) / 3
        logits((21,))
        assert kernel_objects(llm) == 0


@pytest.mark.full
def test_no_program_is_compiled_for_a_prompt(tmp_path: Path, monkeypatch: Any) -> None:
    """But the usual one, at the first start: other prompts run call by call, if need be."""
    make_checkpoint(next(x for x in CASES if x.name == "llama-tied"), tmp_path)
    with LLM(str(tmp_path), device="gpu", gpu="opencl", max_seq_len=64) as llm:
        device = device_that_fuses(llm)
        taken: list[str] = []
        take = device.programs.take

        def noting(source: Any) -> Any:
            taken.append(source.name)
            return take(source)

        monkeypatch.setattr(device.programs, "take", noting)
        for m in (3, 12, 33):
            llm.context.truncate(0)
            llm.engine.prefill(llm.context, [5] * m)
            fused = llm.engine.runner.last_step.program
            assert (sum(x.code == SUBMIT for x in fused) < 5) == (m > 8)
        assert "fused_launch.cl" not in taken
