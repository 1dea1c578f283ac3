"""The official client of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hetero import LLM
from tests.serving.servers import KEYS, Server

STORY = [{"role": "user", "content": "Tell me a story"}]
GREEDY: dict[str, Any] = {"model": "demo", "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The package, which takes seconds to import."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(server: Server, anthropic: Any) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=server.url, api_key=KEYS["mail"], max_retries=0, timeout=60
    ) as found:
        yield found


@pytest.mark.full
def test_an_answer_and_its_tokens(client: Any) -> None:
    with LLM("demo", device="npu") as llm:
        wanted = llm.chat([{"role": "system", "content": "Be short."}, *STORY], max_tokens=12)
    asked = {**GREEDY, "messages": STORY, "system": "Be short.", "max_tokens": 12}
    first, again = (client.messages.create(**asked) for _ in range(2))
    assert first.content[0].text == again.content[0].text == wanted.text
    assert first.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="demo", messages=STORY, system="Be short.")
    for said in (first, again):
        use = said.usage
        assert use.input_tokens + use.cache_read_input_tokens == counted.input_tokens
        assert use.output_tokens == len(wanted.tokens)
    assert again.usage.input_tokens == 1


def test_a_stream_has_the_same_text_and_usage(client: Any) -> None:
    asked = {**GREEDY, "messages": STORY, "max_tokens": 12}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.usage.output_tokens == 12
    assert last.stop_reason == "max_tokens"


def test_which_stop_sequence_ended_it(client: Any) -> None:
    asked = {**GREEDY, "messages": STORY, "max_tokens": 40}
    text = client.messages.create(**asked).content[0].text
    said = client.messages.create(**asked, stop_sequences=["never so", text[10:15]])
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", text[10:15])


def test_a_tool_that_must_be_used(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked = {
        "model": "demo",
        "messages": STORY,
        "max_tokens": 60,
        "tools": [{"name": "answer", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "answer"},
    }
    said = client.messages.create(**asked)
    assert said.stop_reason == "tool_use"
    assert isinstance(said.content[0].input["ok"], bool)
    with client.messages.stream(**asked) as stream:
        last = stream.get_final_message()
    assert isinstance(last.content[0].input["ok"], bool)
    result = {"type": "tool_result", "tool_use_id": said.content[0].id, "content": "thanks"}
    more = [
        *STORY,
        {"role": "assistant", "content": [said.content[0].model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**{**asked, "messages": more, "tool_choice": {"type": "none"}})
    assert again.content[0].type == "text"


def test_a_thread_is_refused_in_the_way_that_the_client_understands(
    client: Any, anthropic: Any
) -> None:
    """It then sends the whole conversation."""
    asked = {"model": "demo", "messages": STORY, "extra_body": {"thread": {"type": "create"}}}
    create, count = client.messages.create, client.messages.count_tokens
    for call, more in ((create, {"max_tokens": 4}), (count, {})):
        with pytest.raises(anthropic.BadRequestError) as refused:
            call(**asked, **more)
        details = refused.value.body["error"]["details"]
        assert details["error_code"] == "thread_unsupported_request"


def test_an_output_format_is_a_grammar(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "schema": schema}
    said = client.messages.create(
        model="demo", max_tokens=60, messages=STORY, extra_body={"output_config": {"format": form}}
    )
    assert set(json.loads(said.content[0].text)) == {"ok"}


def test_an_answer_that_was_begun_is_continued(client: Any) -> None:
    begun = [*STORY, {"role": "assistant", "content": "Once upon a time"}]
    tokens = client.messages.count_tokens(model="demo", messages=begun).input_tokens
    asked = client.messages.count_tokens(model="demo", messages=STORY).input_tokens
    assert asked < tokens <= asked + 6
    assert client.messages.create(**GREEDY, messages=begun, max_tokens=4).content[0].text


def test_errors_have_the_shape_of_that_api(client: Any, anthropic: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="demo", max_tokens=0, messages=STORY)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id.startswith("req_")
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=STORY)
    assert missing.value.body["error"]["type"] == "not_found_error"
