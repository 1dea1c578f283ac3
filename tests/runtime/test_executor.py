"""The executor's walk: order, waits, accounting, deadlines."""

from __future__ import annotations

import gc

import pytest

from hetero.backends.protocol import BoundCall, Completion
from hetero.runtime.executor import Executor, Step, make_segments

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


def step(log: LOG) -> Step:
    calls = {name: FakeCall(name, log) for name in "abcde"}
    kinds = [("gpu", "a"), ("gpu", "b"), ("npu", "c"), ("npu", "d"), ("gpu", "e")]
    segments = make_segments([(kind, kind == "gpu", calls[name]) for kind, name in kinds])  # type: ignore[misc]
    return Step(1, segments, tuple(calls.values()))


def test_gpu_calls_queue_up_and_are_waited_for_where_devices_meet() -> None:
    log: LOG = []
    executor = Executor(deadline_s=3.0)
    executor.run(step(log))
    assert log == [
        "submit a",
        "submit b",
        "wait b 3.0",
        "run c gc=False",
        "run d gc=False",
        "submit e",
        "wait e 3.0",
    ]
    assert {kind: use.ops for kind, use in executor.usage.items()} == {"gpu": 3, "npu": 2}
    assert all(use.busy_s > 0 for use in executor.usage.values())
    assert gc.isenabled()


def test_the_collector_comes_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    log: LOG = []
    broken = step(log)
    monkeypatch.setattr(FakeCompletion, "wait", lambda *_: (_ for _ in ()).throw(RuntimeError("x")))
    with pytest.raises(RuntimeError, match="x"):
        Executor().run(broken)
    assert gc.isenabled()
