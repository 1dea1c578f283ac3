"""`/v1/responses`: answers that can be continued, or forked, by their ids."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.serving import answers
from hetero.serving.answer_parser import AnswerPart, Piece, whole_parts
from hetero.serving.answers import (
    AnswerChoice,
    AnswerOptions,
    ParserMaker,
    StreamWriter,
    split_template,
    sse,
)
from hetero.serving.chat_completions import score
from hetero.serving.database import StoredResponse, item_id
from hetero.serving.errors import ApiError, missing
from hetero.serving.grammars import json_grammar
from hetero.serving.history import (
    Item,
    WholeText,
    messages_of,
    read_items,
    reasoning_item,
    tokens_of,
)
from hetero.serving.messages import Done, Run, TokenEvent
from hetero.serving.requests import (
    MAX_LOGPROBS,
    Metadata,
    NotDone,
    Request,
    Sampling,
    TokenLimit,
    checked_grammar,
    most_tokens,
    seconds,
)
from hetero.serving.served_models import acquire, store_of
from hetero.serving.state import State, characters_of
from hetero.serving.template_chat import checked_variables, texts_of, thinking_variables
from hetero.serving.tools import ToolUse, tool_use

router = APIRouter()
_LONGEST_CHAIN = 10_000
_BEGINNING: Final = ("created", "in_progress")
_DELTA: Final = "response.output_text.delta"


class Page(BaseModel):
    """Ask for up to `limit` items of a list, those that follow the item `after`."""

    limit: int = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"

    def of(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return these of `items`, which come oldest first. Raises `ApiError`."""
        ordered = list(items) if self.order == "asc" else list(items)[::-1]
        if self.after is not None:
            at = next((i for i, item in enumerate(ordered) if item["id"] == self.after), None)
            if at is None:
                raise missing("item", "after")
            ordered = ordered[at + 1 :]
        most = max(min(self.limit, 100), 1)
        return listing(ordered[:most], more=len(ordered) > most)


class TextFormat(Request):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Request):
    """`text`."""

    format: TextFormat | None = None


class Reasoning(Request):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its older name
    max_tokens: int | None = Field(None, ge=-1)  # OpenRouter's

    @property
    def summarised(self) -> bool:
        """Return whether the thoughts are sent as a summary too, which is all that many show."""
        return (self.summary or self.generate_summary) not in (None, "none")


class ConversationName(Request):
    """`conversation` as an object."""

    id: str


class ResponseRequest(Sampling):
    """OpenAI's request."""

    model: str | None = None
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool | None = True
    stream: bool | None = False
    max_output_tokens: TokenLimit | None = None
    metadata: Metadata | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[str] | None = None
    background: NotDone = False
    moderation: NotDone = None
    prompt: NotDone = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str = Field("", max_length=1000)

    @property
    def conversation_id(self) -> str | None:
        """Return the conversation's id, in whichever form it is given."""
        given = self.conversation
        return given.id if isinstance(given, ConversationName) else given

    def use(self) -> ToolUse:
        """Return the tools, which have no `function` around them here."""
        tools = [{"function": tool, **tool} for tool in self.tools or ()]
        return tool_use(tools, self.tool_choice, parallel=self.parallel_tool_calls)

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template. Raises `ApiError`."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return thinking_variables(effort) | checked_variables(self.chat_template_kwargs)

    def answer_schema(self) -> Any:
        """Return the schema of an answer (True: any object), None: any text. Raises `ApiError`."""
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_schema" and form.json_schema is None:
            raise ApiError(400, "a json_schema needs its `schema`", param="text.format.schema")
        return True if form.json_schema is None else form.json_schema


