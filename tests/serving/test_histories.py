"""The histories of the three APIs are the same messages for a template, whatever it supports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.errors import ModelError
from hetero.models.tokenizer import HfTokenizer
from hetero.serving.answer_parser import AnswerForm
from hetero.serving.anthropic import CountRequest
from hetero.serving.errors import ApiError
from hetero.serving.history import messages_of, read_items
from hetero.serving.json_text import parse_json, whole_characters
from hetero.serving.responses import ResponseRequest
from hetero.serving.template_chat import plain_messages, rendered
from hetero.serving.template_facts import TemplateFacts
from hetero.serving.tools import ToolUse, tool_use
from tests.models.model_helpers import byte_level_tokenizer
from tests.support.selection import examples

QWEN3 = (Path(__file__).parent / "agents" / "qwen3.jinja").read_text()
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}</>"
    "{% endfor %}"
)
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id|length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id is defined %}[{{ m.tool_call_id }}]{% endif %}{{ m.content }}{% endfor %}"
)


def text_of(template: str, messages: list[dict[str, Any]], use: Any = None, **options: Any) -> str:
    """The text that a model with this template is given."""
    tokenizer = HfTokenizer(byte_level_tokenizer(), {}, {"default": template}, where="/a/path")
    state: Any = SimpleNamespace(
        model=SimpleNamespace(tokenizer=tokenizer),
        template_facts=TemplateFacts.of(tokenizer),
        answer_form=AnswerForm.of(tokenizer),
    )
    return tokenizer.decode(rendered(state, messages, use or ToolUse(), **options))


USER = {"role": "user", "content": "x"}
TEXT = st.text("ab \n", max_size=5)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["go", "stop"]), st.dictionaries(TEXT, st.integers(0, 9), max_size=2)
    ),
    max_size=2,
)
TURNS = st.lists(st.tuples(TEXT, TEXT.map(str.strip), TEXT, CALLS), min_size=1, max_size=4)


@pytest.mark.full
@settings(max_examples=examples(1000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXT.filter(str.strip), TURNS)
def test_each_api_gives_the_same_messages(
    system: str, turns: list[tuple[str, str, str, list[tuple[str, dict[str, int]]]]]
) -> None:
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}]
    items: list[dict[str, Any]] = [{"role": "developer", "content": system}]
    blocks: list[dict[str, Any]] = []
    for number, (question, thoughts, answer, calls) in enumerate(turns):
        parts = [{"type": "text", "text": x} for x in (question, "and")]
        chat.append({"role": "user", "content": parts})
        items.append({"role": "user", "content": [{**x, "type": "input_text"} for x in parts]})
        blocks.append({"role": "user", "content": parts})
        ids = [f"id{number}{i}" for i in range(len(calls))]
        own: dict[str, Any] = {"role": "assistant", "content": answer or None}
        if thoughts:
            own["reasoning_content"] = thoughts
            content = [{"type": "reasoning_text", "text": thoughts}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if calls:
            own["tool_calls"] = [
                {"id": id_, "function": {"name": name, "arguments": json.dumps(given_)}}
                for id_, (name, given_) in zip(ids, calls, strict=True)
            ]
        chat.append(own)
        if answer or not calls:
            items.append({"role": "assistant", "content": answer})
        items += [
            {"type": "function_call", "call_id": id_, "name": name, "arguments": json.dumps(given_)}
            for id_, (name, given_) in zip(ids, calls, strict=True)
        ]
        uses = [
            {"type": "tool_use", "id": id_, "name": name, "input": given_}
            for id_, (name, given_) in zip(ids, calls, strict=True)
        ]
        said = [{"type": "thinking", "thinking": thoughts}, {"type": "text", "text": answer}]
        blocks.append({"role": "assistant", "content": [*said, *uses]})
        chat += [{"role": "tool", "tool_call_id": id_, "content": "x"} for id_ in ids]
        items += [{"type": "function_call_output", "call_id": id_, "output": "x"} for id_ in ids]
        results = [{"type": "tool_result", "tool_use_id": id_, "content": "x"} for id_ in ids]
        if results:
            blocks.append({"role": "user", "content": results})
    expected = plain_messages(chat)
    assert messages_of(read_items(items)) == expected
    assert CountRequest(system=system, messages=blocks).plain() == expected


def test_each_api_gives_the_same_functions() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    function = {"name": "go", "description": "Goes.", "parameters": schema}
    chat = tool_use([{"type": "function", "function": {**function, "strict": True}}], None)
    asked = ResponseRequest(tools=[{"type": "function", **function, "strict": True}])
    own = {"name": "go", "description": "Goes.", "input_schema": schema, "strict": True}
    anthropic = CountRequest(messages=[USER], tools=[own])
    assert chat.functions == (function,)
    assert asked.use() == anthropic.use() == chat


def test_documents_of_text_are_text() -> None:
    parts = [{"type": "text", "text": "Grass is green."}]
    text = {"type": "text", "media_type": "text/plain", "data": "Grass is green."}
    blocks: list[dict[str, Any]] = [
        {"type": "document", "title": "Notes", "context": "Of May", "source": text},
        {"type": "document", "source": {"type": "content", "content": parts}},
        {"type": "search_result", "title": "Lawns", "source": "http://a", "content": parts},
        {"type": "text", "text": "Which colour?"},
    ]
    shown = (
        "Notes\nOf May\nGrass is green.\nGrass is green.\nLawns\nhttp://a\nGrass is green.\n"
        "Which colour?"
    )
    result = {"type": "tool_result", "tool_use_id": "id", "content": blocks}
    for content in (blocks, [result]):
        asked = CountRequest.model_validate({"messages": [{"role": "user", "content": content}]})
        assert asked.plain()[0]["content"] == shown
    pdf = {"type": "document", "source": {"type": "base64", "data": "AA"}}
    with pytest.raises(ApiError):
        CountRequest.model_validate({"messages": [{"role": "user", "content": [pdf]}]}).plain()


def test_tools_that_cannot_run_here_are_left_out() -> None:
    go, stop = ({"type": "function", "name": name} for name in ("go", "stop"))
    asked: list[dict[str, Any]] = [
        {"type": "web_search"},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "cars", "tools": [go, {"type": "custom", "name": "x"}]},
        stop,
    ]
    use = ResponseRequest(tools=asked).use()
    assert [f["name"] for f in use.functions] == ["go", "stop"]
    assert use.namespaces == {"go": "cars"}
    own = {"type": "bash_20250124", "name": "bash"}
    assert (
        not CountRequest(messages=[{"role": "user", "content": "x"}], tools=[own]).use().functions
    )
    with pytest.raises(ApiError, match="needs a function"):
        ResponseRequest(tools=asked[:2], tool_choice="required").use()
    with pytest.raises(ApiError, match="'patch'"):
        ResponseRequest(tools=asked, tool_choice={"type": "custom", "name": "patch"}).use()


ELSEWHERE: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
    {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["x"]},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c"},
    {"type": "mcp_call", "id": "mcp_1", "name": "go", "arguments": "{}", "server_label": "x"},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "go", "server_name": "x", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "content": "x"},
]


def test_calls_that_ran_elsewhere_are_passed_over() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [USER, thoughts, *ELSEWHERE, {"role": "assistant", "content": "Found."}, USER]
    own = {"role": "assistant", "content": "Found.", "reasoning_content": "Hm."}
    expected = plain_messages([USER, own, USER])
    assert messages_of(read_items(items)) == expected
    text = {"type": "text", "text": "Found."}
    content = [{"type": "thinking", "thinking": "Hm."}, *BLOCKS, text]
    blocks = [USER, {"role": "assistant", "content": content}, USER]
    assert CountRequest.model_validate({"messages": blocks}).plain() == expected
    for kind in ("other_call", ["compaction"]):
        with pytest.raises(ApiError, match="an item is"):
            read_items([{"type": kind}])


def test_a_call_of_a_custom_tool_is_a_call_with_a_text() -> None:
    items = [
        USER,
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    called = {"id": "c", "function": {"name": "patch", "arguments": {"input": "*** Begin"}}}
    own = {"role": "assistant", "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "c", "content": "done"}
    assert messages_of(read_items(items)) == plain_messages([USER, own, result])
    with pytest.raises(ApiError, match="custom_tool_call has the texts call_id, name, input"):
        read_items([{"type": "custom_tool_call", "call_id": "c", "name": "patch"}])


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_all_shown_and_some_called(mode: str) -> None:
    named = [{"type": "function", "name": "go"}]
    functions = [{"type": "function", "function": {"name": x}} for x in ("go", "stop")]
    flat = tool_use(functions, {"type": "allowed_tools", "mode": mode, "tools": named})
    inner = {"mode": mode, "tools": [{"type": "function", "function": {"name": "go"}}]}
    assert tool_use(functions, {"type": "allowed_tools", "allowed_tools": inner}) == flat
    assert len(flat.functions) == 2
    assert flat.names == {"go"}
    assert flat.forced == (mode == "required")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "function": {"name": name, "arguments": json.dumps(arguments)}}


LOOP = plain_messages(
    [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call("go", to="Rome"), call("stop")]},
        {"role": "tool", "tool_call_id": "call_go", "content": "gone"},
        {"role": "tool", "tool_call_id": "call_stop", "content": "stopped"},
        {"role": "user", "content": "Well?"},
    ]
)


def test_ids_of_calls_fit_a_template_that_checks_them() -> None:
    text = text_of(NINE, LOOP)
    ids = [part.split("]")[0].split(" ")[0] for part in text.split("[")[1:]]
    assert all(len(x) == 9 and x.isalnum() for x in ids)
    assert ids[:2] == ids[2:]
    assert text.count('{"to": "Rome"}') == 1


def test_a_template_without_system_messages_has_them_in_the_users() -> None:
    system = {"role": "system", "content": "Be brief."}
    use = ToolUse(({"name": "go"},))
    text = text_of(NO_SYSTEM, [system, *LOOP], use)
    assert text.startswith("<user>Be brief.\n\nYou may call")
    assert text.index("Where?") < text.index("<assistant>")
    assert text.endswith("</tool_response>\nWell?</>")  # one message: the roles alternate
    with pytest.raises(ModelError, match="the chat template: refuses") as refused:
        text_of(NO_SYSTEM, [*LOOP[:1], *LOOP[:1]])
    assert "/a/path" not in str(refused.value)


def test_tools_are_described_in_the_users_own_system_message() -> None:
    text = text_of(PLAIN, [{"role": "system", "content": "Be brief."}, *LOOP], ToolUse(({},)))
    assert text.startswith("<system>Be brief.\n\nYou may call")
    assert text.count("<system>") == 1


def test_qwen3_does_not_think_and_sees_its_earlier_thoughts() -> None:
    """As llama-server gives them to its template, with tools and without."""
    called = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    called["tool_calls"] = [call("go")]
    result = {"role": "tool", "tool_call_id": "call_go", "content": "gone"}
    messages = plain_messages([USER, called, result])
    for use in (ToolUse(), ToolUse(({"name": "go"},))):
        text = text_of(QWEN3, messages, use, variables={"enable_thinking": False})
        assert "<|im_start|>assistant\n<think>\nHm.\n</think>\n\n" in text
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert text_of(QWEN3, messages, use).endswith("<|im_start|>assistant\n")


def test_parts_of_an_answer_that_was_begun_follow_each_other() -> None:
    """Other parts are a line each, as in llama-server."""
    parts = [{"type": "text", "text": x} for x in ("Wh", "ill")]
    chat = [{"role": "assistant", "content": parts}, USER, {"role": "assistant", "content": parts}]
    expected = ["Wh\nill", "x", "Whill"]
    assert [message["content"] for message in plain_messages(chat)] == expected
    own = CountRequest.model_validate({"messages": chat})
    assert [message["content"] for message in own.plain()] == expected


@pytest.mark.parametrize("begun", ["One, two,", "  One two \n", "", " ", "<", "/", ">", "</>"])
def test_an_answer_that_was_begun_goes_on(begun: str) -> None:
    chat = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": begun}]
    text = text_of(PLAIN + ASKS, chat, continues=True)
    assert text == f"<user>Count.</><assistant>{begun.rstrip()}"
    assert text_of(PLAIN + ASKS, chat).endswith("</><assistant>")


@pytest.mark.parametrize("begun", ["end", "|", ">", "<|im_end|>", "im_end\n end"])
def test_an_answer_may_begin_like_the_end_of_a_turn(begun: str) -> None:
    text = text_of(QWEN3, [USER, {"role": "assistant", "content": begun}], continues=True)
    assert text == f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{begun}"


def test_a_template_may_strip_an_answer_that_was_begun() -> None:
    template = PLAIN.replace("m.content", "m.content | trim")
    chat = [USER, {"role": "assistant", "content": " One\n two "}]
    assert text_of(template, chat, continues=True) == "<user>x</><assistant>One\n two"


@pytest.mark.parametrize(
    "shown", ["m.content.split('</think>')[-1]", "'' if m.role == 'assistant' else m.content"]
)
def test_an_answer_that_the_template_cuts_is_not_continued(shown: str) -> None:
    chat = [USER, {"role": "assistant", "content": "Hm.</think>One"}]
    with pytest.raises(ApiError, match="does not show"):
        text_of(PLAIN.replace("m.content", shown), chat, continues=True)


@given(st.lists(st.text('a\\"u0d8\ud83d\ude00\ufffd', max_size=6)))
def test_half_a_character_is_replaced(texts: list[str]) -> None:
    data = json.dumps(texts).encode()
    clean = whole_characters(data)
    assert len(clean) == len(data)
    joined = [x.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for x in texts]
    assert json.loads(clean) == joined
    assert whole_characters(clean) == clean


@pytest.mark.parametrize("text", ['{"a": NaN}', "[Infinity]", "[" * 100_000, "", "{'a': 1}"])
def test_what_is_no_json_is_no_value(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (its words are json's)
        parse_json(text)
    with pytest.raises(ApiError, match="JSON"):
        read_items(
            [{"type": "function_call", "call_id": "c", "name": "go", "arguments": text or "x"}]
        )
