"""The executor's walk: order, accounting, the garbage collector."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from hetero.backends.protocol import KINDS, BoundCall, Completion, DeviceKind
from hetero.runtime.executor import Executor
from hetero.runtime.program import RUN, SUBMIT, WAIT, Action, Launch
from hetero.runtime.step import Step

LOG = list[str]


class FakeCompletion(Completion):
    def __init__(self, name: str, log: LOG) -> None:
        self.name, self.log = name, log

    def done(self) -> bool:
        return True

    def wait(self, deadline_s: float = 1.0) -> None:
        self.log.append(f"wait {self.name} {deadline_s}")


class FakeCall(BoundCall):
    def __init__(self, name: str, log: LOG) -> None:
        self.name, self.log, self.m = name, log, 1

    def run(self) -> None:
        self.log.append(f"run {self.name} gc={gc.isenabled()}")

    def submit(self) -> Completion:
        self.log.append(f"submit {self.name}")
        return FakeCompletion(self.name, self.log)


def make_step(log: LOG) -> Step:
    """GPU a, b; the NPU's c waits for a while b runs; then GPU d."""
    kinds: list[tuple[DeviceKind, str]] = [("gpu", "a"), ("gpu", "b"), ("npu", "c"), ("gpu", "d")]
    launches = [Launch(name, kind, FakeCall(name, log), (0, 1), None) for kind, name in kinds]

    def action(code: int, index: int) -> Action:
        call = launches[index].call

        def wait(completion: Completion) -> float:
            completion.wait(3.0)
            return 0.0

        target = {SUBMIT: call.submit, RUN: call.run, WAIT: wait}[code]
        return Action(code, index, KINDS.index(launches[index].kind), target)  # type: ignore[arg-type]

    order = [(SUBMIT, 0), (SUBMIT, 1), (WAIT, 0), (RUN, 2), (SUBMIT, 3), (WAIT, 3)]
    return Step(
        "decode",
        1,
        tuple(action(*pair) for pair in order),
        tuple(launches),
        (),
        None,
        counts={"gpu": 3, "npu": 1},
        completions=[None] * 4,
    )


def test_actions_run_in_order_without_the_collector() -> None:
    log: LOG = []
    run = Executor().run(make_step(log))
    assert log == [
        "submit a", "submit b", "wait a 3.0", "run c gc=False", "submit d", "wait d 3.0",
    ]  # fmt: skip
    assert {kind: use.ops for kind, use in run.usage.items()} == {"gpu": 3, "npu": 1}
    assert all(use.busy_s > 0 for use in run.usage.values())
    assert len(run.stamps) == 7
    assert run.stamps == sorted(run.stamps)
    assert gc.isenabled()


def test_what_is_done_beside_begins_before_the_last_wait() -> None:
    log: LOG = []
    Executor().run(make_step(log), lambda: log.append("beside"))
    assert log[-3:] == ["submit d", "beside", "wait d 3.0"]
    assert log.count("beside") == 1


def test_a_third_kind_of_device_joins_by_its_name() -> None:
    log: LOG = []
    step, executor = make_step(log), Executor()
    third: Any = "cpu"
    step.kinds = (*step.kinds, third)
    call = FakeCall("e", log)
    step.launches = (*step.launches, Launch("e", third, call, (0, 1), None))
    step.program = (*step.program, Action(RUN, 4, step.kinds.index(third), call.run))
    step.counts = {**step.counts, third: 1}
    step.completions.append(None)
    run = executor.run(step)
    assert log[-1] == "run e gc=False"
    assert run.usage[third].ops == 1
    assert run.usage[third].busy_s == pytest.approx(run.stamps[7] - run.stamps[6])


def test_the_gpu_is_busy_until_its_last_submission_is_seen_complete() -> None:
    log: LOG = []
    run = Executor().run(make_step(log))
    stamps = run.stamps
    assert run.usage["gpu"].busy_s == pytest.approx(stamps[6] - stamps[0])
    assert run.usage["npu"].busy_s == pytest.approx(stamps[4] - stamps[3])


def test_the_collector_comes_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    log: LOG = []
    broken = make_step(log)
    monkeypatch.setattr(FakeCall, "run", lambda _: (_ for _ in ()).throw(RuntimeError("x")))
    broken = make_step(log)
    with pytest.raises(RuntimeError, match="x"):
        Executor().run(broken)
    assert gc.isenabled()