@dataclass
class _Turn:
    """The text that a response continues, and what it becomes."""

    body: dict[str, Any]
    use: ToolUse
    given: list[Item]  # of this request
    before: list[Item]  # everything that was said before
    wanted: AnswerOptions
    logprobs: bool
    parser: ParserMaker
    summarised: bool = False
    conversation: str | None = None
    output: list[Item] = field(default_factory=list)


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: HttpRequest) -> Response:
    """Create an answer, which is stored unless `store` is false."""
    app: str = request.state.app
    async with AsyncExitStack() as until_end:
        if (conversation := body.conversation_id) is not None:
            turns = store_of(request).turns
            waiting = until_end.enter_async_context(turns.of((app, conversation)))
            await answers.unless_disconnected(request, waiting)
        state = await acquire(request, body.model)
        turn = await _turn(state, app, body)
        if body.stream:
            writer = _Writer(state, app, body, turn)
            return await answers.streamed(state, request, turn.wanted, writer, until_end)
        answer = await answers.gather(state, request, turn.wanted, turn.parser)
        choice = answer.choices[0]
        _complete(state, turn, choice, whole_parts(choice.parts), answer.end)
        await _keep(state, app, body, turn, answer.choices[0], answer.end)
        return answers.answer_json(turn.body)


@router.post("/v1/responses/input_tokens")
async def count_input(body: ResponseRequest, request: HttpRequest) -> Response:
    """Return the number of tokens of a request's text."""
    state = await acquire(request, body.model)
    use = body.use()
    before, given, tokens = await _items(state, request.state.app, body)
    whole = await _whole(state, body, use, [*before, *given], tokens)
    record = {"object": "response.input_tokens", "input_tokens": len(whole.tokens)}
    return answers.answer_json(record)


