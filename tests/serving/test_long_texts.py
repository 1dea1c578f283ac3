"""Texts that are far too long are refused by their beginning; long ones delay no short ones."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hetero.serving.errors import ApiError
from hetero.serving.state import CUT_TOKENS, LONG, SHORT, TOKEN_CHARACTERS, State, characters_of
from tests.serving.servers import Server

ROOM = 8
BEGINNING = ROOM * TOKEN_CHARACTERS


def state_of(encode: Callable[[str], list[int]]) -> State:
    fields: dict[str, Any] = dict.fromkeys(("store", "metrics", "token_bytes"))
    return State(
        model=SimpleNamespace(encode=encode),  # type: ignore[arg-type]
        names=["m"],
        engine=SimpleNamespace(about={"max_seq_len": ROOM}),  # type: ignore[arg-type]
        slots=1,
        **fields,
    )


def encoded(texts: list[str], characters: int) -> list[int]:
    """The lengths of the texts that are encoded for a check, with tokens of so many characters."""
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return [0] * -(-len(text) // characters)

    asyncio.run(state_of(encode).check_length(texts, "prompt"))
    return lengths


def test_only_the_beginning_of_a_long_text_is_encoded() -> None:
    assert encoded(["x" * BEGINNING] * 2, 1) == []
    assert encoded(["x" * BEGINNING] * 200, TOKEN_CHARACTERS) == [BEGINNING]  # it may fit
    least = BEGINNING // (ROOM + CUT_TOKENS)
    assert encoded(["x" * BEGINNING] * 200, least + 1) == [BEGINNING]
    with pytest.raises(ApiError, match=f"first {BEGINNING} alone have more") as refused:
        encoded(["x"] * 200 * BEGINNING, least - 1)
    assert refused.value.status == 400
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "{}"}, "prompt"),
        ("/v1/embeddings", {"input": ["{}"]}, "input"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{}"}]}, "messages"),
        ("/v1/responses", {"input": "{}"}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 1}, ""),
    ],
)
@pytest.mark.few(5)
def test_every_api_refuses_megabytes(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    text = "Once upon a time " * 200_000

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return list(map(filled, value))
        return text if value == "{}" else value

    with server.client() as client:
        answer = client.post(path, json=filled(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "alone have more" in error["message"]
    assert error.get("param", "") == param


def test_short_texts_do_not_wait_for_long_ones() -> None:
    """One long text is encoded at a time, beside the short ones."""
    ended, running, most = threading.Event(), list[int](), list[int]()

    def encode(text: str) -> list[int]:
        if len(text) > LONG:
            running.append(1)
            most.append(len(running))
            ended.wait(20)
            running.pop()
        return [len(text)]

    async def check() -> None:
        state = state_of(encode)
        async with asyncio.timeout(10):
            long = [asyncio.create_task(state.encoded("x" * (LONG + 1))) for _ in range(3)]
            many = [asyncio.create_task(state.all_encoded(["x" * LONG] * 2)) for _ in range(2)]
            await asyncio.sleep(0)
            assert await state.encoded("x" * LONG) == [LONG]
            assert await state.all_encoded(["x" * SHORT, [5]]) == [[SHORT], [5]]
            ended.set()
            assert await asyncio.gather(*long) == [[LONG + 1]] * 3
            assert await asyncio.gather(*many) == [[[LONG], [LONG]]] * 2

    try:
        asyncio.run(check())
    finally:
        ended.set()
    assert most == [1, 1, 1]


def test_the_characters_of_a_request_are_counted() -> None:
    call = {"function": {"name": "go", "arguments": {"a": ["bc", 5, None]}}}
    assert characters_of([{"role": "user", "content": "x" * 10, "tool_calls": [call]}, ()]) == 18
    assert characters_of(None) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "{}"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "{}"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "{}"}]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "{}"}]}),
    ],
)
@pytest.mark.full
def test_counting_megabytes_delays_no_small_request(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    text = json.dumps(body).replace("{}", "Once upon a time " * 60_000)  # a second and more
    headers = {"Content-Type": "application/json"}
    small, longest_s = {"prompt": "Once upon a time " * 80}, 0.0

    def sent() -> httpx.Response:
        with server.client() as client:
            return client.post(path, content=text, headers=headers)

    with ThreadPoolExecutor(2) as pool, server.client() as client:
        long = [pool.submit(sent) for _ in range(2)]
        while not all(x.done() for x in long):
            start_s = time.monotonic()
            assert client.post("/tokenize", json=small).json()["count"] > 80
            longest_s = max(longest_s, time.monotonic() - start_s)
        assert [x.result().status_code for x in long] == [200] * 2
    assert longest_s < 1
