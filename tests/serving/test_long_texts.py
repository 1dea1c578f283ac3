"""A text that is far too long is refused by its beginning, before the engine is asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.serving.errors import ApiError
from hetero.serving.state import CUT_TOKENS, TOKEN_CHARACTERS, State
from tests.serving.servers import Server

ROOM = 8
BEGINNING = ROOM * TOKEN_CHARACTERS


def encoded(texts: list[str], characters: int) -> list[int]:
    """The lengths of the texts that are encoded for a check, with tokens of so many characters."""
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return [0] * -(-len(text) // characters)

    fields: dict[str, Any] = dict.fromkeys(("store", "metrics", "token_bytes"))
    state = State(
        model=SimpleNamespace(encode=encode),  # type: ignore[arg-type]
        names=["m"],
        engine=SimpleNamespace(about={"max_seq_len": ROOM}),  # type: ignore[arg-type]
        slots=1,
        **fields,
    )
    asyncio.run(state.check_length(texts, "prompt"))
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
