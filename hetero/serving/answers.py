"""Answers for the endpoints: submit, gather or stream, and cancel with the client."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hetero.serving.answer_parser import AnswerParser, AnswerPart, Piece
from hetero.serving.engine_client import AnswerStream
from hetero.serving.errors import ApiError, missing, too_long
from hetero.serving.messages import Done, Run, TokenEvent
from hetero.serving.requests import checked_grammar
from hetero.serving.state import State
from hetero.serving.tools import ToolUse

log = logging.getLogger("hetero.serving")
T = TypeVar("T")
DONE: Final = b"data: [DONE]\n\n"  # what OpenAI's streams end with
_json: Final = json.JSONEncoder(separators=(",", ":")).encode  # one for all events


@dataclass(kw_only=True)
class AnswerOptions:
    """The fields of a `GenerateRequest` that an endpoint decides."""

    tokens: list[int]
    options: dict[str, Any]
    choices: int = 1
    context: str = ""
    salt: str = ""
    slot: int = -1
    grammar: str = ""
    thoughts: dict[str, Any] = field(default_factory=dict)


ParserMaker: TypeAlias = Callable[[], AnswerParser | None]


async def parser_of(
    state: State,
    use: ToolUse,
    wanted: AnswerOptions,
    budget: int | None = None,
    schema: Any = None,
) -> ParserMaker:
    """Return a maker of the parser of each choice; of None where an answer can be only text.

    An answer under another grammar is not taken apart. Sets the options that the parser needs, the
    grammar of calls, or answers of `schema` if given, and the limit of thoughts: so many
    tokens, else the server's. Raises `ApiError`.
    """
    form, schemas, bare = state.answer_form, use.schemas, True
    if wanted.grammar or not (schemas or form.thoughts or form.channels):
        return _no_parser
    closes = form.begun_in(wanted.tokens, state.model.tokenizer)
    if use.constrains or (schemas and schema is not None):
        made = await state.texts(state.call_writer.grammar, use, closes, schema)
        form, bare = made.form, made.bare
        wanted.grammar = await checked_grammar(state, made.text)
    wanted.options["shown_tokens"] = sorted(form.shown)
    budget = state.reasoning_budget if budget is None else budget
    if form.thoughts and budget >= 0:
        wanted.thoughts = _limit(state, budget, begun=bool(closes))
    return partial(AnswerParser, form, schemas, closes=closes, bare=bare)


def _limit(state: State, tokens: int, *, begun: bool) -> dict[str, Any]:
    """Return the fields of a `ThoughtLimit`."""
    begin, end = state.answer_form.thoughts[0]
    texts = {"begin": begin, "end": end, "forced": f"\n{end}\n\n"}
    encode = partial(state.model.tokenizer.encode, add_special_tokens=False)
    return {name: encode(text) for name, text in texts.items()} | {
        "tokens": tokens,
        "begun": begun,
    }


def _no_parser() -> None:
    return None


@dataclass
class AnswerChoice:
    """One text of an answer. `logprobs` are (id, [log-probability, alternatives]).

    `parser` takes it apart, `reasoning_tokens` counts what was thought.
    """

    texts: list[str] = field(default_factory=list)  # deltas, in order
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, list[Any]]] = field(default_factory=list)
    finish: str = ""
    ended: bool = False  # by a token, not by a stop text or a limit
    parser: AnswerParser | None = None
    reasoning_tokens: int = 0

    @property
    def text(self) -> str:
        """Return the whole text so far."""
        return "".join(self.texts)

    @property
    def parts(self) -> list[AnswerPart]:
        """Return the parts so far, as they are streamed."""
        if self.parser is None:
            return [AnswerPart("text", self.text)]
        return self.parser.parts

    @property
    def calls(self) -> list[AnswerPart]:
        """Return the calls that are complete."""
        return [part for part in self.parts if part.kind == "call" and part.whole]

    @property
    def reason(self) -> str:
        """Return OpenAI's `finish_reason`."""
        cut = any(not part.whole for part in self.parts)
        return "tool_calls" if self.calls and not cut else self.finish

    def add(self, event: TokenEvent | Run) -> list[Piece]:
        """Append one delta, or several. Return the pieces of the parts, if it is taken apart."""
        if isinstance(event, Run):
            self.texts += event.texts
            self.tokens += event.tokens
            return [piece for text in event.texts for piece in self._parsed(text)]
        self.texts.append(event.text)
        if not event.end:
            self.tokens.append(event.token)
            if event.logprob is not None:
                self.logprobs.append((event.token, event.logprob))
        if event.finish:
            self.finish = "stop" if event.finish == "stop" else "length"
            self.ended = event.end
        return self._parsed(event.text, last=bool(event.finish))

    def _parsed(self, text: str, *, last: bool = False) -> list[Piece]:
        if self.parser is None:
            return []
        thinking = self.parser.thinking
        pieces = self.parser.feed(text, last=last)
        self.reasoning_tokens += thinking or self.parser.thinking
        return pieces


