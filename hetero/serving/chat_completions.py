"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.serving import answers
from hetero.serving.answer_parser import AnswerPart, Piece, whole_parts
from hetero.serving.answers import (
    DONE,
    AnswerChoice,
    AnswerOptions,
    ParserMaker,
    StreamWriter,
    fill_template,
    split_template,
    sse,
    usage,
)
from hetero.serving.errors import ApiError
from hetero.serving.messages import Done, Run, TokenEvent
from hetero.serving.requests import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Guided,
    NotDone,
    Penalties,
    Request,
    TokenLimit,
    checked_grammar,
    most_tokens,
    seconds,
)
from hetero.serving.served_models import acquire
from hetero.serving.state import State, characters_of
from hetero.serving.template_chat import (
    checked_variables,
    plain_messages,
    rendered,
    texts_of,
    thinking_variables,
)
from hetero.serving.tools import ToolUse, tool_use

router = APIRouter()


class StreamOptions(Request):
    """`stream_options`."""

    include_usage: bool | None = False


class TemplateOptions(Request):
    """The fields by which messages become a prompt."""

    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def continues(self) -> bool:
        """Return whether an answer that was begun is to be continued.

        It is unless a field says otherwise, as in llama-server.
        """
        if self.continue_final_message is not None:
            return self.continue_final_message
        return not self.add_generation_prompt

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template. Raises `ApiError`."""
        own = checked_variables(self.chat_template_kwargs)
        return thinking_variables(self.reasoning_effort) | own

    def check_last(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raise `ApiError` where the last message cannot be continued as asked."""
        if self.continue_final_message and messages[-1].get("role") != "assistant":
            raise ApiError(
                400,
                "continue_final_message is for a last message of the assistant",
                param="continue_final_message",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "add_generation_prompt begins an answer, continue_final_message goes on with one: "
                "set one of them",
                param="continue_final_message",
            )


class ChatRequest(TemplateOptions, Penalties, Guided):
    """OpenAI's request, with extensions of vLLM and llama-server."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: NotDone = None
    function_call: NotDone = None
    modalities: list[str] | None = None
    audio: NotDone = None
    moderation: NotDone = None
    web_search_options: NotDone = None
    cache_salt: str = Field("", max_length=1000)
    id_slot: int = -1
    reasoning_budget: int | None = Field(None, ge=-1)

    def check(self) -> None:
        """Raise `ApiError` for fields that are not supported, or not together."""
        self.check_last(self.messages)
        if (self.modalities or ["text"]) != ["text"]:
            raise ApiError(400, "answers are text here: leave modalities out", param="modalities")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
    """Return the next message of a conversation."""
    body.check()
    state = await acquire(request, body.model)
    model = state.named(body.model)
    use = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    wanted = await _wanted(state, body, use)
    schema = body.answer_schema() if use.schemas else None
    parser = await answers.parser_of(state, use, wanted, body.reasoning_budget, schema)
    head = {"id": f"chatcmpl-{secrets.token_hex(16)}", "created": seconds(), "model": model}
    head["system_fingerprint"] = state.engine.about["plan_id"]
    if body.stream:
        writer = _Writer(state, body, head, parser)
        return await answers.streamed(state, request, wanted, writer)
    answer = await answers.gather(state, request, wanted, parser)
    choices = [
        _choice(state, i, choice, logprobs=bool(body.logprobs))
        for i, choice in enumerate(answer.choices)
    ]
    return answers.answer_json(
        {
            **head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(answer.end, sum(x.reasoning_tokens for x in answer.choices)),
            "hetero": answer.end.about,
        }
    )


async def _wanted(state: State, body: ChatRequest, use: ToolUse) -> AnswerOptions:
    messages = plain_messages(body.messages)
    await state.check_length(texts_of(messages), "messages")
    tokens = await state.texts(
        rendered,
        state,
        messages,
        use,
        body.variables(),
        continues=body.continues,
        characters=characters_of([messages, use.functions]),
    )
    answers.check_room(state, tokens, "messages")
    options = (
        body.options(state.sampling)
        | body.without_ends(state.model.eos_ids)
        | {
            "chat": True,
            "max_tokens": most_tokens(
                body.max_completion_tokens, body.max_tokens, default=state.max_seq_len
            ),
        }
    )
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    grammar = await state.texts(body.wanted_grammar) if body.guided else ""
    if use.forced and grammar:
        raise ApiError(400, "a call of a tool has a schema of its own: give no other")
    if use.schemas and body.answer_schema() is not None:
        grammar = ""  # of the answer or a call: `answers.parser_of`
    return AnswerOptions(
        tokens=tokens,
        options=options,
        choices=body.n or 1,
        salt=body.cache_salt,
        slot=state.check_slot(body.id_slot),
        grammar=await checked_grammar(state, grammar),
    )


def _choice(state: State, index: int, choice: AnswerChoice, *, logprobs: bool) -> dict[str, Any]:
    parts = whole_parts(choice.parts)
    text, thoughts = (
        "".join(part.text for part in parts if part.kind == kind) for kind in ("text", "thought")
    )
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls := [call_json(part) for part in parts if part.kind == "call"]:
        message["content"] = text or None
        message["tool_calls"] = calls
    scores = None
    if logprobs:
        scores = {"content": [score(state, *x) for x in choice.logprobs], "refusal": None}
    finish = choice.reason
    return {"index": index, "message": message, "logprobs": scores, "finish_reason": finish}


def call_json(call: AnswerPart) -> dict[str, Any]:
    """Return a tool call in the form of chat completions."""
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}


def score(state: State, token: int, scored: Sequence[Any]) -> dict[str, Any]:
    """Return a token's log-probability, and the alternatives'."""
    logprob, top = scored
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


class ChunkWriter(StreamWriter):
    """A writer of the chunks of OpenAI's two completions protocols.

    The last choice ends once its text is stored.
    """

    content = ""  # key of a choice's text

    def __init__(
        self,
        head: dict[str, Any],
        choices: int,
        options: StreamOptions | None,
        parser: ParserMaker | None = None,
    ) -> None:
        super().__init__(choices, *([] if parser is None else [parser]))
        self._head, self._usage = head, bool(options is not None and options.include_usage)
        count = len(self._choices)
        self._templates = [split_template(partial(self._text, i)) for i in range(count)]

    def token(self, event: TokenEvent) -> list[bytes]:
        """Return the token's chunk, and the one that ends a choice before the last."""
        lines = super().token(event)
        if event.finish and event.choice < len(self._choices) - 1:
            lines.append(self._last(event.choice))
        return lines

    async def end(self, end: Done) -> list[bytes]:
        """Return the last choice's end, and usage if requested."""
        lines = [self._last(len(self._choices) - 1, end.about)]
        if self._usage:
            counts = usage(end, self.reasoning_tokens)
            record = self._head | {"choices": [], "usage": counts, "hetero": end.about}
            lines.append(sse(record))
        return [*lines, DONE]

    def _delta(self, event: TokenEvent) -> list[bytes]:
        return [self._text(event.choice, event.text, event)]

    def _deltas(self, run: Run) -> list[bytes]:
        return fill_template(self._templates[run.choice], run.texts)

    @abstractmethod
    def _text(self, index: int, text: str, event: TokenEvent | None = None) -> bytes:
        """Return the event of a text."""

    @abstractmethod
    def _last(self, index: int, about: dict[str, Any] | None = None) -> bytes:
        """Return the event that ends a choice."""

    def _chunk(
        self,
        index: int,
        content: Any,
        scores: dict[str, Any] | None = None,
        *,
        finish: str | None = None,
        about: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, self.content: content, "logprobs": scores}
        record: dict[str, Any] = self._head | {"choices": [choice | {"finish_reason": finish}]}
        if self._usage:
            record["usage"] = None
        if about is not None:
            record["hetero"] = about
        return sse(record)


