"""Requests of popular clients, as they send them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.serving.servers import Server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as found:
        yield found


def test_a_model_has_the_fields_of_both_apis(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    card = listed["data"][0]
    assert (listed["has_more"], listed["first_id"]) == (False, card["id"])
    assert (card["type"], card["display_name"]) == ("model", card["id"])
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert http.get(f"/v1/models/{card['id']}").json() == card


def test_the_input_of_a_response_is_read_page_by_page(http: httpx.Client) -> None:
    texts = [f"word {i}" for i in range(5)]
    asked: dict[str, Any] = {"input": [{"role": "user", "content": x} for x in texts]}
    made = http.post("/v1/responses", json={**asked, "max_output_tokens": 1}).json()
    where, page = f"/v1/responses/{made['id']}/input_items", {"limit": 2, "order": "asc"}
    seen = list[str]()
    while True:
        got = http.get(where, params=page).json()
        seen += [item["content"][0]["text"] for item in got["data"]]
        page["after"] = got["last_id"]
        if not got["has_more"]:
            break
    assert seen == texts
    newest = http.get(where).json()["data"][0]["content"][0]["text"]
    assert newest == texts[-1]
    unknown = http.get(where, params={"after": "msg_none"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "after")


def test_a_stored_response_is_not_streamed(http: httpx.Client) -> None:
    made = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1}).json()
    refused = http.get(f"/v1/responses/{made['id']}", params={"stream": "true"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("stream", "unsupported_parameter")


def test_a_prompt_that_is_too_long_is_recognised(http: httpx.Client) -> None:
    """By LangChain, LiteLLM and Pydantic AI, which look for these words."""
    text = "Once upon a time " * 5000
    messages = [{"role": "user", "content": text}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/responses", {"input": text}),
        ("/v1/messages", {"messages": messages, "max_tokens": 1}),
        ("/v1/embeddings", {"input": text}),
        ("/v1/completions", {"prompt": [1] * 5000}),
        ("/v1/embeddings", {"input": [1] * 5000}),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == 400, path
        message = refused.json()["error"]["message"]
        assert "prompt is too long" in message
        assert "this model's maximum context length is" in message
