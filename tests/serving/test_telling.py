"""When the engine tells what came: a first token before anything else, several together later."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.generation.loop import PENDING
from hetero.serving import engine_process
from hetero.serving.engine_process import ServingEngine
from hetero.serving.messages import Done, EmbedRequest, GenerateRequest, TokenEvent
from hetero.serving.request_choices import RequestChoices


class Scripted(ServingEngine):
    """Reads a prompt in two calls, then says five tokens."""

    def _messages(self, choices: RequestChoices) -> Generator[Any]:
        ask = choices.request
        self.service.log.append(f"prompt of {ask.id}")  # type: ignore[attr-defined]
        yield None
        for token in range(5):
            yield TokenEvent(id=ask.id, choice=0, text="x", token=token)
        yield Done(id=ask.id, usage={}, about={})

    def _can_begin(self, ask: GenerateRequest | EmbedRequest) -> bool:
        return True


def run(
    clock_s: float,
    monkeypatch: pytest.MonkeyPatch,
    second: int = 0,
    kind: type[Scripted] = Scripted,
) -> list[str]:
    """What happened in order, where a step of the devices takes so long; another answer is asked
    for in step `second`.
    """
    log: list[str] = []
    now = [0.0]
    pending: list[str] = []

    def decode(beside: Callable[[], None]) -> None:
        now[0] += clock_s
        log.append("step")
        beside()
        if log.count("step") == second:
            incoming.put(GenerateRequest(id=1, app="a", tokens=[1], options={}))

    def send(message: Any) -> None:
        pending.append(str(message.token) if isinstance(message, TokenEvent) else "end")

    def flush() -> None:
        if pending:
            log.append("told " + " ".join(pending))
            pending.clear()

    monkeypatch.setattr(engine_process.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(engine_process, "FLUSH_INTERVAL_S", 0.003)
    model = SimpleNamespace(eos_ids=())
    service: Any = SimpleNamespace(
        llm=SimpleNamespace(model=model), decode_together=decode, log=log, bound=lambda _: None
    )
    incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
    incoming.put(GenerateRequest(id=0, app="a", tokens=[1], options={}))
    engine = kind(service, incoming, send, flush)
    read = engine._read

    def until_idle(*, wait: bool) -> None:
        if wait and incoming.empty():
            incoming.put(None)
        read(wait=wait)

    monkeypatch.setattr(engine, "_read", until_idle)
    engine.run()
    return log


def test_quick_tokens_are_told_together_and_the_first_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(0.001, monkeypatch) == [
        "prompt of 0",
        "step",
        "told 0",
        "step",
        "step",
        "step",
        "told 1 2",
        "step",
        "step",
        "told 3 4 end",
        "step",
    ]


class Ahead(Scripted):
    """Says a token after it was chosen, all but the first."""

    def _messages(self, choices: RequestChoices) -> Generator[Any]:
        for message in super()._messages(choices):
            if isinstance(message, TokenEvent) and message.token:
                yield PENDING
            yield message


def test_what_comes_later_is_told_beside_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    log = run(0.02, monkeypatch, kind=Ahead)
    assert log[:8] == [
        "prompt of 0",
        "step",
        "told 0",
        "step",
        "step",
        "told 1",
        "step",
        "told 2",
    ]
    assert log[-4:] == ["step", "told 4", "told end", "step"]


def test_slow_tokens_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [line for line in run(0.02, monkeypatch) if line.startswith("told")]
    assert told == ["told 0", "told 1", "told 2", "told 3", "told 4", "told end"]


def test_nothing_waits_for_the_prompt_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    log = run(0.001, monkeypatch, second=3)
    assert log[:8] == [
        "prompt of 0",
        "step",
        "told 0",
        "step",
        "step",
        "told 1 2",  # though they are quick
        "prompt of 1",
        "step",
    ]