@router.get("/v1/responses/{name}")
async def read_response(name: str, request: HttpRequest, *, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise ApiError(
            400,
            "a stored response is not streamed: leave stream out",
            param="stream",
            code="unsupported_parameter",
        )
    return answers.answer_json((await _stored(request, name)).body)


@router.get("/v1/responses/{name}/input_items")
async def read_input(
    name: str,
    request: HttpRequest,
    page: Annotated[Page, Query()],
) -> Response:
    """Return the input of a response, the newest first unless `order` is asc."""
    return answers.answer_json(page.of((await _stored(request, name)).input))


@router.delete("/v1/responses/{name}")
async def delete_response(name: str, request: HttpRequest) -> Response:
    """Delete a response; it is then off the disk."""
    store = store_of(request)
    if not await store.disk(store.records.delete_response, request.state.app, name):
        raise missing("response")
    return answers.answer_json({"id": name, "object": "response", "deleted": True})


def listing(items: list[Item], *, more: bool) -> dict[str, Any]:
    """Return a list in OpenAI's form."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }


async def _stored(request: HttpRequest, name: str) -> StoredResponse:
    store = store_of(request)
    response = await store.disk(store.records.response, request.state.app, name)
    if response is None:
        raise missing("response")
    return response


async def _turn(state: State, app: str, body: ResponseRequest) -> _Turn:
    model, use, conversation = state.named(body.model), body.use(), body.conversation_id
    before, given, tokens = await _items(state, app, body)
    schema, grammar = body.answer_schema(), ""
    if schema is not None and not use.schemas:
        grammar = await state.texts(json_grammar, schema)
    options = body.options(state.sampling) | {
        "chat": True,
        "max_tokens": most_tokens(body.max_output_tokens, default=state.max_seq_len),
    }
    logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (
        body.include or ()
    )
    if logprobs:
        options["logprobs"] = body.top_logprobs or 0
    items = [*before, *given]
    if body.truncation != "auto":
        await state.check_length(texts_of(messages_of(items)), "input")
    whole = await _whole(state, body, use, items, tokens)
    answers.check_room(state, whole.least if whole.full else whole.tokens, "input")
    wanted = AnswerOptions(
        tokens=whole.tokens,
        options=options | whole.options(),
        context="" if conversation is None else conversation.removeprefix("conv_"),
        salt=body.cache_salt,
        grammar=await checked_grammar(state, grammar),
    )
    budget = None if body.reasoning is None else body.reasoning.max_tokens
    parser = await answers.parser_of(state, use, wanted, budget, schema)
    summarised = body.reasoning is not None and body.reasoning.summarised
    begun = _begun(body, model, options)
    return _Turn(begun, use, given, before, wanted, logprobs, parser, summarised, conversation)


async def _items(
    state: State, app: str, body: ResponseRequest
) -> tuple[list[Item], list[Item], list[int]]:
    """Return the items before the input, those of the input, and the known tokens before it."""
    if body.conversation_id is not None and body.previous_response_id is not None:
        raise ApiError(
            400, "conversation and previous_response_id do not go together", param="conversation"
        )
    items = read_items(body.input, answered=True)
    given = [await _referenced(state, app, item) for item in items]
    before, tokens = await _before(state, app, body)
    if not (before or given):
        raise ApiError(400, "input is empty: give a text or items", param="input")
    if any(message["role"] == "assistant" for message in messages_of(given)):
        tokens = []  # they are those up to the last answer, which is a given one
    return before, given, tokens


async def _whole(
    state: State, body: ResponseRequest, use: ToolUse, items: list[Item], tokens: list[int]
) -> WholeText:
    """Return the text that is answered."""
    return await state.texts(
        tokens_of,
        state,
        body.instructions or "",
        items,
        tokens,
        use,
        body.variables(),
        drops=body.truncation == "auto",
        answer=most_tokens(body.max_output_tokens, default=1),
        characters=characters_of([body.instructions, items, use.functions]),
    )


async def _referenced(state: State, app: str, item: Item) -> Item:
    """Return the item, or a copy of the stored one that an `item_reference` names."""
    if item["type"] != "item_reference":
        return item
    store = state.store
    stored = await store.disk(store.records.item, app, item["id"])
    if stored is None:
        raise missing("item", "input")
    prefix = item["id"].partition("_")[0]
    return {**stored, "id": f"{prefix}_{secrets.token_hex(16)}"}


async def _before(state: State, app: str, body: ResponseRequest) -> tuple[list[Item], list[int]]:
    """Return the items before the input, and their tokens as far as they are known."""
    store = state.store
    if (name := body.conversation_id) is not None:
        conversation = await store.disk(store.records.conversation, app, name)
        if conversation is None:
            raise missing("conversation", "conversation")
        tokens = [] if body.instructions else state.tokens_of(conversation[2])
        return await store.disk(store.records.items, app, name), tokens
    if (last := body.previous_response_id) is None:
        return [], []
    chain: list[StoredResponse] = []
    at: str | None = last
    while at is not None and len(chain) < _LONGEST_CHAIN:
        stored = await store.disk(store.records.response, app, at)
        if stored is None:
            if not chain:
                raise missing("response", "previous_response_id")
            raise ApiError(
                404,
                "a response before that one was deleted, so nothing can follow it",
                param="previous_response_id",
            )
        chain.append(stored)
        at = stored.previous
    items = [item for stored in reversed(chain) for item in [*stored.input, *stored.body["output"]]]
    same = (body.instructions or None) == chain[0].body["instructions"]
    return items, state.tokens_of(chain[0].tokens) if same else []


def _begun(body: ResponseRequest, model: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    conversation = body.conversation_id
    form: dict[str, Any] = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": seconds(),
        "status": "in_progress",
        "background": False,
        "conversation": None if conversation is None else {"id": conversation},
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None if body.reasoning is None else body.reasoning.summary,
        },
        "store": body.store is not False,
        "temperature": sampling.get("temperature", 0.0),
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.get("top_p", 1.0),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _complete(
    state: State, turn: _Turn, choice: AnswerChoice, parts: Sequence[AnswerPart], end: Done
) -> None:
    """Complete the response with the parts of its answer."""
    whole = choice.finish != "length"
    scores = [score(state, *x) for x in choice.logprobs] if turn.logprobs else []
    for i, part in enumerate(parts or [AnswerPart("text")]):
        item = _item(turn, part, i, "completed" if whole or i < len(parts) - 1 else "incomplete")
        if part.kind == "text" and scores:
            item["content"][0]["logprobs"], scores = scores, []
        turn.output.append(item)
    prompt, completion = end.usage["prompt_tokens"], end.usage["completion_tokens"]
    turn.body |= {
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": turn.output,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": end.usage["cached_tokens"]},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": prompt + completion,
        },
        "hetero": end.about,
    }


def _item(turn: _Turn, part: AnswerPart, index: int, status: str) -> Item:
    """Return a part of an answer as an item of the output."""
    match part.kind:
        case "thought":
            item = reasoning_item(part.text, summarised=turn.summarised)
            kind = "rs"
        case "call":
            kind = "fc"
            item = {
                "type": "function_call",
                "call_id": part.id,
                "name": part.name,
                "arguments": part.text,
                **_namespace(turn.use, part.name),
            }
        case "text":
            kind = "msg"
            item = {"type": "message", "role": "assistant", "content": [_text_part(part.text)]}
    if part.kind == "call" and not part.whole and status == "completed":
        status = "incomplete"
    return {**item, "id": item_id(kind, turn.body["id"], index), "status": status}


def _namespace(use: ToolUse, name: str) -> dict[str, str]:
    """Return the field of a call of a function in a namespace."""
    return {"namespace": use.namespaces[name]} if name in use.namespaces else {}


async def _keep(
    state: State, app: str, body: ResponseRequest, turn: _Turn, choice: AnswerChoice, end: Done
) -> None:
    """Store the response, which is on the disk when this returns.

    The tokens are those of the text, unless a stop text cut it, or thoughts or calls are in it,
    which templates write in another way.
    """
    exact = (choice.ended or choice.finish == "length") and all(
        item["type"] == "message" for item in turn.output
    )
    text = [*turn.wanted.tokens, *end.tokens] if exact else []
    keep = turn.wanted.options.get("keep", 0)
    del text[keep : keep + end.about["shifted_tokens"]]
    tokens = state.stored_tokens(text)
    store = state.store
    stored = StoredResponse(
        turn.body, turn.given, body.previous_response_id, turn.conversation, tokens
    )
    items, kept = [*turn.given, *turn.output], True
    if body.store is not False:
        kept = await store.disk(store.records.keep_response, app, stored, items)
    elif turn.conversation is not None:
        kept = await store.disk(store.records.add_items, app, turn.conversation, items)
    if not kept:
        raise missing("conversation", "conversation")


class _Writer(StreamWriter):
    """A writer of numbered events, the last of which is `response.completed`.

    It is sent once everything is on the disk. The items are the answer's parts, in order.
    """

    def __init__(self, state: State, app: str, body: ResponseRequest, turn: _Turn) -> None:
        super().__init__(1, turn.parser)
        self._state, self._app, self._body, self._turn = state, app, body, turn
        self._number = 0
        self._index, self._open = -1, AnswerPart("text")  # the item that is being sent
        self._name = ""  # its id
        self._unsent = list[dict[str, Any]]()  # log-probabilities of text that is kept back
        name = item_id("msg", turn.body["id"], 0)
        self._at: dict[str, Any] = {"item_id": name, "output_index": 0, "content_index": 0}
        self._template = split_template(partial(_delta, self._at), 2)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return _event(kind, self._number - 1, **fields)

    def failed(self, error: ApiError) -> bytes:
        """Return the response with its error."""
        record = {"code": error.code or "server_error", "message": error.message}
        self._turn.body |= {"status": "failed", "error": record}
        return self._event("response.failed", response=self._turn.body)

    def begin(self) -> list[bytes]:
        """Return the start of the response, and of its message if it is nothing else."""
        turn = self._turn
        lines = [self._event(f"response.{x}", response=turn.body) for x in _BEGINNING]
        return lines if self._choices[0].parser is not None else [*lines, *self._begin(self._open)]

    async def end(self, end: Done) -> list[bytes]:
        """Return the complete items and the response, when everything is on the disk."""
        turn, choice = self._turn, self._choices[0]
        lines = [] if self._index >= 0 else self._begin(self._open)  # of an empty answer
        if choice.parser is None:
            self._open = choice.parts[0]
        _complete(self._state, turn, choice, choice.parts, end)
        await _keep(self._state, self._app, self._body, turn, choice, end)
        lines += self._done(turn.output[-1])
        kind = "completed" if turn.body["status"] == "completed" else "incomplete"
        return [*lines, self._event(f"response.{kind}", response=turn.body)]

    def _delta(self, event: TokenEvent) -> list[bytes]:
        if not event.text:
            return []
        scores = []
        if self._turn.logprobs and event.logprob is not None:
            scores = [score(self._state, event.token, event.logprob)]
        self._number += 1
        return [_delta(self._at, self._number - 1, event.text, scores)]

    def _deltas(self, run: Run) -> list[bytes]:
        before, middle, after = self._template
        lines = list[bytes]()
        for text in filter(None, run.texts):
            lines.append(
                b"%b%d%b%b%b" % (before, self._number, middle, quoted(text).encode(), after)
            )
            self._number += 1
        return lines

    def _taken_apart(self, event: TokenEvent | Run, pieces: list[Piece]) -> list[bytes]:
        if self._turn.logprobs and isinstance(event, TokenEvent) and event.logprob is not None:
            self._unsent.append(score(self._state, event.token, event.logprob))
        return super()._taken_apart(event, pieces)

    def _piece(self, index: int, piece: Piece) -> list[bytes]:  # noqa: ARG002  (there is one choice)
        part, lines = piece.part, list[bytes]()
        if piece.begins:
            if self._index >= 0:
                lines = self._done(_item(self._turn, self._open, self._index, "completed"))
            lines += self._begin(part)
        if not piece.text:
            return lines
        at = {**self._item_at(), "content_index": 0}
        match part.kind:
            case "thought":
                lines.append(self._event("response.reasoning_text.delta", **at, delta=piece.text))
                if self._turn.summarised:
                    kind = "response.reasoning_summary_text.delta"
                    where = {**self._item_at(), "summary_index": 0}
                    lines.append(self._event(kind, **where, delta=piece.text))
            case "call":
                kind = "response.function_call_arguments.delta"
                lines.append(self._event(kind, **self._item_at(), delta=piece.text))
            case "text":
                scores, self._unsent = self._unsent, []
                lines.append(self._event(_DELTA, **at, delta=piece.text, logprobs=scores))
        return lines

    def _item_at(self) -> dict[str, Any]:
        return {"item_id": self._name, "output_index": self._index}

    def _begin(self, part: AnswerPart) -> list[bytes]:
        """Return the start of an item."""
        self._index, self._open = self._index + 1, part
        empty = _item(self._turn, replace(part, text=""), self._index, "in_progress")
        empty |= {name: [] for name in ("content", "summary") if name in empty}
        self._name = empty["id"]
        at = self._item_at()
        lines = [self._event("response.output_item.added", output_index=self._index, item=empty)]
        if part.kind == "text":
            lines.append(self._part({**at, "content_index": 0}, "added", _text_part("")))
        if part.kind == "thought":
            lines.append(self._part({**at, "content_index": 0}, "added", _thought_part("")))
            if self._turn.summarised:
                lines.append(self._summary_part("added", ""))
        return lines

    def _part(self, at: dict[str, Any], what: str, part: dict[str, Any]) -> bytes:
        return self._event(f"response.content_part.{what}", **at, part=part)

    def _summary_part(self, what: str, text: str) -> bytes:
        at, part = self._item_at(), {"type": "summary_text", "text": text}
        kind = f"response.reasoning_summary_part.{what}"
        return self._event(kind, **at, summary_index=0, part=part)

    def _done(self, item: Item) -> list[bytes]:
        """Return the end of the item that is being sent."""
        at, text = self._item_at(), self._open.text
        inner = {**at, "content_index": 0}
        match self._open.kind:
            case "text":
                done = self._event("response.output_text.done", **inner, text=text, logprobs=[])
                lines = [done, self._part(inner, "done", _text_part(text))]
            case "thought":
                lines = [self._event("response.reasoning_text.done", **inner, text=text)]
                lines.append(self._part(inner, "done", _thought_part(text)))
                if self._turn.summarised:
                    kind = "response.reasoning_summary_text.done"
                    lines.append(self._event(kind, **at, summary_index=0, text=text))
                    lines.append(self._summary_part("done", text))
            case "call":
                kind = "response.function_call_arguments.done"
                name = item["name"]
                lines = [self._event(kind, **at, arguments=item["arguments"], name=name)]
        number = at["output_index"]
        return [*lines, self._event("response.output_item.done", output_index=number, item=item)]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _event(kind: str, number: int | str, **fields: Any) -> bytes:
    return sse({"type": kind, "sequence_number": number, **fields}, kind)


def _delta(
    at: dict[str, Any], number: int | str, text: str, scores: Sequence[dict[str, Any]] = ()
) -> bytes:
    return _event(_DELTA, number, **at, delta=text, logprobs=list(scores))
