"""The official client of OpenAI's API, and what its documentation says of each field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from tests.serving.servers import KEYS, Server

openai = pytest.importorskip("openai")
STORY = [{"role": "user", "content": "Tell me a story"}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=KEYS["notes"], max_retries=0, timeout=60
    ) as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu") as found:
        yield found


def test_a_chat_is_the_librarys_with_every_token_counted(client: Any, llm: LLM) -> None:
    wanted = llm.chat(STORY, max_tokens=20)
    said = client.chat.completions.create(**GREEDY, messages=STORY, max_completion_tokens=20)
    assert said.choices[0].message.content == wanted.text
    assert said.choices[0].finish_reason == "length"
    assert said.usage.prompt_tokens == len(llm.encode_chat(STORY))
    assert said.usage.completion_tokens == len(wanted.tokens) == 20
    assert said.usage.total_tokens == said.usage.prompt_tokens + 20
    assert said.hetero["placement"]["npu"]["ops"] > 0
    again = client.models.retrieve("demo")
    assert said._request_id.startswith("req_")
    assert said._request_id != again._request_id


def test_what_was_said_before_is_not_computed_again(client: Any) -> None:
    salt = {"cache_salt": "cached"}
    asked = {**GREEDY, "messages": STORY, "max_tokens": 8, "extra_body": salt}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content
    other = client.chat.completions.create(**{**asked, "extra_body": {"cache_salt": "another"}})
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_pieces_of_a_stream_are_the_whole_answer(client: Any) -> None:
    asked = {**GREEDY, "messages": STORY, "max_tokens": 16, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    texts, finished, scores, last = ["", ""], {}, [0, 0], None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options=options):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            scores[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
            assert chunk.usage is None
    assert texts == [choice.message.content for choice in whole.choices]
    assert finished == {0: "length", 1: "length"}
    assert scores == [16, 16]
    assert last is not None
    assert not last.choices
    assert last.usage.completion_tokens == 32


def test_stop_texts_end_an_answer_and_are_no_part_of_it(client: Any) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=STORY, max_tokens=30)
    text = whole.choices[0].message.content
    stop = text[20:25]
    for stream in (False, True):
        asked = {**GREEDY, "messages": STORY, "max_tokens": 30, "stop": [stop, "never so"]}
        said = client.chat.completions.create(**asked, stream=stream)
        if stream:
            chunks = [chunk.choices[0] for chunk in said]
            found = "".join(choice.delta.content or "" for choice in chunks)
            assert chunks[-1].finish_reason == "stop"
        else:
            found = said.choices[0].message.content
            assert said.choices[0].finish_reason == "stop"
        assert found == text[: text.index(stop)]


def test_equal_seeds_give_equal_answers_and_choices_differ(client: Any) -> None:
    asked = {"model": "demo", "messages": STORY, "max_tokens": 24, "temperature": 1.5, "n": 3}
    first, again = (client.chat.completions.create(**asked, seed=7) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3
    other = client.chat.completions.create(**asked, seed=1000)
    assert texts != [choice.message.content for choice in other.choices]


def test_logprobs_are_those_of_the_model(client: Any, llm: LLM) -> None:
    said = client.chat.completions.create(
        **GREEDY, messages=STORY, max_tokens=6, logprobs=True, top_logprobs=4
    )
    content = said.choices[0].logprobs.content
    assert "".join(bytes(x.bytes).decode() for x in content) == said.choices[0].message.content
    prompt = llm.encode_chat(STORY)
    tokens = llm.chat(STORY, max_tokens=6).tokens
    logits = llm.logits([*prompt, *tokens])[len(prompt) - 1 : -1].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for row, token, found in zip(logs, tokens, content, strict=True):
        assert found.logprob == pytest.approx(row[token], abs=2e-3)
        best = sorted(row, reverse=True)[:4]
        assert [x.logprob for x in found.top_logprobs] == pytest.approx(best, abs=2e-3)


def test_a_text_is_scored_as_evaluation_harnesses_do(client: Any, llm: LLM) -> None:
    """`echo` with `logprobs`: the sum is the text's log-likelihood, a token at a time."""
    prompt = llm.encode("Once upon a time there was a fox")
    for most in (0, 1):
        said = client.completions.create(
            **GREEDY, prompt=prompt, max_tokens=most, echo=True, logprobs=1
        )
        scores = said.choices[0].logprobs
        assert len(scores.tokens) == len(prompt) + most
        assert said.usage.completion_tokens == most
        assert scores.token_logprobs[0] is None
        logits = llm.logits(prompt)[:-1].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        wanted = [row[token] for row, token in zip(logs, prompt[1:], strict=True)]
        found = scores.token_logprobs[1 : len(prompt)]
        assert found == pytest.approx(wanted, abs=2e-3)
        likeliest = [max(x, key=x.get) for x in scores.top_logprobs[1 : len(prompt)]]
        greedy = [token == best for token, best in zip(scores.tokens[1:], likeliest, strict=False)]
        assert greedy == [int(row.argmax()) == t for row, t in zip(logs, prompt[1:], strict=True)]
    assert math.isfinite(sum(found))


