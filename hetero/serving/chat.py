"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.serving import answers
from hetero.serving.answers import DONE, Choice, Wanted, add, around, between, event, usage
from hetero.serving.errors import ApiError
from hetero.serving.messages import Finished, Run, Said
from hetero.serving.requests import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    Guided,
    Penalties,
    Request,
    checked_grammar,
    seconds,
)
from hetero.serving.state import State
from hetero.serving.tools import ToolCall, ToolUse, plain_messages, rendered, tool_use

router = APIRouter()


class StreamOptions(Request):
    """`stream_options`."""

    include_usage: bool | None = False


class ChatRequest(Penalties, Guided):
    """As OpenAI's, with what vLLM and llama-server add."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    cache_salt: str = Field("", max_length=1000)
    id_slot: int = -1

    def check(self) -> None:
        """Raise `ApiError` for what is not done here, or does not go together."""
        if self.functions or self.audio or (self.modalities or ["text"]) != ["text"]:
            raise ApiError(400, "functions (use tools), audio and other modalities: not done here")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
    """The next message of a conversation."""
    state: State = request.app.state.hetero
    body.check()
    model = state.check_model(body.model)
    use = tool_use(body.tools, body.tool_choice)
    wanted = await _wanted(state, body, use)
    head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": seconds(), "model": model}
    if body.stream:
        writer = _Writer(state, body, use, head)
        return await answers.streamed(state, request, wanted, writer)
    answer = await answers.gather(state, request, wanted)
    choices = [
        _choice(state, i, choice, use, logprobs=bool(body.logprobs))
        for i, choice in enumerate(answer.choices)
    ]
    return answers.answer_json(
        {
            **head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(answer.end),
            "system_fingerprint": state.engine.about["plan_id"],
            "hetero": answer.end.about,
        }
    )


async def _wanted(state: State, body: ChatRequest, use: ToolUse) -> Wanted:
    tokens = await state.texts(rendered, state, plain_messages(body.messages), use)
    answers.check_room(state, tokens, "messages")
    options = body.options() | {
        "chat": True,
        "max_tokens": body.max_completion_tokens or body.max_tokens or state.max_seq_len,
    }
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    grammar = await state.texts(body.wanted_grammar) if body.guided else ""
    if use.forced:
        if grammar:
            raise ApiError(400, "a call of a tool has a schema of its own: give no other")
        grammar = await state.texts(use.grammar)
    return Wanted(
        tokens=tokens,
        options=options,
        choices=body.n or 1,
        salt=body.cache_salt,
        slot=state.check_slot(body.id_slot),
        grammar=await checked_grammar(state, grammar),
    )


def _choice(
    state: State, index: int, choice: Choice, use: ToolUse, *, logprobs: bool
) -> dict[str, Any]:
    text, calls = use.read(choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    finish = choice.finish
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [call_json(call) for call in calls]
        finish = "tool_calls"
    scores = None
    if logprobs:
        scores = {"content": [score(state, *x) for x in choice.logprobs], "refusal": None}
    return {"index": index, "message": message, "logprobs": scores, "finish_reason": finish}


def call_json(call: ToolCall) -> dict[str, Any]:
    """As chat completions show a call."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def score(state: State, token: int, found: Sequence[Any]) -> dict[str, Any]:
    """A token's log-probability, and the alternatives'."""
    logprob, top = found
    return _scored(state, token, logprob) | {
        "top_logprobs": [_scored(state, other, value) for other, value in top]
    }


def _scored(state: State, token: int, logprob: float) -> dict[str, Any]:
    data = state.token_bytes.of(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(data),
    }


class _Writer:
    """Chunks of a stream. The last choice ends when everything is where it is to be kept."""

    def __init__(self, state: State, body: ChatRequest, use: ToolUse, head: dict[str, Any]) -> None:
        self._state, self._body, self._use = state, body, use
        self._head = {**head, "object": "chat.completion.chunk"}
        options = body.stream_options
        self._usage = bool(options is not None and options.include_usage)
        self._buffers = bool(use.functions) and not use.silent
        self._choices = [Choice() for _ in range(body.n or 1)]
        self._places = {i: around(partial(self._content, i)) for i, _ in enumerate(self._choices)}

    def begin(self) -> list[bytes]:
        """See `answers.Writer`, as of all others."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in self._places]

    def said(self, said: Said) -> list[bytes]:
        """A chunk, unless there is nothing to tell."""
        choice, found = self._choices[said.choice], list[bytes]()
        add(choice, said)
        if self._buffers:
            if said.finish:
                found += self._told(said.choice, choice)
        elif said.text or (said.logprob is not None and not said.end):
            found.append(self._content(said.choice, said.text, said))
        if said.finish and said.choice < len(self._choices) - 1:
            found.append(self._last(said.choice, choice))
        return found

    def run(self, run: Run) -> list[bytes]:
        """Chunks that differ in their texts."""
        add(self._choices[run.choice], run)
        return [] if self._buffers else between(self._places[run.choice], run.texts)

    async def end(self, end: Finished) -> list[bytes]:
        """The last choice's end; usage, if asked for."""
        found = [self._last(len(self._choices) - 1, self._choices[-1], end.about)]
        if self._usage:
            record = self._head | {"choices": [], "usage": usage(end)}
            found.append(event(record | {"hetero": end.about}))
        return [*found, DONE]

    def failed(self, error: ApiError) -> bytes:
        """The error as it is elsewhere."""
        return event(error.body(""))

    def _content(self, index: int, text: str, said: Said | None = None) -> bytes:
        return self._chunk(index, {"content": text}, said)

    def _told(self, index: int, choice: Choice) -> list[bytes]:
        """A choice that may be a call, known when it is whole."""
        text, calls = self._use.read(choice.text)
        found = [self._chunk(index, {"content": text})] if text else []
        if calls:
            choice.finish = "tool_calls"
            deltas = [{"index": i, **call_json(call)} for i, call in enumerate(calls)]
            found.append(self._chunk(index, {"tool_calls": deltas}))
        return found

    def _last(self, index: int, choice: Choice, about: dict[str, Any] | None = None) -> bytes:
        return self._chunk(index, {}, finish=choice.finish, about=about)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        said: Said | None = None,
        *,
        finish: str | None = None,
        about: dict[str, Any] | None = None,
    ) -> bytes:
        scores = None
        if said is not None and said.logprob is not None:
            scores = {"content": [score(self._state, said.token, said.logprob)], "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        record = self._head | {"choices": [choice]}
        if self._usage:
            record["usage"] = None
        if about is not None:
            record["hetero"] = about
        return event(record)
