"""Exceptions of Python signal handlers, at any moment of a service's call: its books are right."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetero import LLM, Service
from hetero.backends.host.signals import whole
from hetero.contexts.service import App, AppContext
from tests.contexts.test_service import evicted, opened
from tests.support.interrupts import Interrupt, deadline, handler, in_thread, interrupted, places
from tests.support.selection import exhaustive

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals of POSIX"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TRIED = 120  # instructions, by the gate
LIMIT_S = 30
OPTIONS: dict[str, Any] = {"max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def service(tmp_path_factory: Any) -> Iterator[Service]:
    with LLM("demo", device="npu") as llm:
        folder = tmp_path_factory.mktemp("contexts")
        with opened(llm, folder, context_memory="1MiB", contexts_per_app=8) as found:
            yield found


def asks(service: Service, app: App, base: AppContext) -> Callable[[], str]:
    """A call of a fork, whose keys and values come from the disk and from the text in turn."""
    turns = itertools.count()

    def ask() -> str:
        whole(evicted)(service, disk=next(turns) % 2 == 0)
        fork = base.fork()
        text = fork.call(" The fox saw", **OPTIONS).text
        fork.delete()
        return text

    return ask


def check_books(service: Service, workspace: int) -> None:
    """Every byte that is in use is somebody's, in memory and on the disk."""
    service.swap.drain()
    service.memory.check()
    table = list(service.memory.table)
    assert not any(chunk.pins for chunk in table)
    held = sum(chunk.codes.nbytes for chunk in table if chunk.codes is not None)
    assert service.memory.budget.used == held + workspace
    files = [x for x in service._directory.path.rglob("*") if x.suffix in (".kv", ".log")]
    assert service.disk.used == sum(path.stat().st_size for path in files)


@pytest.mark.full
def test_a_signal_at_any_instruction(service: Service) -> None:
    workspace = service.memory.budget.used
    app = service.bind("a")
    base = app.new_context(chat=False)
    base.call("Once upon a time there was a fox", **OPTIONS)
    ask = asks(service, app, base)
    wanted, found = ask(), places(ask)
    raised = 0
    tried = found if exhaustive() else random.Random(2).sample(found, TRIED)
    with handler():
        for number, place in enumerate(tried):
            with deadline(LIMIT_S):
                raised += interrupted(ask, place) is not None
                for context in app.contexts():
                    if context is not base:
                        context.delete()
                check_books(service, workspace)
                assert ask() == wanted, place
                if number % 10 == 0:
                    assert in_thread(ask, LIMIT_S) == wanted, place
    assert raised > len(tried) / 3  # some instructions are of one turn in two


def test_a_signal_ends_the_wait_for_another_threads_call(service: Service) -> None:
    app = service.bind("b")
    contexts = [app.new_context(chat=False) for _ in range(2)]
    stream = in_thread(lambda: _begun(contexts[0]), LIMIT_S)
    before = signal.signal(signal.SIGUSR1, _raise)
    try:
        with deadline(LIMIT_S):
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(Interrupt):
                contexts[1].call("Two", **OPTIONS)
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    in_thread(stream.close, LIMIT_S)
    assert contexts[1].call("Two", **OPTIONS).tokens


def _begun(context: AppContext) -> Any:
    stream = context.stream("One", max_tokens=5)
    next(stream)
    return stream


def _raise(*_: object) -> None:
    raise Interrupt