@dataclass
class Answer:
    """All texts of an answer, and the engine's last message about it."""

    choices: list[AnswerChoice]
    end: Done


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was complete."""


async def gather(
    state: State, request: Request, wanted: AnswerOptions, parser: ParserMaker = _no_parser
) -> Answer:
    """Return the whole answer, each choice taken apart by a parser of its own.

    Raises `ApiError`, and `ClientDisconnectedError` where the client disconnected.
    """
    stream = await _submit(state, request, wanted)
    try:
        return await unless_disconnected(request, _whole(state, stream, wanted.choices, parser))
    finally:
        stream.close()


async def _whole(state: State, stream: AnswerStream, count: int, parser: ParserMaker) -> Answer:
    choices = [AnswerChoice(parser=parser()) for _ in range(count)]
    while True:
        for event in await stream.events():
            if isinstance(event, Done):
                thoughts = sum(x.reasoning_tokens for x in choices)
                state.metrics.answered(state.model.name, event, thoughts)
                return Answer(choices, event)
            choices[event.choice].add(event)


class StreamWriter(ABC):
    """An encoder of one answer's events as server-sent events; each protocol has a subclass.

    A choice that a parser takes apart is sent in its pieces, one that is only text as it comes.
    """

    path = ""  # of the endpoint, for the form of its errors
    error_event = ""  # name of the event that an error is sent as

    def __init__(self, choices: int = 1, parser: ParserMaker = _no_parser) -> None:
        self._choices = [AnswerChoice(parser=parser()) for _ in range(choices)]

    @property
    def reasoning_tokens(self) -> int:
        """Return how many tokens of all choices were thoughts so far."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def begin(self) -> list[bytes]:
        """Return the events before the first token."""
        return []

    def token(self, event: TokenEvent) -> list[bytes]:
        """Return the events of one token."""
        choice = self._choices[event.choice]
        pieces = choice.add(event)
        if choice.parser is not None:
            return self._taken_apart(event, pieces)
        shown = event.text or (event.logprob is not None and not event.end)
        return self._delta(event) if shown else []

    def run(self, run: Run) -> list[bytes]:
        """Return the events of several tokens: the same bytes as `token` of each in turn."""
        choice = self._choices[run.choice]
        pieces = choice.add(run)
        return self._deltas(run) if choice.parser is None else self._taken_apart(run, pieces)

    def _taken_apart(self, event: TokenEvent | Run, pieces: list[Piece]) -> list[bytes]:
        return [line for piece in pieces for line in self._piece(event.choice, piece)]

    @abstractmethod
    async def end(self, end: Done) -> list[bytes]:
        """Return the last events."""

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error after the first token."""
        return sse(error.body(self.path), self.error_event)

    def _piece(self, index: int, piece: Piece) -> list[bytes]:  # noqa: ARG002
        """Return the events of a piece of a choice."""
        return []

    @abstractmethod
    def _delta(self, event: TokenEvent) -> list[bytes]:
        """Return the events of one token's text."""

    @abstractmethod
    def _deltas(self, run: Run) -> list[bytes]:
        """Return the events of several tokens' texts."""


class _InTurn:
    """The streams of several requests, one after the other, as one whose choices are numbered on.

    There is a `Done` for each request.
    """

    def __init__(self, state: State, request: Request, wanted: Sequence[AnswerOptions]) -> None:
        self._submit = partial(_submit, state, request)
        self._wanted, self._first = list(wanted), 0  # choice of the request that is answered
        self._stream: AnswerStream | None = None

    async def events(self) -> list[TokenEvent | Run | Done]:
        """Return the events so far, at least one; none after the last `Done`.

        Raises `ApiError` as `AnswerStream.events` does, or where a request cannot be submitted.
        """
        while self._wanted:
            if self._stream is None:
                self._stream = await self._submit(self._wanted[0])
            if events := await self._stream.events():
                return [self._numbered(event) for event in events] if self._first else events
            self.close()
            self._first += self._wanted.pop(0).choices
        return []

    def _numbered(self, event: TokenEvent | Run | Done) -> TokenEvent | Run | Done:
        if isinstance(event, Done):
            return event
        return replace(event, choice=event.choice + self._first)

    def close(self) -> None:
        """Cancel what is answered; idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def server_fault(request: Request, error: Exception) -> ApiError:
    """Log a fault of the server; return the error that its client gets, with the request's id."""
    request_id = request.state.request_id
    log.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the server failed: see its own messages about {request_id}")


