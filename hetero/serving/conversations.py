"""`/v1/conversations`: persistent contexts, with the items of their messages."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.serving import answers
from hetero.serving.errors import missing
from hetero.serving.history import read_items
from hetero.serving.requests import Metadata, Request
from hetero.serving.responses import listing
from hetero.serving.state import State

router = APIRouter()
MAX_ITEMS = 20


class ConversationRequest(Request):
    """A request for a new conversation."""

    items: list[dict[str, Any]] | None = Field(None, max_length=MAX_ITEMS)
    metadata: Metadata | None = Field(None, max_length=16)


class MetadataRequest(Request):
    """New metadata of a conversation."""

    metadata: Metadata = Field(max_length=16)


class ItemsRequest(Request):
    """Further items of a conversation."""

    items: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_ITEMS)


@router.post("/v1/conversations")
async def create_conversation(body: ConversationRequest, request: HttpRequest) -> Response:
    """Create a conversation, empty or with earlier items."""
    state: State = request.app.state.hetero
    name, metadata = f"conv_{secrets.token_hex(16)}", body.metadata or {}
    created = await state.disk(
        state.records.new_conversation,
        request.state.app,
        name,
        metadata,
        read_items(body.items or [], "items"),
        state.engine.about["contexts_per_app"],
    )
    return answers.answer_json(_shown(name, created, metadata))


def _shown(name: str, created: int, metadata: dict[str, str]) -> dict[str, Any]:
    return {
        "id": name,
        "object": "conversation",
        "created_at": created,
        "metadata": metadata,
    }


async def _found(request: HttpRequest, name: str) -> dict[str, Any]:
    state: State = request.app.state.hetero
    conversation = await state.disk(state.records.conversation, request.state.app, name)
    if conversation is None:
        raise missing("conversation")
    return _shown(name, conversation[0], conversation[1])


@router.get("/v1/conversations/{name}")
async def read_conversation(name: str, request: HttpRequest) -> Response:
    """Return a conversation's metadata."""
    return answers.answer_json(await _found(request, name))


@router.post("/v1/conversations/{name}")
async def update_conversation(name: str, body: MetadataRequest, request: HttpRequest) -> Response:
    """Replace a conversation's metadata."""
    state: State = request.app.state.hetero
    await state.disk(state.records.set_metadata, request.state.app, name, body.metadata)
    return answers.answer_json(await _found(request, name))


@router.delete("/v1/conversations/{name}")
async def delete_conversation(name: str, request: HttpRequest) -> Response:
    """Delete a conversation: its items, responses, keys and values are then off the disk."""
    state: State = request.app.state.hetero
    app: str = request.state.app
    await _found(request, name)
    await state.engine.control(app, "delete_context", context=name.removeprefix("conv_"))
    if not await state.disk(state.records.delete_conversation, app, name):
        raise missing("conversation")
    return answers.answer_json({"id": name, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{name}/items")
async def read_items_of(
    name: str,
    request: HttpRequest,
    limit: int = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Return the items, the newest first unless `order` is asc."""
    state: State = request.app.state.hetero
    await _found(request, name)
    items = await state.disk(state.records.items, request.state.app, name)
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise missing("item", "after")
        items = items[at + 1 :]
    most = max(min(limit, 100), 1)
    return answers.answer_json(listing(items[:most], more=len(items) > most))


@router.post("/v1/conversations/{name}/items")
async def add_items(name: str, body: ItemsRequest, request: HttpRequest) -> Response:
    """Append items to a conversation without an answer."""
    state: State = request.app.state.hetero
    items = read_items(body.items, "items")
    app: str = request.state.app
    async with state.turns.of((app, name)):
        if not await state.disk(state.records.add_items, app, name, items):
            raise missing("conversation")
    return answers.answer_json(listing(items, more=False))


@router.get("/v1/conversations/{name}/items/{item}")
async def read_item(name: str, item: str, request: HttpRequest) -> Response:
    """Return one item of a conversation."""
    state: State = request.app.state.hetero
    await _found(request, name)
    items = await state.disk(state.records.items, request.state.app, name)
    match = next((each for each in items if each["id"] == item), None)
    if match is None:
        raise missing("item")
    return answers.answer_json(match)


@router.delete("/v1/conversations/{name}/items/{item}")
async def delete_item(name: str, item: str, request: HttpRequest) -> Response:
    """Delete an item; keys and values of the old text are deleted with the next answer."""
    state: State = request.app.state.hetero
    shown = await _found(request, name)
    app: str = request.state.app
    async with state.turns.of((app, name)):
        if not await state.disk(state.records.delete_item, app, name, item):
            raise missing("item")
    return answers.answer_json(shown)
