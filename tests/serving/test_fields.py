"""Each field that the official clients know is honoured, refused, or documented as harmless."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hetero.serving.anthropic import MessagesRequest
from hetero.serving.chat_completions import ChatRequest
from hetero.serving.completions import CompletionRequest
from hetero.serving.embeddings import EmbeddingRequest
from hetero.serving.responses import ResponseRequest
from tests.serving.servers import Server

PAGE = Path(__file__).parents[2] / "docs/reference/http-api.md"
SDKS: list[tuple[type[BaseModel], str]] = [
    (ChatRequest, "openai.types.chat.completion_create_params:CompletionCreateParamsBase"),
    (CompletionRequest, "openai.types.completion_create_params:CompletionCreateParamsBase"),
    (ResponseRequest, "openai.types.responses.response_create_params:ResponseCreateParamsBase"),
    (EmbeddingRequest, "openai.types.embedding_create_params:EmbeddingCreateParams"),
    (MessagesRequest, "anthropic.types.message_create_params:MessageCreateParamsBase"),
    (MessagesRequest, "anthropic.types.beta.message_create_params:MessageCreateParamsBase"),
]
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def harmless() -> set[str]:
    """The names in the list of fields that change nothing."""
    section = PAGE.read_text(encoding="utf-8").split("## Fields that change nothing")[1]
    listed = section.split("\n## ")[0].split("and of the known ones these:")[1]
    return set(re.findall(r"`(\w+)`", listed))


@pytest.mark.parametrize(("model", "params"), SDKS)
@pytest.mark.few(6)
def test_every_known_field_is_accounted_for(model: type[BaseModel], params: str) -> None:
    module, _, name = params.partition(":")
    known = set(getattr(pytest.importorskip(module), name).__annotations__)
    fields = model.model_fields
    ours = {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert known - ours - harmless() == set()


def test_no_harmless_field_is_made_up() -> None:
    known = {
        field
        for _, params in SDKS
        for module, _, name in [params.partition(":")]
        for field in getattr(pytest.importorskip(module), name).__annotations__
    }
    assert harmless() - known <= {"truncation"}


@pytest.mark.parametrize(
    ("path", "body", "change"),
    [
        ("/v1/chat/completions", CHAT, {"functions": [{"name": "go"}]}),
        ("/v1/chat/completions", CHAT, {"function_call": "auto"}),
        ("/v1/chat/completions", CHAT, {"audio": {"voice": "x", "format": "wav"}}),
        ("/v1/chat/completions", CHAT, {"web_search_options": {"user_location": None}}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}, {"suffix": "y"}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}, {"background": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}, {"prompt": {"id": "p"}}),
        ("/v1/messages", CHAT, {"mcp_servers": [{"type": "url", "name": "x", "url": "y"}]}),
        (
            "/v1/messages/count_tokens",
            CHAT,
            {"mcp_servers": [{"type": "url", "name": "x", "url": "y"}]},
        ),
        ("/v1/messages", CHAT, {"container": "x"}),
    ],
)
@pytest.mark.few(9)
def test_what_is_not_done_is_refused(
    server: Server, path: str, body: dict[str, Any], change: dict[str, Any]
) -> None:
    with server.client() as client:
        assert client.post(path, json={**body, **dict.fromkeys(change)}).status_code == 200
        refused = client.post(path, json={**body, **change})
    assert refused.status_code == 400
    error = refused.json()["error"]
    details = error.get("details") or {}
    code = error.get("code") or details.get("error_code")
    assert code == "unsupported_parameter", error
    assert f"`{next(iter(change))}` is not done here" in error["message"]
