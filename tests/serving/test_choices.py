"""Several choices of one request: each is what it is alone, and one step computes them together."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero import Service
from hetero.runtime.engine import Engine
from hetero.serving.engine_process import ServingEngine
from hetero.serving.messages import (
    Cancel,
    Done,
    EmbedRequest,
    ErrorReply,
    GenerateRequest,
    TokenEvent,
)
from hetero.serving.request_choices import RequestChoices
from tests.support.selection import examples

PROMPT = [300, *range(100, 140)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("choices")
    with Service("demo", directory=folder, device="npu", kv="f32", parallel=4) as opened:
        opened.warm()
        yield opened


def answered(
    service: Service,
    *requests: Any,
    after: Sequence[Any] = (),
    counts: list[dict[str, int]] | None = None,
) -> list[Any]:
    """What is sent until all is answered; `after` arrive once a token is sent. `counts` gets how
    many run and wait, for each message.
    """
    incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sent: list[Any] = []
    later = list(after)

    def send(message: Any) -> None:
        sent.append(message)
        if counts is not None:
            counts.append(engine.counts)
        while later and isinstance(message, TokenEvent):
            incoming.put(later.pop(0))

    engine = ServingEngine(service, incoming, send)
    read = engine._read

    def until_idle(*, wait: bool) -> None:
        if wait and incoming.empty():
            incoming.put(None)
        read(wait=wait)

    engine._read = until_idle  # type: ignore[method-assign]
    for request in requests:
        incoming.put(request)
    engine.run()
    assert not engine.running
    assert not any(slot.busy for slot in service._slots)
    return sent


def request(number: int = 0, choices: int = 1, **options: Any) -> GenerateRequest:
    given_ = {"temperature": 1.0, "max_tokens": 12, "logit_bias": {"1": -100}} | options
    return GenerateRequest(id=number, app="a", tokens=PROMPT, options=given_, choices=choices)


def texts(sent: Sequence[Any], number: int = 0) -> list[str]:
    by_choice: dict[int, str] = {}
    for event in sent:
        if isinstance(event, TokenEvent) and event.id == number:
            by_choice[event.choice] = by_choice.get(event.choice, "") + event.text
    return [by_choice[choice] for choice in sorted(by_choice)]


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4, 6])
def test_choices_are_what_they_are_alone(
    service: Service, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more choices than slots, too: the others begin as slots become free."""
    expected = [texts(answered(service, request(seed=7 + i)))[0] for i in range(count)]
    assert len(set(expected)) == count
    steps = Counter[int]()
    together, alone = Engine.decode_rows, Engine.decode

    def decode_rows(self: Engine, rows: Any, *rest: Any) -> Any:
        steps[len(rows)] += 1
        return together(self, rows, *rest)

    def decode(self: Engine, *rest: Any) -> Any:
        steps[1] += 1
        return alone(self, *rest)

    monkeypatch.setattr(Engine, "decode_rows", decode_rows)
    monkeypatch.setattr(Engine, "decode", decode)
    sent = answered(service, request(choices=count, seed=7))
    assert texts(sent) == expected
    assert steps[min(count, 4)] == 11
    assert sum(rows * number for rows, number in steps.items()) == 11 * count
    (end,) = (x for x in sent if isinstance(x, Done))
    assert sent[-1] is end
    assert end.usage["completion_tokens"] == 12 * count
    assert end.usage["prompt_tokens"] == len(PROMPT)
    assert len(end.stops) == count


def test_each_choice_has_its_own_grammar_stops_and_limit(service: Service) -> None:
    grammar = "%llguidance {}\nstart: /[a-z ]{20,24}/"
    asked = GenerateRequest(
        id=0, app="a", tokens=PROMPT, choices=3, grammar=grammar,
        options={"temperature": 1.0, "seed": 3, "max_tokens": 60},
    )  # fmt: skip
    sent = answered(service, asked)
    for text in texts(sent):
        assert 20 <= len(text) <= 24
        assert text == text.lower()
    assert len(set(texts(sent))) == 3
    sent = answered(service, request(choices=3, seed=1, max_tokens=1))
    assert [x.finish for x in sent if isinstance(x, TokenEvent)] == ["length"] * 3


def test_the_time_in_the_queue_is_measured(service: Service) -> None:
    """Five requests for four slots: the last one waits until another has ended."""
    sent = answered(service, *(request(i, max_tokens=8) for i in range(5)), counts=(counts := []))
    assert counts[0] == {"running": 1, "waiting": 4}
    assert {"running": 4, "waiting": 1} in counts
    assert counts[-1] == {"running": 1, "waiting": 0}
    waited = {x.id: x.about["queued_s"] for x in sent if isinstance(x, Done)}
    assert waited.keys() == set(range(5))
    others = max(waited[i] for i in range(4))
    assert waited[4] > others >= 0
    (embedded,) = answered(service, EmbedRequest(id=9, app="a", texts=[[5]], pooling="last"))
    assert 0 <= embedded.queued_s < 5


def test_a_cancelled_request_ends_all_its_choices(service: Service) -> None:
    sent = answered(service, request(choices=4, max_tokens=200, seed=1), after=[Cancel(id=0)])
    assert not any(isinstance(x, Done) for x in sent)
    assert len(sent) < 20


def test_an_error_of_one_choice_ends_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = ServingEngine._another

    def failing(self: ServingEngine, choices: RequestChoices, choice: int) -> Any:
        if choice == 2:
            yield from ()
            raise ValueError("this choice fails")
        yield from another(self, choices, choice)

    monkeypatch.setattr(ServingEngine, "_another", failing)
    sent = answered(service, request(choices=4, max_tokens=50), request(1, max_tokens=5))
    (error,) = (x for x in sent if isinstance(x, ErrorReply))
    assert (error.id, error.kind) == (0, "engine")
    assert not any(isinstance(x, TokenEvent) and x.id == 0 for x in sent[sent.index(error) :])
    assert isinstance(sent[-1], Done)
    assert sent[-1].id == 1


@pytest.mark.hypothesis
@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4))
def test_requests_of_any_sizes_are_answered_whole(
    service: Service, asked: list[tuple[int, int]]
) -> None:
    sent = answered(
        service,
        *(request(i, choices=n, max_tokens=most, seed=i) for i, (n, most) in enumerate(asked)),
        EmbedRequest(id=99, app="a", texts=[[5, 6], [7]], pooling="last"),
    )
    for i, (n, most) in enumerate(asked):
        events = [x for x in sent if isinstance(x, TokenEvent) and x.id == i]
        assert Counter(x.choice for x in events) == dict.fromkeys(range(n), most)
    assert sorted(x.id for x in sent if isinstance(x, Done)) == list(range(len(asked)))
    (embedded,) = (x for x in sent if x.id == 99)
    assert len(embedded.embeddings) == 2