class _Writer(ChunkWriter):
    content = "delta"

    def __init__(
        self, state: State, body: ChatRequest, head: dict[str, Any], parser: ParserMaker
    ) -> None:
        self._state = state
        head = {**head, "object": "chat.completion.chunk"}
        super().__init__(head, body.n or 1, body.stream_options, parser)
        self._unsent = [list[dict[str, Any]]() for _ in self._choices]  # scores of kept-back text

    def begin(self) -> list[bytes]:
        """Return a chunk with the role of each choice."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk(i, role) for i in range(len(self._choices))]

    def _text(self, index: int, text: str, event: TokenEvent | None = None) -> bytes:
        scores = None
        if event is not None and event.logprob is not None:
            scores = [score(self._state, event.token, event.logprob)]
        return self._scored_chunk(index, {"content": text}, scores)

    def _last(self, index: int, about: dict[str, Any] | None = None) -> bytes:
        scores, self._unsent[index] = self._unsent[index], []
        finish = self._choices[index].reason
        return self._scored_chunk(index, {}, scores, finish=finish, about=about)

    def _scored_chunk(
        self, index: int, content: Any, scores: list[dict[str, Any]] | None, **options: Any
    ) -> bytes:
        record = {"content": scores, "refusal": None} if scores else None
        return self._chunk(index, content, record, **options)

    def _taken_apart(self, event: TokenEvent | Run, pieces: list[Piece]) -> list[bytes]:
        if isinstance(event, TokenEvent) and event.logprob is not None and not event.end:
            self._unsent[event.choice].append(score(self._state, event.token, event.logprob))
        return super()._taken_apart(event, pieces)

    def _piece(self, index: int, piece: Piece) -> list[bytes]:
        part, scores = piece.part, self._unsent[index]
        self._unsent[index] = []
        match part.kind:
            case "text":
                content: dict[str, Any] = {"content": piece.text}
            case "thought":
                content = {"reasoning_content": piece.text}
            case "call":
                calls = [x for x in self._choices[index].parts if x.kind == "call"]
                number = next(i for i, call in enumerate(calls) if call is part)
                delta: dict[str, Any] = {"function": {"arguments": piece.text}}
                if piece.begins:
                    delta = call_json(replace(part, text=piece.text))
                content = {"tool_calls": [{"index": number, **delta}]}
        return [self._scored_chunk(index, content, scores)]
