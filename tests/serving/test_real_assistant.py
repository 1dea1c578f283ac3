"""A trained assistant behind the chat API: its answers, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.servers import KEYS, serving
from tests.support.real_models import SMOLLM2, find_model

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.full
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = find_model(SMOLLM2)
    with serving(
        tmp_path_factory.mktemp("assistant"), "--alias", "smol", model=str(path)
    ) as server:
        key = KEYS["notes"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as found:
            yield found


def test_a_chat_is_answered_and_ends_by_itself(client: Any) -> None:
    said = client.chat.completions.create(model="smol", messages=CAPITAL, temperature=0)
    (choice,) = said.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert said.usage.prompt_tokens == 37, "the template has a system message of its own"


def test_a_tool_is_called_and_its_answer_read(client: Any) -> None:
    asked: dict[str, Any] = {"model": "smol", "temperature": 0, "tools": [WEATHER]}
    question = [{"role": "user", "content": "How is the weather in Paris?"}]
    said = client.chat.completions.create(**asked, messages=question, tool_choice="required")
    (call,) = said.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    given = [
        *question,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "It rains in Paris."},
    ]
    said = client.chat.completions.create(**asked, messages=given, max_tokens=40)
    assert said.choices[0].message.content
