"""Calls that a request forces, as the family writes them: the grammar allows the whole script."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.agents.assistant import Assistant
from tests.serving.agents.story import QUESTION, Turn, begin

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": [TOOL, {"type": "function", "function": {"name": "stop"}}],
}
CALLS = [("weather", {"city": "Paris"}), ("weather", {"city": "Zürich"})]


def answer(assistant: Assistant, turn: Turn, **change: Any) -> Any:
    begin(assistant, [turn])
    with assistant.server.client() as client:
        said = client.post("/v1/chat/completions", json=ASKED | change)
    assert said.status_code == 200, said.text
    (choice,) = said.json()["choices"]
    return choice


def test_thoughts_and_several_calls(scripted: Assistant) -> None:
    choice = answer(scripted, Turn("Two cities.", "", CALLS), tool_choice="required")
    assert choice["message"]["reasoning_content"] == "Two cities."
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert names == ["weather", "weather"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_has_the_schema_or_calls(scripted: Assistant, strict: bool) -> None:
    """What agents with a type of result ask for: `response_format` beside tools."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    tool = {"type": "function", "function": {**TOOL["function"], "strict": strict}}
    asked = {"response_format": form, "tools": [tool]}
    called = answer(scripted, Turn("One.", "", CALLS[:1]), **asked)
    assert len(called["message"]["tool_calls"]) == 1
    said = answer(scripted, Turn("None.", '{"city": "Paris"}'), **asked)
    assert said["message"]["content"] == '{"city": "Paris"}'
    assert said["message"]["reasoning_content"] == "None."


def test_a_thought_is_bounded_before_a_forced_call(scripted: Assistant) -> None:
    written = "<think>\nab\n</think>\n\n" + Turn("", "", CALLS[:1]).written(thinks=False)
    scripted.script([written])
    with scripted.server.client() as client:
        body = ASKED | {"tool_choice": "required", "reasoning_budget": 3}
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "ab"
    assert len(message["tool_calls"]) == 1
