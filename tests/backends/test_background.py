"""Calls in other threads, and waits for them that a signal handler's exception does not break."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from hetero.backends.host.background import Background, Latch, in_background
from tests.support.interrupts import deadline, handler, in_thread, interrupted, places

LIMIT_S = 20


def test_calls_are_made_in_order_and_their_errors_raised() -> None:
    made: list[int] = []

    def call(number: int) -> int:
        made.append(number)
        return 6 // number

    jobs = in_background("test", [partial(call, number) for number in (3, 0, 2)])
    assert jobs[2].result() == 3
    assert jobs[0].result() == 2
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            jobs[1].result()
    assert made == [3, 0, 2]
    assert in_background("test", []) == []


def test_what_is_cancelled_before_it_begins_is_not_made() -> None:
    let_go, made = threading.Event(), list[int]()
    first, second = in_background("test", [partial(let_go.wait, LIMIT_S), partial(made.append, 1)])
    second.cancel()
    let_go.set()
    assert first.result()
    assert second.wait(LIMIT_S)
    assert made == []


def test_a_latch_opens_for_all_and_for_good() -> None:
    latch, passed = Latch(), list[bool]()
    assert not latch.wait(0.01)
    threads = [threading.Thread(target=lambda: passed.append(latch.wait())) for _ in range(8)]
    threads += [threading.Thread(target=lambda: passed.append(latch.wait(9))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for opened in range(2):
        latch.open()
        assert latch.wait(0.0), opened
    for thread in threads:
        thread.join(LIMIT_S)
    assert passed == [True] * 16


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("limit_s", [float("inf"), 5])
def test_an_interrupted_wait_blocks_no_other_thread(limit_s: float) -> None:
    def slow() -> Background[str]:
        return in_background("test", [lambda: (time.sleep(0.01), "done")[1]])[0]

    def ask(job: Background[str]) -> str:
        job.wait(limit_s)
        return job.result()

    with handler():
        for place in places(partial(ask, slow())):
            with deadline(LIMIT_S):
                job = slow()
                interrupted(partial(ask, job), place)
                assert in_thread(job.result, LIMIT_S) == job.result() == "done", place


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    code = f"""
import os, threading, warnings
from hetero.backends.errors import DeviceLostError
from hetero.backends.host.background import in_background
warnings.simplefilter("ignore")
let_go = threading.Event()
running, waiting = in_background("test", [lambda: let_go.wait({LIMIT_S}), lambda: 1])
pid = os.fork()
if pid == 0:
    for job in (running, waiting):
        assert job.wait(0)
        try:
            job.result()
        except DeviceLostError as error:
            assert "before this process was forked" in str(error)
        else:
            os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
let_go.set()
assert running.result() and waiting.result() == 1
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=LIMIT_S)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_a_thread_that_calls_a_driver() -> None:
    code = f"""
import os, threading, time, warnings
from hetero.backends.host import forks
warnings.simplefilter("ignore")
begun, left = threading.Event(), []
def call():
    with forks.forbidden():
        begun.set()
        time.sleep(0.3)
        left.append(1)
threading.Thread(target=call).start()
begun.wait({LIMIT_S})
pid = os.fork()
if pid == 0:
    with forks.forbidden():
        os._exit(0 if left else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
with forks.forbidden():
    pass
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=LIMIT_S)
