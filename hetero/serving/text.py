"""Text, tokens and facts: tokenizer endpoints in vLLM's and llama-server's spelling; health."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hetero.models.tokenizer import HfTokenizer
from hetero.serving.chat_completions import TemplateOptions
from hetero.serving.errors import ApiError
from hetero.serving.metrics import EngineTotals
from hetero.serving.requests import Request, Token
from hetero.serving.responses import listing
from hetero.serving.served_models import ServedModel, acquire, models_of
from hetero.serving.state import State, characters_of
from hetero.serving.template_chat import plain_messages, rendered
from hetero.serving.tools import tool_use

router = APIRouter()


class TokenizeRequest(TemplateOptions):
    """A text (`prompt`, or llama-server's `content`), or messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = False
    with_pieces: bool | None = False


class DetokenizeRequest(Request):
    """Token ids."""

    model: str | None = None
    tokens: list[Token]


class TemplateRequest(TemplateOptions):
    """Messages."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(request: HttpRequest) -> Response:
    """Return whether the server answers."""
    if models_of(request).ending:
        raise ApiError(503, "the server is ending", retry_s=1)
    return JSONResponse({"status": "ok"})


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def models(request: HttpRequest) -> Response:
    """Return the models, each by all of its names."""
    served = models_of(request).served
    cards = [_card(model, name) for model in served for name in model.state.names if name != "*"]
    return JSONResponse(listing(cards, more=False))


@router.get("/v1/models/{name:path}")
async def model_of_name(name: str, request: HttpRequest) -> Response:
    """Return the model of one name."""
    return JSONResponse(_card(models_of(request).find(name), name))


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    state = model.state
    status = {"value": model.status} | ({"failed": True} if model.failed else {})
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "type": "model",  # as Anthropic's API has it, with the next two
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, UTC).isoformat(),
        "owned_by": "hetero",
        "root": state.model.name,
        "parent": None,
        "max_model_len": state.engine.about.get("max_seq_len"),
        "status": status,
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: HttpRequest) -> Response:
    """Return the ids of a text or of messages.

    A text gets what the model expects around a prompt, unless `add_special_tokens` is false;
    `content` only if `add_special` is true.
    """
    state = await acquire(request, body.model)
    given = [x for x in (body.prompt, body.content, body.messages) if x is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of prompt, content and messages", param="prompt")
    return await state.texts(
        _tokenized, state, body, characters=characters_of([*given, body.tools])
    )


def _tokenized(state: State, body: TokenizeRequest) -> Response:
    if body.messages is not None:
        tokens = _prompt(state, body, body.messages, body.tools)
    else:
        special = bool(body.add_special) if body.prompt is None else body.add_special_tokens
        text = body.content if body.prompt is None else body.prompt
        tokens = state.model.tokenizer.encode(text or "", add_special_tokens=special is not False)
    record: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": state.max_seq_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        record["token_strs"] = [state.token_text(token) for token in tokens]
    if body.with_pieces:
        record["tokens"] = [{"id": x, "piece": _shown(state.token_bytes.of(x))} for x in tokens]
    return JSONResponse(record)


def _shown(data: bytes) -> str | list[int]:
    """Return a token's text, or its bytes where they are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> Response:
    """Return the text of ids."""
    state = await acquire(request, body.model)
    most = state.model.config.vocab_size
    if any(token >= most for token in body.tokens):
        raise ApiError(400, f"a token id is below {most}", param="tokens")
    text = await _decoded(state, body.tokens)
    return JSONResponse({"prompt": text, "content": text})


async def _decoded(state: State, tokens: list[int]) -> str:
    return await state.texts(
        state.model.tokenizer.decode, tokens, skip_special_tokens=False, characters=len(tokens)
    )


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, request: HttpRequest) -> Response:
    """Return the prompt of messages."""
    state = await acquire(request, body.model)
    size = characters_of([body.messages, body.tools])
    tokens = await state.texts(_prompt, state, body, body.messages, body.tools, characters=size)
    return JSONResponse({"prompt": await _decoded(state, tokens)})


def _prompt(
    state: State,
    body: TemplateOptions,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> list[int]:
    """Return the tokens of messages as chat completions answer them."""
    body.check_last(messages)
    variables = body.variables()
    if body.add_generation_prompt is False:
        variables["add_generation_prompt"] = False
    plain, use = plain_messages(messages), tool_use(tools, None)
    return rendered(state, plain, use, variables, continues=body.continues)


@router.get("/tokenizer_info")
async def tokenizer_info(request: HttpRequest, model: str | None = None) -> Response:
    """Return facts about the tokenizer."""
    state = await acquire(request, model)
    tokenizer = state.model.tokenizer
    special = tokenizer.special_tokens if isinstance(tokenizer, HfTokenizer) else {}
    return JSONResponse(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "eos_token_ids": list(state.model.eos_ids),
            "bos_token_id": tokenizer.bos_id,
            "model_max_length": state.max_seq_len,
            "chat_template": state.template or None,
            **special,
        }
    )


@router.get("/metrics")
async def metrics(request: HttpRequest) -> Response:
    """Return the metrics for Prometheus."""
    models = models_of(request)
    engines: dict[str, EngineTotals | None] = {}
    for model in models.served:
        engines[model.name] = None
        if models.look(model, request.state.leases):
            engine = model.state.engine
            engines[model.name] = await engine.control("", "totals"), engine.waiting.total()
    text = models.metrics.text(engines)
    return Response(text, media_type="text/plain; version=0.0.4")
