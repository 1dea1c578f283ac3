"""Deltas that are sent together are what each of them would be alone."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.serving import anthropic, chat_completions, completions, responses
from hetero.serving.answer_parser import AnswerForm, AnswerParser
from hetero.serving.answers import AnswerChoice, AnswerOptions, StreamWriter
from hetero.serving.messages import Done, FromEngine, Outbox, Run, TokenEvent, decode
from hetero.serving.tools import ToolUse

STATE: Any = SimpleNamespace(model=SimpleNamespace(tokenizer=None))
HEAD = {"id": "x", "created": 1, "model": 'a "name"\0'}
TEXTS = st.lists(st.text(max_size=5), min_size=1, max_size=8)


def writer_of(kind: str, *, usage: bool, tools: bool) -> StreamWriter:
    use = ToolUse(({"name": "go"},)) if tools else ToolUse()
    form = AnswerForm(thoughts=(("<think>", "</think>"),))

    def parser() -> AnswerParser | None:
        return AnswerParser(form, use.schemas) if tools else None

    options: dict[str, Any] = {"stream": True}
    if usage:
        options["stream_options"] = {"include_usage": True}
    if kind == "chat":
        asked = chat_completions.ChatRequest(messages=[{}], n=2, **options)
        return chat_completions._Writer(STATE, asked, HEAD, parser)
    if kind == "completions":
        body = completions.CompletionRequest(n=2, **options)
        return completions._Writer(
            STATE, body, [AnswerOptions(tokens=[1], options={}, choices=2)], HEAD
        )
    if kind == "anthropic":
        return anthropic._Writer(HEAD, 3, parser)
    wanted = responses.ResponseRequest(input="x")
    begun, given_ = responses._begun(wanted, "m", {}), AnswerOptions(tokens=[1], options={})
    turn = responses._Turn(begun, use, [], [], given_, logprobs=False, parser=parser)
    return responses._Writer(STATE, "app", wanted, turn)


@pytest.mark.parametrize("kind", ["chat", "completions", "anthropic", "responses"])
@given(TEXTS, TEXTS, st.booleans(), st.booleans())
def test_events_of_a_run_are_those_of_its_pieces(
    kind: str, first: list[str], second: list[str], usage: bool, tools: bool
) -> None:
    one, other = (writer_of(kind, usage=usage, tools=tools) for _ in range(2))
    if kind == "responses":
        body = one._turn.body  # type: ignore[attr-defined]
        other._turn.body, other._at = body, one._at  # type: ignore[attr-defined]  # drawn names
    second_choice = 1 if kind in ("chat", "completions") else 0
    for choice, texts in ((0, first), (second_choice, second)):
        tokens = list(range(len(texts)))
        run = b"".join(one.run(Run(id=1, choice=choice, texts=texts, tokens=tokens)))
        pieces = [TokenEvent(id=1, choice=choice, text=x, token=i) for i, x in enumerate(texts)]
        if not tools or kind == "completions":
            assert run.count(b"data: ") == _told(texts)
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
    for number, choice in itertools.product(range(3), range(2)):
        one, other = (
            [x for x in each if x.id == number and getattr(x, "choice", choice) == choice]  # type: ignore[union-attr]
            for each in (found, sent)
        )
        assert one == other


def test_a_choice_is_the_same_however_it_was_told() -> None:
    one, other = AnswerChoice(), AnswerChoice()
    one.add(Run(id=1, choice=0, texts=["a", "", "b"], tokens=[1, 2, 3]))
    for token, text in enumerate(["a", "", "b"], 1):
        other.add(TokenEvent(id=1, choice=0, text=text, token=token))
    assert one == other
    assert one.text == "ab"


ANSWER = (
    "<think>\nHm.\n</think>\n\nWell.\n"
    '<tool_call>\n{"name": "go", "arguments": {"to": "Rome", "x": [1]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
)
PARTS = [
    ("thought", "Hm."),
    ("text", "Well."),
    ("call", '{"to": "Rome", "x": [1]}'),
    ("call", "{}"),
]


async def _events(writer: StreamWriter, text: str, size: int) -> list[dict[str, Any]]:
    """The events of an answer that comes in pieces of so many characters."""
    lines = writer.begin()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for number, piece in enumerate(pieces):
        finish = "stop" if number == len(pieces) - 1 else ""
        lines += writer.token(
            TokenEvent(id=1, choice=0, text=piece, token=7, finish=finish, end=bool(finish))
        )
    counts = {"prompt_tokens": 3, "completion_tokens": len(pieces), "cached_tokens": 0}
    lines += await writer.end(Done(id=1, usage=counts, about={}))
    data = b"".join(lines).decode().split("\n")
    return [json.loads(x[6:]) for x in data if x.startswith("data: {")]


def _chat_parts(events: list[dict[str, Any]]) -> list[list[str]]:
    parts: list[list[str]] = []
    for event in events:
        delta = event["choices"][0]["delta"]
        if delta.get("reasoning_content"):
            new, text = ["thought", ""], delta["reasoning_content"]
        elif delta.get("tool_calls"):
            (call,) = delta["tool_calls"]
            new, text = ["call", ""], call["function"]["arguments"]
            assert call["index"] == sum(part[0] == "call" for part in parts) - ("id" not in call)
            if "id" in call:
                assert call["function"]["name"] == "go"
                parts.append(new)
        elif delta.get("content"):
            new, text = ["text", ""], delta["content"]
        else:
            continue
        if not parts or parts[-1][0] != new[0]:
            parts.append(new)
        parts[-1][1] += text
    return parts


def _blocks(events: list[dict[str, Any]]) -> list[list[str]]:
    kinds = {"thinking": "thought", "text": "text", "tool_use": "call"}
    parts: list[list[str]] = []
    open_ = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not open_
                assert event["index"] == len(parts)
                parts.append([kinds[event["content_block"]["type"]], ""])
                open_ = True
            case "content_block_delta":
                assert open_
                assert event["index"] == len(parts) - 1
                delta = event["delta"]
                keys = ("thinking", "text", "partial_json")
                parts[-1][1] += next((delta[key] for key in keys if key in delta), "")
            case "content_block_stop":
                open_ = False
    assert not open_
    return parts


def _items(events: list[dict[str, Any]]) -> list[list[str]]:
    kinds = {"reasoning": "thought", "message": "text", "function_call": "call"}
    parts, names = list[list[str]](), list[str]()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(parts)
            parts.append([kinds[event["item"]["type"]], ""])
            names.append(event["item"]["id"])
        elif kind.endswith(".delta") and "summary" not in kind:
            assert event["item_id"] == names[-1]
            parts[-1][1] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == names[-1]
    last = events[-1]["response"]["output"]
    assert [item["id"] for item in last] == names
    return parts


@pytest.mark.few(12)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("kind", "parts_of"),
    [("chat", _chat_parts), ("anthropic", _blocks), ("responses", _items)],
)
def test_thoughts_text_and_calls_are_streamed_apart(
    kind: str, parts_of: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stored(*_given: Any) -> None:
        return None

    monkeypatch.setattr(responses, "_keep", stored)
    writer = writer_of(kind, usage=False, tools=True)
    if kind == "chat":
        monkeypatch.setattr(writer, "_choices", writer._choices[:1])
    events = asyncio.run(_events(writer, ANSWER, size))
    assert [tuple(part) for part in parts_of(events)] == PARTS
    text = json.dumps(events)
    assert text.count("go") >= 2
    reasons = {"chat": "tool_calls", "anthropic": "tool_use", "responses": "completed"}
    assert f'"{reasons[kind]}"' in text
    if kind == "responses" and size == 1:
        assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 3


def test_an_answer_of_calls_is_not_kept_back() -> None:
    """The text before a call, and its arguments, come while the call is written."""
    writer = writer_of("chat", usage=False, tools=True)
    seen = [
        bool(writer.token(TokenEvent(id=1, choice=0, text=text, token=1)))
        for text in ("Well", ", I", ' <tool_call>{"name": "go", "arguments": {"a', '": "b', "c")
    ]
    assert seen == [True] * 5
