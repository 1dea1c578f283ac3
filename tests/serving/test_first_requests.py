"""The first requests of people, by hand, and of programs before they ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.servers import Server

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def test_a_body_without_its_header_is_told_the_header(server: Server) -> None:
    with server.client() as client:
        form = {"Content-Type": "application/x-www-form-urlencoded"}  # curl's
        for headers in (form, {}):
            answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
            assert answer.status_code == 400
            assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_base_url_without_v1_is_told_so(server: Server) -> None:
    with server.client() as client:
        for path in ("/chat/completions", "/models"):
            answer = client.post(path, json=ASKED)
            assert answer.status_code == 404
            assert "the API is under /v1" in answer.json()["error"]["message"]
        answer = client.post("/v1/v1/chat/completions", json=ASKED)
        assert answer.status_code == 404
        assert "/v1 twice" in answer.json()["error"]["message"]


def test_health_page_and_models_are_found(server: Server) -> None:
    with server.client() as client:
        for path in ("/health", "/v1/health", "/", "/v1/models", "/metrics", "/props", "/slots"):
            answer = client.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
        assert client.head("/v1/completions").status_code == 405
        listed = client.get("/v1/models").json()
        assert client.get("/v1/models/").json() == listed
        assert listed["object"] == "list"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.few(2)
def test_each_answer_names_the_plan_that_computes_it(server: Server, path: str) -> None:
    body = {**ASKED, "prompt": "x"}
    with server.client() as client:
        whole = client.post(path, json=body).json()["system_fingerprint"]
        lines = client.post(path, json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole}


def test_a_prompt_is_shown_with_and_without_the_answers_beginning(server: Server) -> None:
    with server.client() as client:
        asked, bare = (
            client.post("/apply-template", json={**ASKED, "add_generation_prompt": given}).json()
            for given in (True, False)
        )
    assert asked["prompt"].startswith(bare["prompt"])
    assert len(asked["prompt"]) > len(bare["prompt"])


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},
    ],
)
def test_an_assistant_that_said_nothing_or_refused_is_taken(server: Server, answer: Any) -> None:
    user = ASKED["messages"][0]
    messages = [user, {"role": "assistant", **answer}, user]
    with server.client() as client:
        got = client.post("/v1/chat/completions", json={**ASKED, "messages": messages})
    assert got.status_code == 200, got.text