async def streamed(
    state: State,
    request: Request,
    wanted: AnswerOptions,
    writer: StreamWriter,
    until_end: AsyncExitStack | None = None,
    *,
    then: Sequence[AnswerOptions] = (),
) -> Response:
    """Return the answer as server-sent events, and those to the requests of `then` behind it.

    An error before the first token has a status of its own; a later one is an event. What
    `until_end` would close is closed when the response was sent, or its client is gone; where this
    raises, it is still the caller's.
    """
    stream = _InTurn(state, request, [wanted, *then])
    try:
        first = await unless_disconnected(request, stream.events())
    except BaseException:
        stream.close()
        raise

    async def bodies() -> AsyncIterator[bytes]:
        """Yield events that arrived together as one body."""
        lines, events = writer.begin(), first
        try:
            while events:
                for event in events:
                    if isinstance(event, Run):
                        lines += writer.run(event)
                    elif isinstance(event, TokenEvent):
                        lines += writer.token(event)
                    else:
                        state.metrics.answered(state.model.name, event, writer.reasoning_tokens)
                        lines += await writer.end(event)
                if lines:
                    yield b"".join(lines)
                lines = []
                events = await stream.events()
        except ApiError as error:
            yield b"".join([*lines, writer.failed(error)])
        except Exception as error:  # the status is sent already: the client learns of it here
            yield b"".join([*lines, writer.failed(server_fault(request, error))])

    until_end = AsyncExitStack() if until_end is None else until_end.pop_all()
    return _EventStream(bodies(), stream, until_end)


class _EventStream(StreamingResponse):
    """A response that cancels the answer when the client disconnects, sent or not."""

    def __init__(
        self, bodies: AsyncIterator[bytes], stream: _InTurn, until_end: AsyncExitStack
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(bodies, media_type="text/event-stream", headers=headers)
        self._stream, self._until_end = stream, until_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()
            await self._until_end.aclose()


def split_template(make: Callable[..., bytes], values: int = 1) -> list[bytes]:
    """Return the bytes that `make` puts around `values` values of its record.

    Events that differ only in those values are then not encoded one by one.
    """
    marks = [secrets.token_hex(16) for _ in range(values)]
    rest, parts = make(*marks), list[bytes]()
    for mark in marks:
        before, rest = rest.split(f'"{mark}"'.encode())
        parts.append(before)
    return [*parts, rest]


def fill_template(parts: Sequence[bytes], texts: Sequence[str]) -> list[bytes]:
    """Return what `make` would return for each non-empty text, concatenated."""
    encoded = [quoted(text).encode() for text in texts if text]
    before, behind = parts
    return [before + (behind + before).join(encoded) + behind] if encoded else []


def sse(record: Any, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_json(record)}\n\n".encode()


def answer_json(record: dict[str, Any]) -> JSONResponse:
    """Return a JSON response."""
    return JSONResponse(record)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`.

    Cancels it and raises `ClientDisconnectedError` when the client disconnects first.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return await task
    finally:
        for each in (task, disconnected):
            each.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _submit(state: State, request: Request, wanted: AnswerOptions) -> AnswerStream:
    keep = wanted.options.get("keep", 0)
    old = max(keep, wanted.options.get("old", 0))  # what the context may forget ends there
    check_room(state, [*wanted.tokens[:keep], *wanted.tokens[old:]])
    app: str = request.state.app
    # Nothing may be awaited between this and `submit`: what is submitted can be ended.
    if wanted.context and state.store.turns.is_closing((app, f"conv_{wanted.context}")):
        raise missing("conversation", "conversation")
    return await state.engine.submit(app, **vars(wanted))


def check_room(state: State, tokens: Sequence[int], param: str = "prompt") -> None:
    """Raise `ApiError` for an empty prompt, or one that leaves no room for an answer."""
    most = state.max_seq_len
    if not tokens:
        raise ApiError(400, "the prompt is empty: give some text to go on from", param=param)
    if len(tokens) >= most:
        size = f"for prompt and answer together, and the prompt alone has {len(tokens)}"
        raise too_long(most, size, param)
    check_ids(state, tokens, param)


def check_ids(state: State, tokens: Sequence[int], param: str) -> None:
    """Raise `ApiError` for a token id that the model does not have."""
    vocabulary = state.model.config.vocab_size
    bad = next((x for x in tokens if not 0 <= x < vocabulary), None)
    if bad is not None:
        raise ApiError(
            400, f"token id {bad} is outside the vocabulary of {vocabulary}", param=param
        )


def usage(end: Done, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return token counts in the form of OpenAI's completions."""
    prompt, completion = end.usage["prompt_tokens"], end.usage["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": end.usage["cached_tokens"]},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
