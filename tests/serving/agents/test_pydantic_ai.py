"""Pydantic AI works through the task, over the three APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from tests.serving.agents.assistant import Assistant
from tests.serving.agents.story import QUESTION, begin, check_prompts, temperature, weather

pydantic_ai = pytest.importorskip("pydantic_ai")
pytestmark = pytest.mark.full
FAILURES = {"anthropic": "no such city: Zurich"}


@asynccontextmanager
async def opened(assistant: Assistant, api: str) -> AsyncIterator[Any]:
    """A model whose connections are closed at the end."""
    url, key = assistant.server.url, assistant.key
    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
            yield AnthropicModel("scripted", provider=AnthropicProvider(anthropic_client=client))
        return
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        yield kind("scripted", provider=OpenAIProvider(openai_client=client))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("api", ["anthropic", "responses", "chat"])
def test_the_task_is_done(scripted: Assistant, api: str, streams: bool) -> None:
    agent = pydantic_ai.Agent(instructions="Be brief.")

    @agent.tool_plain(name="weather")
    def city_weather(city: str) -> str:
        """Return the temperature in a city."""
        try:
            return temperature(city)
        except ValueError as error:
            raise pydantic_ai.ModelRetry(str(error)) from error

    async def run() -> Any:
        async with opened(scripted, api) as model:
            if not streams:
                return (await agent.run(QUESTION, model=model)).output
            async with agent.run_stream(QUESTION, model=model) as result:
                return await result.get_output()

    turns = weather(failure=FAILURES.get(api, '{"error":"no such city: Zurich"}'))
    if streams:  # it takes the first text for the answer
        turns[0] = replace(turns[0], text="")
    begin(scripted, turns)
    assert asyncio.run(run()) == turns[-1].text
    check_prompts(scripted, turns)
