"""The prompts of the three APIs over HTTP: begun answers, counts, what the templates show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving.servers import Server

STORY: dict[str, Any] = {"role": "user", "content": "Tell me a story"}
ONE: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 1}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as found:
        yield found


def sent(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def begun(text: str) -> list[dict[str, Any]]:
    half = len(text) // 2
    parts = [{"type": "text", "text": x} for x in (text[:half], text[half:])]
    return [STORY, {"role": "assistant", "content": parts}]


def counts(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    """The tokens of the same prompt in chat completions, responses and Anthropic's messages."""
    chat = sent(client, "/v1/chat/completions", {**ONE, "messages": messages, **more})
    asked = {"model": "demo", "input": messages, **more}
    answer = sent(client, "/v1/responses", {**asked, "max_output_tokens": 1})
    counted = {"model": "demo", "messages": messages, **more}
    return [
        chat["usage"]["prompt_tokens"],
        answer["usage"]["input_tokens"],
        sent(client, "/v1/responses/input_tokens", asked)["input_tokens"],
        sent(client, "/v1/messages/count_tokens", counted)["input_tokens"],
    ]


@pytest.mark.parametrize("text", ["Once upon a time", "<", "</s"])
def test_each_api_continues_an_answer_that_was_begun(client: httpx.Client, text: str) -> None:
    shown = sent(client, "/tokenize", {"prompt": f"User: Tell me a story\nAssistant: {text}"})
    assert counts(client, begun(text)) == [shown["count"]] * 4


def test_a_given_answer_after_a_stored_one_is_seen(client: httpx.Client) -> None:
    """The stored tokens end with the stored answer."""
    asked = {"model": "demo", "temperature": 0, "max_output_tokens": 4}
    first = sent(client, "/v1/responses", {**asked, "input": [STORY]})
    text = first["output"][0]["content"][0]["text"]
    for more in (begun("Once"), [*begun("Once"), STORY]):
        after = {**asked, "input": more, "previous_response_id": first["id"]}
        used = sent(client, "/v1/responses", after)["usage"]["input_tokens"]
        whole = [STORY, {"role": "assistant", "content": text}, *more]
        count = sent(client, "/v1/responses/input_tokens", {"input": whole})["input_tokens"]
        assert used == count


def test_a_stored_answer_that_was_cut_off_goes_on(client: httpx.Client) -> None:
    asked = {"model": "demo", "temperature": 0}
    whole, first = (
        sent(client, "/v1/responses", {**asked, "input": [STORY], "max_output_tokens": most})
        for most in (12, 6)
    )
    rest = {**asked, "previous_response_id": first["id"], "input": [], "max_output_tokens": 6}
    second = sent(client, "/v1/responses", rest)
    texts = [x["output"][0]["content"][0]["text"] for x in (first, second, whole)]
    assert texts[0] + texts[1] == texts[2]


@pytest.mark.parametrize("way", ["items", "store"])
def test_an_answer_that_is_added_to_a_conversation_is_seen(client: httpx.Client, way: str) -> None:
    name = sent(client, "/v1/conversations", {})["id"]
    asked = {"model": "demo", "conversation": name, "max_output_tokens": 4}
    sent(client, "/v1/responses", {**asked, "input": [STORY]})
    if way == "items":
        sent(client, f"/v1/conversations/{name}/items", {"items": [STORY, begun("Once")[1]]})
    else:
        sent(client, "/v1/responses", {**asked, "input": [STORY], "store": False})
    items = client.get(f"/v1/conversations/{name}/items?order=asc").json()["data"]
    used = sent(client, "/v1/responses", {**asked, "input": [STORY]})["usage"]["input_tokens"]
    whole = {"model": "demo", "input": [*items, STORY]}
    assert used == sent(client, "/v1/responses/input_tokens", whole)["input_tokens"]
    assert client.delete(f"/v1/conversations/{name}").status_code == 200


@pytest.mark.parametrize(
    "change",
    [{}, {"continue_final_message": False}, {"add_generation_prompt": True}],
)
def test_the_prompt_of_a_chat_is_shown(client: httpx.Client, change: dict[str, Any]) -> None:
    body = {"model": "demo", "messages": begun("Once upon"), **change}
    used = sent(client, "/v1/chat/completions", {**ONE, **body})["usage"]["prompt_tokens"]
    tokens = sent(client, "/tokenize", body)["tokens"]
    shown = sent(client, "/apply-template", body)["prompt"]
    assert len(tokens) == used
    assert sent(client, "/detokenize", {"tokens": tokens})["prompt"] == shown
    assert shown.endswith("Assistant: Once upon") == (not change)


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template", "/v1/chat/completions"])
def test_only_an_answer_is_continued(client: httpx.Client, path: str) -> None:
    body = {**ONE, "messages": [STORY], "continue_final_message": True}
    refused = client.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template", "/v1/chat/completions"])
def test_an_answer_is_not_begun_and_continued_at_once(client: httpx.Client, path: str) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused = client.post(path, json={**ONE, "messages": begun("Once upon"), **both})
    assert refused.status_code == 400
    assert "set one of them" in refused.json()["error"]["message"]


def test_a_prompt_is_shown_without_the_beginning_of_its_answer(client: httpx.Client) -> None:
    body = {"messages": [STORY], "add_generation_prompt": False}
    assert sent(client, "/apply-template", body)["prompt"].endswith("Tell me a story\n")


def test_a_prompt_that_is_too_long_is_counted(client: httpx.Client) -> None:
    most = client.get("/props").json()["default_generation_settings"]["n_ctx"]
    text, length = "Once upon a time " * most, 4 * most
    for path, body in (
        ("/v1/responses/input_tokens", {"input": text}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
    ):
        assert sent(client, path, body)["input_tokens"] > length
    refused = client.post("/v1/responses", json={"input": text})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
