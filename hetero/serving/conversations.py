"""`/v1/conversations`: persistent contexts, with the items of their messages."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.serving import answers
from hetero.serving.errors import ApiError, missing
from hetero.serving.history import read_items
from hetero.serving.requests import Metadata, Request
from hetero.serving.responses import Page, listing
from hetero.serving.served_models import models_of, store_of

router = APIRouter()
MAX_ITEMS = 20
TURN_S: Final = 30.0  # of a delete for a request that loads a model, or stores its answer


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
    store = store_of(request)
    name, metadata = f"conv_{secrets.token_hex(16)}", body.metadata or {}
    created = await store.disk(
        store.records.new_conversation,
        request.state.app,
        name,
        metadata,
        read_items(body.items or [], "items"),
        models_of(request).served[0].options["contexts_per_app"],
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
    store = store_of(request)
    conversation = await store.disk(store.records.conversation, request.state.app, name)
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
    store = store_of(request)
    await store.disk(store.records.set_metadata, request.state.app, name, body.metadata)
    return answers.answer_json(await _found(request, name))


@router.delete("/v1/conversations/{name}")
async def delete_conversation(name: str, request: HttpRequest) -> Response:
    """Delete a conversation: its items, responses, keys and values are then off the disk.

    An answer that is being made in it ends with an error, and those that wait do not begin.
    """
    store, models = store_of(request), models_of(request)
    app: str = request.state.app
    await _found(request, name)
    key, context = (app, name), name.removeprefix("conv_")
    async with AsyncExitStack() as until_end:
        until_end.enter_context(store.turns.closing(key))
        models.end_answers(app, context)
        turn = until_end.enter_async_context(store.turns.of(key))
        try:
            async with asyncio.timeout(TURN_S):
                await answers.unless_disconnected(request, turn)
        except TimeoutError:
            raise ApiError(
                503,
                "a request in this conversation has not ended yet: delete it again later",
                code="conversation_busy",
                retry_s=5,
            ) from None
        await models.delete_context(app, context)
        if not await store.disk(store.records.delete_conversation, app, name):
            raise missing("conversation")
    return answers.answer_json({"id": name, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{name}/items")
async def read_items_of(
    name: str,
    request: HttpRequest,
    page: Annotated[Page, Query()],
) -> Response:
    """Return the items, the newest first unless `order` is asc."""
    store = store_of(request)
    await _found(request, name)
    items = await store.disk(store.records.items, request.state.app, name)
    return answers.answer_json(page.of(items))


@router.post("/v1/conversations/{name}/items")
async def add_items(name: str, body: ItemsRequest, request: HttpRequest) -> Response:
    """Append items to a conversation without an answer."""
    store = store_of(request)
    items = read_items(body.items, "items")
    app: str = request.state.app
    async with store.turns.of((app, name)):
        if not await store.disk(store.records.add_items, app, name, items):
            raise missing("conversation")
    return answers.answer_json(listing(items, more=False))


@router.get("/v1/conversations/{name}/items/{item}")
async def read_item(name: str, item: str, request: HttpRequest) -> Response:
    """Return one item of a conversation."""
    store = store_of(request)
    await _found(request, name)
    items = await store.disk(store.records.items, request.state.app, name)
    match = next((each for each in items if each["id"] == item), None)
    if match is None:
        raise missing("item")
    return answers.answer_json(match)


@router.delete("/v1/conversations/{name}/items/{item}")
async def delete_item(name: str, item: str, request: HttpRequest) -> Response:
    """Delete an item; keys and values of the old text are deleted with the next answer."""
    store = store_of(request)
    shown = await _found(request, name)
    app: str = request.state.app
    async with store.turns.of((app, name)):
        if not await store.disk(store.records.delete_item, app, name, item):
            raise missing("item")
    return answers.answer_json(shown)
