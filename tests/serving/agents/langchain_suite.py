"""LangChain's standard suite of chat models, for the pytest that `test_langchain` starts.

`HETERO_URL` and `HETERO_KEY` are of a server whose model says `test_langchain.SAYS`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

COUNTED = ["reasoning_output", "cache_read_input"]


class OpenAI(ChatModelIntegrationTests):
    """The abilities of both APIs; pictures, sound and other files are not read."""

    own: ClassVar[dict[str, Any]] = {}

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        url, key = os.environ["HETERO_URL"], os.environ["HETERO_KEY"]
        return {"model": "scripted", "base_url": f"{url}/v1", "api_key": key, **self.own}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "another-name"

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": COUNTED, "stream": COUNTED}

    def said(self, text: str, *, stream: bool) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        if not stream:
            return model.invoke(text)
        first, *chunks = model.stream(text)
        for chunk in chunks:
            first += chunk
        return first

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        message = self.said("Think: what is 3^3?", stream=stream)
        assert message.usage_metadata["output_token_details"]["reasoning"] > 0
        return message

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        for _ in range(2):
            message = self.said("What was said before?", stream=stream)
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message


class TestChatCompletions(OpenAI):
    own: ClassVar = {"stream_usage": True}


class TestResponses(OpenAI):
    own: ClassVar = {"use_responses_api": True}
