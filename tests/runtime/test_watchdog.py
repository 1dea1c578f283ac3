"""Native calls that do not return are named."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hetero.backends.host.clock import ManualClock
from hetero.backends.reference.device import _Call
from hetero.runtime import watchdog
from hetero.runtime.engine import Engine
from hetero.runtime.watchdog import Watchdog, hung_call
from tests.runtime.models import context_of, tiny_model
from tests.runtime.test_faults import TOKENS, make_engine

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux")
DEADLINE_S = 30


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    with make_engine(tiny_model(tmp_path)) as opened:
        yield opened


def hang(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Thread, Any, str]:
    """A thread whose step is in a call of the NPU that returns when the event is set."""
    inside, let_go, names = threading.Event(), threading.Event(), list[str]()
    run = _Call.run

    def hung(call: _Call) -> None:
        names.append(call.name)
        if len(names) == 4:
            inside.set()
            let_go.wait(DEADLINE_S)
        run(call)

    monkeypatch.setattr(_Call, "run", hung)
    work = threading.Thread(target=lambda: engine.prefill(context_of(engine), TOKENS))
    work.start()
    assert inside.wait(DEADLINE_S)
    give_up_s = time.monotonic() + DEADLINE_S
    while not watchdog._sleeps(work.native_id or 0):
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    return work, let_go, names[-1]


def test_a_call_that_does_not_return_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, let_go, name = hang(engine, monkeypatch)
    now_s = time.perf_counter()
    assert hung_call(engine.runner.executor, now_s) == ""
    sentence = hung_call(engine.runner.executor, now_s + 61)
    assert sentence.startswith(f"the npu has not ended {name} (layer")
    assert "for 60 s" in sentence
    monkeypatch.setenv("HETERO_TIMEOUT_SCALE", "4")
    assert hung_call(engine.runner.executor, now_s + 61) == ""
    assert "for 240 s" in hung_call(engine.runner.executor, now_s + 241)
    let_go.set()
    work.join(DEADLINE_S)
    assert hung_call(engine.runner.executor, now_s + 10_000) == ""


def test_a_call_that_computes_is_waited_for_ten_times_as_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, let_go, name = hang(engine, monkeypatch)
    monkeypatch.setattr(watchdog, "_sleeps", lambda thread: False)
    now_s = time.perf_counter()
    assert hung_call(engine.runner.executor, now_s + 599) == ""
    assert name in hung_call(engine.runner.executor, now_s + 601)
    let_go.set()
    work.join(DEADLINE_S)


def test_a_thread_that_computes_does_not_sleep() -> None:
    assert not watchdog._sleeps(threading.get_native_id())


def test_the_thread_says_it_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "hung_call", lambda executor, now_s: "hung")
    told: list[str] = []
    found = threading.Event()
    watch = Watchdog()
    watch.on_hang = lambda sentence: (told.append(sentence), found.set())
    watch.watch(engine.runner.executor)
    assert found.wait(DEADLINE_S)
    time.sleep(0.1)
    assert told == ["hung"]


def test_virtual_times_are_compared_with_the_clock_they_are_of(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in virtual time began hours ago by the system's clock."""
    seen: list[float] = []
    found = threading.Event()

    def look(_: object, now_s: float) -> str:
        seen.append(now_s)
        found.set()
        return ""

    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "hung_call", look)
    engine.runner.executor.clock = ManualClock(7.0)
    watch = Watchdog()
    watch.watch(engine.runner.executor)
    assert found.wait(DEADLINE_S)
    assert seen[0] == 7.0
