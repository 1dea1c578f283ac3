"""OpenAI's agents library works through the task, over both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.serving.agents.assistant import Assistant
from tests.serving.agents.story import QUESTION, begin, check_prompts, temperature, weather

agents = pytest.importorskip("agents")
pytestmark = pytest.mark.full
FAILURE = "An error occurred while running the tool. Please try again."


async def run(client: Any, kind: str, *, streams: bool) -> Any:
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """The temperature in a city."""
        return temperature(city)

    model = getattr(agents, kind)(model="scripted", openai_client=client)
    agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[weather])
    if not streams:
        return await agents.Runner.run(agent, QUESTION)
    result = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result


async def finished(assistant: Assistant, kind: str, *, streams: bool) -> Any:
    url = f"{assistant.server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=assistant.key, max_retries=0) as client:
        return await run(client, kind, streams=streams)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def test_the_task_is_done(scripted: Assistant, kind: str, streams: bool) -> None:
    turns = weather(failure=FAILURE)
    begin(scripted, turns)
    result = asyncio.run(finished(scripted, kind, streams=streams))
    assert result.final_output == turns[-1].text
    first, second, last = (
        ["ReasoningItem", *rest]
        for rest in (
            ["MessageOutputItem", *["ToolCallItem"] * 2, *["ToolCallOutputItem"] * 2],
            ["ToolCallItem", "ToolCallOutputItem"],
            ["MessageOutputItem"],
        )
    )
    assert [type(item).__name__ for item in result.new_items] == [*first, *second, *last]
    check_prompts(scripted, turns, thinks=kind == "OpenAIResponsesModel")  # chat has no field