def test_completions_take_texts_ids_and_lists_of_them(client: Any, llm: LLM) -> None:
    text = "Once upon a time"
    ids, wanted = llm.encode(text), llm.generate(text, max_tokens=6).text
    for prompt in (text, ids, [text, text], [ids, ids]):
        said = client.completions.create(**GREEDY, prompt=prompt, max_tokens=6)
        assert {choice.text for choice in said.choices} == {wanted}
        count = 2 if isinstance(prompt[0], list) or prompt == [text, text] else 1
        assert [choice.index for choice in said.choices] == list(range(count))
        assert said.usage.prompt_tokens == count * len(ids)
    said = client.completions.create(**GREEDY, prompt=text, echo=True)
    assert said.choices[0].text.startswith(text)
    assert said.usage.completion_tokens == 16
    chunks = client.completions.create(**GREEDY, prompt=text, max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted


@pytest.mark.parametrize("change", [{"n": 2, "echo": True}, {"max_tokens": 0, "echo": True}, {}])
@pytest.mark.few(3)
def test_several_prompts_are_streamed_as_they_are_answered(
    client: Any, change: dict[str, Any]
) -> None:
    prompts = ["Once upon a time", "One day", "A cat"]
    asked = {**GREEDY, "prompt": prompts, "max_tokens": 6} | change
    whole = client.completions.create(**asked)
    texts, finished = [""] * len(whole.choices), dict[int, str]()
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        if choice.finish_reason:
            assert choice.index not in finished
            finished[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert list(finished.items()) == [(x.index, x.finish_reason) for x in whole.choices]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    last, expected = chunks[-1].usage, whole.usage
    assert last.prompt_tokens == expected.prompt_tokens
    assert last.completion_tokens == expected.completion_tokens


def test_responses_go_on_and_fork(client: Any) -> None:
    asked = {**GREEDY, "max_output_tokens": 10}
    first = client.responses.create(**asked, input="Tell me a story")
    assert first.status == "incomplete"
    assert first.incomplete_details.reason == "max_output_tokens"
    one = client.responses.create(**asked, input="And then?", previous_response_id=first.id)
    two = client.responses.create(**asked, input="Who was it?", previous_response_id=first.id)
    before = first.usage.total_tokens
    assert one.usage.input_tokens > before
    assert one.usage.input_tokens_details.cached_tokens >= before - 1
    assert two.usage.input_tokens_details.cached_tokens >= before - 1
    again = client.responses.retrieve(one.id)
    assert again.output_text == one.output_text
    assert client.responses.input_items.list(one.id).data[0].content[0].text == "And then?"
    client.responses.delete(one.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(one.id)
    kept = client.responses.create(**asked, input="Hm", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_an_item_of_an_earlier_answer_is_referenced_by_its_id(client: Any) -> None:
    """The AI SDK sends stored answers so."""
    asked = {**GREEDY, "max_output_tokens": 10}
    first = client.responses.create(**asked, input="Tell me a story")
    user = {"role": "user", "content": "Tell me a story"}
    answer = {"type": "item_reference", "id": first.output[0].id}
    more = {"role": "user", "content": "And then?"}
    by_id = client.responses.create(**asked, input=[user, answer, more])
    told = {"role": "assistant", "content": first.output_text}
    assert client.responses.create(**asked, input=[user, told, more]).output_text == (
        by_id.output_text
    )
    counted = client.post(
        "/responses/input_tokens", body={"input": [user, answer, more]}, cast_to=object
    )
    assert counted["input_tokens"] == by_id.usage.input_tokens
    conversation = client.conversations.create(items=[user])
    for _ in range(2):  # its copy has an id of its own each time
        client.responses.create(**asked, input=[answer, more], conversation=conversation.id)
    client.conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**asked, input=[{**answer, "id": "msg_00"}])


def test_half_a_character_is_stored_as_a_whole_one(client: Any) -> None:
    conversation = client.conversations.create()
    body = b'{"conversation": "%b", "input": "cut \\ud83d", "max_output_tokens": 2}'
    answer = client._client.post(
        f"{client.base_url}responses",
        content=body % conversation.id.encode(),
        headers={"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert items[0].content[0].text == "cut \ufffd"
    client.conversations.delete(conversation.id)


@pytest.mark.parametrize(
    "change", [{"max_tokens": -1}, {"top_p": 0}, {"model": None}, {"continue_final_message": True}]
)
def test_what_other_servers_accept_is_accepted(client: Any, change: dict[str, Any]) -> None:
    told = [*STORY, {"role": "assistant", "content": "Once upon a time, there was"}]
    body = {**GREEDY, "messages": told, "stop": ["."], "max_tokens": 30} | change
    said = client.post("/chat/completions", body=body, cast_to=object)
    assert said["usage"]["completion_tokens"] > 0


@pytest.mark.full
def test_no_token_ends_an_answer_that_ignores_it(client: Any) -> None:
    asked = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 400}
    ended = client.completions.create(**asked)
    assert ended.choices[0].finish_reason == "stop"
    longer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert longer.choices[0].finish_reason == "length"
    assert longer.usage.completion_tokens == 400


def test_an_answer_that_was_begun_is_continued(client: Any, llm: LLM) -> None:
    begun = "Once upon a time, there was a"
    told = [*STORY, {"role": "assistant", "content": begun}]
    said = client.chat.completions.create(**GREEDY, messages=told, max_tokens=8)
    new = client.chat.completions.create(
        **GREEDY, messages=told, max_tokens=8, extra_body={"add_generation_prompt": True}
    )
    assert new.usage.prompt_tokens > said.usage.prompt_tokens
    whole = [*llm.encode_chat(STORY), *llm.model.encode(begun)]
    assert said.usage.prompt_tokens in range(len(whole) - 2, len(whole) + 2)


def test_a_conversation_has_its_items_until_it_is_deleted(client: Any) -> None:
    asked = {**GREEDY, "max_output_tokens": 10}
    said = [{"role": "system", "content": "Be short."}]
    conversation = client.conversations.create(items=said, metadata={"of": "a test"})
    first = client.responses.create(**asked, input="Tell me a story", conversation=conversation.id)
    with client.responses.stream(
        **asked, input="And then?", conversation=conversation.id
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == sorted(
        event.sequence_number for event in events
    )
    last = events[-1].response
    assert last.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.role for item in items] == ["system", "user", "assistant", "user", "assistant"]
    with pytest.raises(openai.BadRequestError):
        client.responses.create(
            **asked, input="x", conversation=conversation.id, previous_response_id=first.id
        )
    assert client.conversations.update(conversation.id, metadata={"of": "another"}).metadata == {
        "of": "another"
    }
    client.conversations.delete(conversation.id)
    for gone in (
        lambda: client.conversations.retrieve(conversation.id),
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(**asked, input="x", conversation=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()


@pytest.mark.full
def test_a_forced_call_of_a_tool_has_the_arguments_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name in ("weather", "trains")
    ]
    asked = {"model": "demo", "messages": STORY, "tools": tools, "seed": 3}
    for choice in ("required", {"type": "function", "function": {"name": "trains"}}):
        said = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert said.finish_reason == "tool_calls"
        for call in said.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert arguments["days"] in (1, 2, 3)
            assert call.function.name in ("weather", "trains")
            assert choice == "required" or call.function.name == "trains"
        assert choice == "required" or len(said.message.tool_calls) == 1
    given = [
        *STORY,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    said = client.chat.completions.create(**{**asked, "messages": given}, max_tokens=4)
    assert said.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"logit_bias": {"99999": 1}}, None),
        ({"stop": ""}, "stop"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    client: Any, change: dict[str, Any], param: str | None
) -> None:
    asked = {**GREEDY, "messages": STORY} | change
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    body = refused.value.body
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"
    assert param is None or body["param"].startswith(param)
    assert "\n" not in body["message"]
    assert refused.value.request_id.startswith("req_")


def test_another_model_is_not_here(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-9", messages=STORY)
    assert refused.value.body["code"] == "model_not_found"
    assert [model.id for model in client.models.list()] == ["tiny", "demo"]
    assert client.models.retrieve("tiny").id == "tiny"
