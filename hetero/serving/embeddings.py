"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.models.pooling import pooling_of
from hetero.serving import answers
from hetero.serving.errors import ApiError, too_long
from hetero.serving.requests import Inputs, Request, inputs
from hetero.serving.served_models import acquire
from hetero.serving.state import State

router = APIRouter()
MAX_INPUTS = 2048  # OpenAI's


class EmbeddingRequest(Request):
    """OpenAI's request."""

    model: str | None = None
    input: Inputs = Field(description="A text, token ids, or several of them.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)


@router.post("/v1/embeddings")
async def embed(body: EmbeddingRequest, request: HttpRequest) -> Response:
    """Return the embeddings of texts, each of length 1."""
    state = await acquire(request, body.model)
    model = state.named(body.model)
    width = state.model.config.hidden_size
    if body.dimensions is not None and body.dimensions > width:
        raise ApiError(
            400,
            f"an embedding of this model has {width} dimensions: ask for fewer",
            param="dimensions",
        )
    pooling = await state.texts(pooling_of, state.model.source, state.pooling)
    texts = await _tokens(state, inputs(body.input, MAX_INPUTS, "input"))
    answer = await answers.unless_disconnected(
        request,
        state.engine.embed(
            request.state.app, texts=texts, pooling=pooling, dimensions=body.dimensions or 0
        ),
    )
    count = sum(map(len, texts))
    state.metrics.embedded(state.model.name, count, answer.queued_s)
    coded = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": x if coded else _floats(x)}
        for i, x in enumerate(answer.embeddings)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return answers.answer_json({"object": "list", "data": data, "model": model, "usage": usage})


async def _tokens(state: State, given: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the token ids of inputs. Raises `ApiError`."""
    if not all(given):
        raise ApiError(400, "an input is empty: give some text", param="input")
    for text in given:
        if isinstance(text, str):
            await state.check_length([text], "input")
    texts = await state.all_encoded(given)
    for tokens in texts:
        if len(tokens) > state.max_seq_len:
            raise too_long(state.max_seq_len, f"and an input has {len(tokens)}", "input")
        answers.check_ids(state, tokens, "input")
    return texts


def _floats(data: str) -> list[Any]:
    floats: list[Any] = np.frombuffer(base64.b64decode(data), "<f4").tolist()
    return floats
