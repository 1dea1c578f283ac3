"""Thoughts of a model whose template begins them, over HTTP: bounded, off, in all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.models.gguf_files import write_tiny
from tests.serving.servers import serving

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
MESSAGES = [{"role": "user", "content": "ab"}]
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 40, "temperature": 0, "messages": MESSAGES}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("thinking")
    path = write_tiny(folder / "m.gguf", tokenizer__chat_template=TEMPLATE)
    options = ("--reasoning-budget", "6")
    with serving(folder / "server", *options, model=str(path)) as server, server.client() as opened:
        yield opened


def sent(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.few(3)
@pytest.mark.parametrize("budget", [None, 0, 3])
def test_a_thought_is_bounded(client: httpx.Client, budget: int | None) -> None:
    body = {**ASKED, "ignore_eos": True, "reasoning_budget": budget}
    said = sent(client, "/v1/chat/completions", body)
    thoughts = said["usage"]["completion_tokens_details"]["reasoning_tokens"]
    forced = len("\n</think>\n\n")  # at most: a token for each character
    most = 6 if budget is None else budget
    assert most <= thoughts <= most + forced
    assert said["usage"]["completion_tokens"] == 40
    message = said["choices"][0]["message"]
    assert bool(message.get("reasoning_content")) >= (most > 3)
    assert "think" not in message["content"]


def test_a_thought_is_bounded_as_each_api_says_it(client: httpx.Client) -> None:
    forced = len("\n</think>\n\n")
    asked = {"model": "m", "ignore_eos": True, "temperature": 0}
    responses = {**asked, "input": "ab", "max_output_tokens": 40, "reasoning": {"max_tokens": 3}}
    usage = sent(client, "/v1/responses", responses)["usage"]
    assert 3 <= usage["output_tokens_details"]["reasoning_tokens"] <= 3 + forced
    thinking = {"type": "enabled", "budget_tokens": 3}
    said = sent(client, "/v1/messages", {**ASKED, "ignore_eos": True, "thinking": thinking})
    thought = [x["thinking"] for x in said["content"] if x["type"] == "thinking"]
    assert sum(map(len, thought)) <= 3 + forced
    assert "think" not in "".join(x.get("text", "") for x in said["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_counted(client: httpx.Client, stream: bool) -> None:
    def counted() -> float:
        lines = client.get("/metrics").text.splitlines()
        (line,) = (x for x in lines if x.startswith('hetero_tokens_total{kind="reasoning",'))
        return float(line.split()[1])

    before, path = counted(), "/v1/chat/completions"
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        lines = client.post(path, json=ASKED | options).text.splitlines()
        usage = json.loads(lines[-4].removeprefix("data: "))["usage"]
    else:
        usage = sent(client, path, ASKED)["usage"]
    count = usage["completion_tokens_details"]["reasoning_tokens"]
    assert counted() - before == count > 0


def test_thinking_is_off(client: httpx.Client) -> None:
    off = {"enable_thinking": False}
    for change in ({"reasoning_effort": "none"}, {"chat_template_kwargs": off}):
        said = sent(client, "/v1/chat/completions", ASKED | change)
        assert "reasoning_content" not in said["choices"][0]["message"]
        assert said["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    said = sent(client, "/v1/messages", ASKED | {"thinking": {"type": "disabled"}})
    assert [block["type"] for block in said["content"]] == ["text"]
    counted = {"model": "m", "messages": MESSAGES, "thinking": {"type": "disabled"}}
    count = sent(client, "/v1/messages/count_tokens", counted)["input_tokens"]
    usage = said["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    for change in ({"reasoning_effort": "none"}, {"chat_template_kwargs": off}):
        shown = sent(client, "/apply-template", {**ASKED, **change})["prompt"]
        assert shown.endswith("</think>\n\n")
        tokens = sent(client, "/tokenize", {**ASKED, **change})["tokens"]
        assert sent(client, "/detokenize", {"tokens": tokens})["prompt"] == shown
    refused = client.post(
        "/v1/chat/completions", json=ASKED | {"chat_template_kwargs": {"messages": []}}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"


def test_each_api_has_the_same_thoughts(client: httpx.Client) -> None:
    chat = sent(client, "/v1/chat/completions", ASKED)["choices"][0]["message"]
    blocks = sent(client, "/v1/messages", ASKED)["content"]
    body = {"model": "m", "input": "ab", "max_output_tokens": 40, "temperature": 0}
    items = sent(client, "/v1/responses", body | {"reasoning": {"summary": "auto"}})["output"]
    thoughts = chat.get("reasoning_content", "")
    assert "".join(x["thinking"] for x in blocks if x["type"] == "thinking") == thoughts
    reasoning = [x for x in items if x["type"] == "reasoning"]
    assert "".join(x["content"][0]["text"] for x in reasoning) == thoughts
    assert "".join(x["summary"][0]["text"] for x in reasoning) == thoughts
    texts = [x["content"][0]["text"] for x in items if x["type"] == "message"]
    assert "".join(texts) == chat["content"]
