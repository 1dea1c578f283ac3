"""Answers as the endpoints need them: asked for, gathered or streamed, given up with the client."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hetero.serving.engine_client import Question
from hetero.serving.errors import ApiError
from hetero.serving.messages import Finished, Run, Said
from hetero.serving.state import State

T = TypeVar("T")
DONE: Final = b"data: [DONE]\n\n"  # what OpenAI's streams end with
_json: Final = json.JSONEncoder(separators=(",", ":")).encode  # one for all events


@dataclass(kw_only=True)
class Wanted:
    """An `Ask` before it has a number; fields as there."""

    tokens: list[int]
    options: dict[str, Any]
    choices: int = 1
    context: str = ""
    salt: str = ""
    slot: int = -1
    grammar: str = ""


@dataclass
class Choice:
    """One of an answer's texts. `logprobs` are (id, [log-probability, alternatives])."""

    texts: list[str] = field(default_factory=list)  # piece by piece
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, list[Any]]] = field(default_factory=list)
    finish: str = ""
    ended: bool = False  # by a token, not by a stop text or a limit

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(self.texts)


@dataclass
class Answer:
    """All of them, with what the engine said at the end."""

    choices: list[Choice]
    end: Finished


class GoneError(Exception):
    """The client went away: nobody reads an answer."""


async def gather(state: State, request: Request, wanted: Wanted) -> Answer:
    """The whole answer. Raises `ApiError`, and `GoneError` where the client has gone."""
    question = await _ask(state, request, wanted)
    try:
        return await unless_gone(request, _whole(state, question, wanted.choices))
    finally:
        question.close()


async def _whole(state: State, question: Question, choices: int) -> Answer:
    found = [Choice() for _ in range(choices)]
    while True:
        for event in await question.told():
            if isinstance(event, Finished):
                state.metrics.answered(event)
                return Answer(found, event)
            add(found[event.choice], event)


def add(choice: Choice, said: Said | Run) -> None:
    """A piece more, or several."""
    if isinstance(said, Run):
        choice.texts += said.texts
        choice.tokens += said.tokens
        return
    choice.texts.append(said.text)
    if not said.end:
        choice.tokens.append(said.token)
        if said.logprob is not None:
            choice.logprobs.append((said.token, said.logprob))
    if said.finish:
        choice.finish = "stop" if said.finish == "stop" else "length"
        choice.ended = said.end


class Writer(Protocol):
    """Makes server-sent events of what the engine says to one question."""

    def begin(self) -> list[bytes]:
        """What is sent before anything was said."""

    def said(self, said: Said) -> list[bytes]:
        """Of one piece."""

    def run(self, run: Run) -> list[bytes]:
        """Of several, an event each: what `said` would make of them."""

    async def end(self, end: Finished) -> list[bytes]:
        """The last ones."""

    def failed(self, error: ApiError) -> bytes:
        """Of what went wrong in the middle."""


async def streamed(state: State, request: Request, wanted: Wanted, writer: Writer) -> Response:
    """The answer as server-sent events. What is refused before its first token has a status of its
    own; what fails later is an event.
    """
    question = await _ask(state, request, wanted)
    try:
        first = await unless_gone(request, question.told())
    except BaseException:
        question.close()
        raise

    async def bodies() -> AsyncIterator[bytes]:
        """Events that came together, in one piece."""
        lines, told = writer.begin(), first
        try:
            while told:
                for event in told:
                    if isinstance(event, Run):
                        lines += writer.run(event)
                    elif isinstance(event, Said):
                        lines += writer.said(event)
                    else:
                        state.metrics.answered(event)
                        lines += await writer.end(event)
                if lines:
                    yield b"".join(lines)
                lines = []
                told = await question.told()
        except ApiError as error:
            yield b"".join([*lines, writer.failed(error)])

    return _EventStream(bodies(), question)


class _EventStream(StreamingResponse):
    """Gives the question up with the client, whether or not a byte was ever sent."""

    def __init__(self, bodies: AsyncIterator[bytes], question: Question) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(bodies, media_type="text/event-stream", headers=headers)
        self._question = question

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._question.close()


def around(make: Callable[..., bytes], values: int = 1) -> list[bytes]:
    """What `make` puts around so many values of its record, whatever they are: events that differ
    in those need not be made one by one.
    """
    marks = [secrets.token_hex(16) for _ in range(values)]
    rest, parts = make(*marks), list[bytes]()
    for mark in marks:
        before, rest = rest.split(f'"{mark}"'.encode())
        parts.append(before)
    return [*parts, rest]


def between(parts: Sequence[bytes], texts: Sequence[str]) -> list[bytes]:
    """What that `make` would make of each text that is not empty, in one piece."""
    told = [quoted(text).encode() for text in texts if text]
    before, behind = parts
    return [before + (behind + before).join(told) + behind] if told else []


def event(record: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_json(record)}\n\n".encode()


def answer_json(record: dict[str, Any]) -> JSONResponse:
    """A response."""
    return JSONResponse(record)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled, and `GoneError` raised, when the client goes before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return await task
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _ask(state: State, request: Request, wanted: Wanted) -> Question:
    check_room(state, wanted.tokens)
    return await state.engine.ask(request.state.app, **vars(wanted))


def check_room(state: State, tokens: Sequence[int], param: str = "prompt") -> None:
    """Raise `ApiError` for a prompt that no answer fits behind, or that is none."""
    most = state.max_seq_len
    if not tokens:
        raise ApiError(400, "the prompt is empty: give some text to go on from", param=param)
    if len(tokens) >= most:
        raise ApiError(
            400,
            f"this model's context has {most} tokens, for prompt and answer together, and the "
            f"prompt alone has {len(tokens)}: shorten it",
            param=param,
            code="context_length_exceeded",
        )
    vocabulary = state.model.config.vocab_size
    bad = next((x for x in tokens if not 0 <= x < vocabulary), None)
    if bad is not None:
        raise ApiError(
            400, f"token id {bad} is outside the vocabulary of {vocabulary}", param=param
        )


def usage(end: Finished) -> dict[str, Any]:
    """As OpenAI's completions count."""
    prompt, completion = end.usage["prompt_tokens"], end.usage["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": end.usage["cached_tokens"]},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
