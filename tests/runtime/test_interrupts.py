"""Exceptions of Python signal handlers, at any moment of an answer: the next answers are right."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from hetero import LLM, UserError
from tests.support.interrupts import (
    Interrupt,
    Place,
    deadline,
    handler,
    in_thread,
    interrupted,
    places,
)
from tests.support.selection import exhaustive

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals of POSIX"),
    # Python drops what a handler raises in a finaliser, with a warning.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
# What takes locks, holds, cores and the collector; the gate tries every instruction of these.
CRITICAL = (
    "background.py",
    "context.py",
    "contextlib.py",
    "executor.py",
    "own_contexts.py",
    "control.py",
    "affinity.py",
    "timers.py",
)
OTHERS = 60  # instructions of other files that the gate tries
LIMIT_S = 30
FULL, EXHAUSTIVE = pytest.mark.full, pytest.mark.exhaustive


@pytest.fixture(
    scope="module", params=[pytest.param(x, marks=FULL) for x in ("gpu", "npu")] + ["hetero"]
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param != "npu" and importlib.util.find_spec("pyopencl") is None:
        pytest.skip("no OpenCL here")
    with LLM("demo", device=request.param, adapt=False) as opened:
        yield opened


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    with handler():
        yield


def chosen(found: list[Place]) -> list[Place]:
    """Those of the critical files, and some of the others; or all."""
    first = [x for x in found if os.path.basename(x[0].co_filename) in CRITICAL]
    others = [x for x in found if x not in set(first)]
    return found if exhaustive() else first + random.Random(1).sample(others, OTHERS)


def asks(llm: LLM) -> dict[str, Any]:
    """Calls by name: on the model's own context, with guesses, on a fork."""
    context = llm.new_context()

    def on_a_fork() -> str:
        with context.fork() as fork:
            return llm.generate("Once upon a", max_tokens=2, context=fork).text

    return {
        "own": lambda: llm.generate("Once upon a", max_tokens=2).text,
        "guesses": lambda: llm.generate("Once upon a", max_tokens=4, speculative=3).text,
        "context": lambda: llm.generate("One", max_tokens=2, context=context, reuse=True).text,
        "fork": on_a_fork,
    }


def check_state(llm: LLM, cores: set[int]) -> None:
    """Nothing is left that a call took."""
    assert gc.isenabled()
    assert cores == os.sched_getaffinity(0)
    assert all(context.user is None for context in llm.engine.contexts.open_contexts())


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "own",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("guesses", "context", "fork")),
    ],
)
def test_a_signal_at_any_instruction(llm: LLM, name: str) -> None:
    ask = asks(llm)[name]
    wanted, cores = [ask() for _ in range(3)][-1], os.sched_getaffinity(0)  # all is compiled
    raised = 0
    tried = chosen(places(ask))
    for number, place in enumerate(tried):
        with deadline(LIMIT_S):
            error = interrupted(ask, place)  # kept while others ask
            raised += error is not None
            check_state(llm, cores)
            assert ask() == wanted, place
            if number % 10 == 0:
                assert in_thread(ask, LIMIT_S) == wanted, place
    assert raised > 0.8 * len(tried)  # else the signals came where nothing could raise


@pytest.mark.full
def test_signals_at_any_moment(llm: LLM) -> None:
    """With `--exhaustive` there are 2000.."""
    ask = partial(llm.generate, "Once upon a time", max_tokens=12)
    wanted, cores, moments = ask().tokens, os.sched_getaffinity(0), random.Random(7)
    took_s = ask().stats.ttft_s + 12 / ask().stats.decode_tokens_per_s

    def late(*_: object) -> None:
        raise Interrupt

    before, raised = signal.signal(signal.SIGALRM, late), 0
    try:
        for number in range(2000 if exhaustive() else 40):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, took_s))
                ask()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                raised += 1
            with deadline(LIMIT_S):
                check_state(llm, cores)
                assert ask().tokens == wanted, number
                if number % 10 == 0:
                    assert in_thread(ask, LIMIT_S).tokens == wanted, number
            signal.signal(signal.SIGALRM, late)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised > 0


def test_a_handler_that_asks_in_the_middle_of_a_step_is_refused(llm: LLM) -> None:
    """It would overwrite the activations of the step that it interrupted."""
    said: list[str] = []

    def ask(*_: object) -> None:
        with pytest.raises(UserError, match="in the middle of a step") as error:
            llm.generate("Two", max_tokens=1)
        said.append(str(error.value))

    wanted = llm.generate("One", max_tokens=3).text
    before = signal.signal(signal.SIGUSR1, ask)
    try:
        with llm.engine.lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert said
    assert llm.generate("One", max_tokens=3).text == wanted
