"""Deltas that are sent together are what each of them would be alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.serving import anthropic, chat_completions, completions, responses
from hetero.serving.answers import AnswerChoice, AnswerOptions, StreamWriter
from hetero.serving.messages import Done, FromEngine, Outbox, Run, TokenEvent, decode
from hetero.serving.tools import ToolUse

STATE: Any = SimpleNamespace(model=SimpleNamespace(tokenizer=None))
HEAD = {"id": "x", "created": 1, "model": 'a "name"\0'}
TEXTS = st.lists(st.text(max_size=5), min_size=1, max_size=8)
TOOL = {"name": "go"}


def writer_of(kind: str, *, usage: bool, tools: bool) -> StreamWriter:
    use = ToolUse((TOOL,)) if tools else ToolUse()
    options: dict[str, Any] = {"stream": True}
    if usage:
        options["stream_options"] = {"include_usage": True}
    if kind == "chat":
        asked = chat_completions.ChatRequest(messages=[{}], n=2, **options)
        return chat_completions._Writer(STATE, asked, use, HEAD)
    if kind == "completions":
        body = completions.CompletionRequest(n=2, **options)
        return completions._Writer(STATE, body, AnswerOptions(tokens=[1], options={}), HEAD)
    if kind == "anthropic":
        return anthropic._Writer(use, HEAD, 3)
    wanted = responses.ResponseRequest(input="x")
    begun, given_ = responses._begun(wanted, "m"), AnswerOptions(tokens=[1], options={})
    turn = responses._Turn(begun, use, [], [], given_, logprobs=False)
    return responses._Writer(STATE, "app", wanted, turn)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["chat", "completions", "anthropic", "responses"])
@given(TEXTS, TEXTS, st.booleans(), st.booleans())
def test_events_of_a_run_are_those_of_its_pieces(
    kind: str, first: list[str], second: list[str], usage: bool, tools: bool
) -> None:
    one, other = (writer_of(kind, usage=usage, tools=tools) for _ in range(2))
    if kind == "responses":
        other._at = one._at  # type: ignore[attr-defined]  # a drawn name
    second_choice = 1 if kind in ("chat", "completions") else 0
    for choice, texts in ((0, first), (second_choice, second)):
        tokens = list(range(len(texts)))
        run = b"".join(one.run(Run(id=1, choice=choice, texts=texts, tokens=tokens)))
        pieces = [TokenEvent(id=1, choice=choice, text=x, token=i) for i, x in enumerate(texts)]
        assert run.count(b"data: ") == (0 if tools and kind != "completions" else _told(texts))
        if kind == "responses":
            name = one._at["item_id"].encode()  # type: ignore[attr-defined]
            assert run.count(name) == run.count(b"data: ")
        assert run == b"".join(line for piece in pieces for line in other.token(piece))


def _told(texts: list[str]) -> int:
    return sum(1 for text in texts if text)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("pppelf"), st.integers(0, 1))))
def test_what_is_told_of_an_answer_stays_in_order(
    told: list[tuple[int, str, int]],
) -> None:
    lines = list[bytes]()
    outbox, sent = Outbox(lines.append), list[FromEngine]()
    for token, (number, kind, choice) in enumerate(told):
        if kind == "f":
            outbox.flush()
            continue
        message: FromEngine = Done(id=number, usage={}, about={"at": token})
        if kind != "e":
            logprob = [-0.5, []] if kind == "l" else None
            message = TokenEvent(
                id=number, choice=choice, text=f"{token} ", token=token, logprob=logprob
            )
        outbox.send(message)
        sent.append(message)
    outbox.flush()
    found = list[FromEngine]()
    for event in map(decode, b"".join(lines).splitlines()):
        if not isinstance(event, Run):
            found.append(event)
            continue
        for text, token in zip(event.texts, event.tokens, strict=True):
            found.append(TokenEvent(id=event.id, choice=event.choice, text=text, token=token))
    for number in range(3):
        assert [x for x in found if x.id == number] == [x for x in sent if x.id == number]  # type: ignore[union-attr]


def test_a_choice_is_the_same_however_it_was_told() -> None:
    one, other = AnswerChoice(), AnswerChoice()
    one.add(Run(id=1, choice=0, texts=["a", "", "b"], tokens=[1, 2, 3]))
    for token, text in enumerate(["a", "", "b"], 1):
        other.add(TokenEvent(id=1, choice=0, text=text, token=token))
    assert one == other
    assert one.text == "ab"
