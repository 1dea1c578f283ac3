"""`/v1/messages`: Anthropic's protocol, which coding agents speak."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any, Final, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from hetero.serving import answers
from hetero.serving.answer_parser import AnswerPart, Piece, whole_parts
from hetero.serving.answers import (
    AnswerChoice,
    AnswerOptions,
    ParserMaker,
    StreamWriter,
    fill_template,
    split_template,
    sse,
)
from hetero.serving.errors import ApiError
from hetero.serving.grammars import json_grammar
from hetero.serving.messages import Done, Run, TokenEvent
from hetero.serving.requests import NotDone, Request, Sampling, checked_grammar, stop_texts
from hetero.serving.served_models import acquire
from hetero.serving.state import State, characters_of
from hetero.serving.template_chat import Message as PlainMessage
from hetero.serving.template_chat import (
    answer_message,
    plain_text,
    rendered,
    result_message,
    texts_of,
    thinking_variables,
)
from hetero.serving.tools import ToolUse, tool_use

router = APIRouter()
_EMPTY: Final = {"type": "text", "text": ""}
_PASSED_OVER: Final = ("redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload")
_FIELDS: Final = {"name": "name", "description": "description", "input_schema": "parameters",
                  "strict": "strict"}  # fmt: skip


class Message(Request):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnswerFormat(Request):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Request):
    """`output_config`."""

    format: AnswerFormat | None = None
    effort: str | None = None


class Thinking(Request):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)


class CountRequest(Request):
    """A request to count tokens."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    thread: Any = None
    container: NotDone = None
    mcp_servers: NotDone = None

    def use(self) -> ToolUse:
        """Return the tools in OpenAI's form. Raises `ApiError`."""
        tools = [
            {
                "type": "function" if (tool.get("type") or "custom") == "custom" else tool["type"],
                "function": {
                    ours: tool[theirs] for theirs, ours in _FIELDS.items() if theirs in tool
                },
            }
            for tool in self.tools or ()
        ]
        choice = self.tool_choice or {"type": "auto"}
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        parallel = not choice.get("disable_parallel_tool_use")
        if choice.get("type") == "tool":
            return tool_use(tools, {"name": choice.get("name")}, parallel=parallel)
        if choice.get("type") not in kinds:
            raise ApiError(400, "tool_choice's type is auto, any, tool or none")
        return tool_use(tools, kinds[choice["type"]], parallel=parallel)

    def plain(self) -> list[dict[str, Any]]:
        """Return the messages in the form of chat completions. Raises `ApiError`."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": plain_text(self.system, "system")})
        for i, message in enumerate(self.messages):
            messages += _plain(message, f"messages.{i}", last=i == len(self.messages) - 1)
        return messages

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template."""
        enabled = None if self.thinking is None else self.thinking.type != "disabled"
        effort = None if self.output_config is None else self.output_config.effort
        variables = thinking_variables(effort) | thinking_variables(None, enabled=enabled)
        if enabled is None:  # the effort of an answer, which may have no thoughts
            variables.pop("enable_thinking", None)
        return variables

    def check(self) -> None:
        """Raise `ApiError` for fields that change the meaning of the others."""
        if self.thread is not None:  # the official client then sends the whole conversation
            raise ApiError(
                400,
                "threads are not kept here: send the whole conversation without `thread`",
                param="thread",
                code="thread_unsupported_request",
            )


class MessagesRequest(CountRequest):
    """Anthropic's request."""

    max_tokens: int = Field(ge=1)
    output_format: AnswerFormat | None = None  # of the beta
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)

    def sampling(self) -> Sampling:
        """Return the options of sampling as the other APIs have them."""
        given = self.model_dump(include={"temperature", "top_p", "top_k"})
        return Sampling.model_validate(given)

    def answer_schema(self) -> dict[str, Any] | None:
        """Return the schema of an answer; None: any text."""
        config = self.output_config
        form = self.output_format if config is None else config.format or self.output_format
        return None if form is None else form.json_schema


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: HttpRequest) -> Response:
    """Return the next message of a conversation."""
    use = body.use()
    body.check()
    state = await acquire(request, body.model)
    model = state.named(body.model)
    plain = body.plain()
    await state.check_length(texts_of(plain), "messages")
    tokens = await _prompt(state, body, plain, use)
    answers.check_room(state, tokens, "messages")
    wanted = AnswerOptions(
        tokens=tokens,
        options={
            "chat": True,
            "max_tokens": body.max_tokens,
            **body.sampling().options(state.sampling),
            "stop": stop_texts(body.stop_sequences),
        },
    )
    schema = body.answer_schema()
    if schema is not None and not use.schemas:
        grammar = await state.texts(json_grammar, schema)
        wanted.grammar = await checked_grammar(state, grammar)
    budget = None if body.thinking is None else body.thinking.budget_tokens
    parser = await answers.parser_of(state, use, wanted, budget, schema)
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
    head["model"] = model
    if body.stream:
        writer = _Writer(head, len(tokens), parser)
        return await answers.streamed(state, request, wanted, writer)
    answer = await answers.gather(state, request, wanted, parser)
    content = [_block(part) for part in whole_parts(answer.choices[0].parts)] or [_EMPTY]
    reason, stop = _reason(answer.choices[0], answer.end)
    return answers.answer_json(
        {
            **head,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(answer.end),
            "hetero": answer.end.about,
        }
    )


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: HttpRequest) -> Response:
    """Return the number of tokens of a request's prompt."""
    body.check()
    state = await acquire(request, body.model)
    tokens = await _prompt(state, body, body.plain(), body.use())
    return answers.answer_json({"input_tokens": len(tokens)})


async def _prompt(
    state: State, body: CountRequest, plain: list[PlainMessage], use: ToolUse
) -> list[int]:
    """Return the tokens that are answered."""
    return await state.texts(
        rendered,
        state,
        plain,
        use,
        body.variables(),
        continues=True,
        characters=characters_of([plain, use.functions]),
    )


def _plain(message: Message, where: str, *, last: bool) -> list[PlainMessage]:
    """Return a message's blocks as messages: results of tools, then the rest as one.

    Blocks of tools that ran elsewhere are passed over.
    """
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    plain, calls = list[PlainMessage](), list[dict[str, Any]]()
    text, thoughts = list[dict[str, Any]](), list[str]()
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            content = _text(block.get("content"), f"{where}.content")
            plain.append(result_message(content, str(block.get("tool_use_id", ""))))
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind not in _PASSED_OVER and not str(kind).endswith("_tool_result"):
            text.append(block)
    if message.role == "assistant":
        words = _text(text, f"{where}.content", begun=last)
        plain.append(answer_message(words, calls, "\n".join(filter(None, thoughts))))
    elif text or not plain:
        plain.append({"role": message.role, "content": _text(text, f"{where}.content")})
    return plain


def _text(content: Any, where: str, *, begun: bool = False) -> str:
    """Return the text of content, that of documents and search results too. Raises `ApiError`."""
    if isinstance(content, list):
        content = [_without_document(block, where) for block in content]
    return plain_text(content, where, begun=begun)


def _without_document(block: Any, where: str) -> Any:
    """Return a document of text, or a search result, as a text; any other block as it is."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            pass
        case {"type": "document", "source": {"type": "content", "content": content}}:
            text = plain_text(content, where)
        case {"type": "search_result", "content": content}:
            text = plain_text(content, where)
        case _:
            return block
    lines = [block.get(name) for name in ("title", "source", "context")]
    return {"type": "text", "text": "\n".join([*(x for x in lines if isinstance(x, str)), text])}


def _block(part: AnswerPart) -> dict[str, Any]:
    """Return a part of an answer as a content block."""
    match part.kind:
        case "thought":
            return {"type": "thinking", "thinking": part.text, "signature": _signature(part)}
        case "call":
            return {**_call_block(part), "input": json.loads(part.text)}
        case "text":
            return {"type": "text", "text": part.text}


def _call_block(part: AnswerPart) -> dict[str, Any]:
    name = part.id.replace("call_", "toolu_")
    return {"type": "tool_use", "id": name, "name": part.name, "input": {}}


def _signature(part: AnswerPart) -> str:
    """Return what clients want to have of a thought, and send back. It is not checked."""
    return hashlib.sha256(part.text.encode()).hexdigest()


def _reason(choice: AnswerChoice, end: Done) -> tuple[str, str | None]:
    if choice.reason == "tool_calls":
        return "tool_use", None
    if end.stops and end.stops[0]:
        return "stop_sequence", end.stops[0]
    return ("max_tokens" if choice.finish == "length" else "end_turn"), None


def _usage(end: Done) -> dict[str, int]:
    """Return token counts; tokens read from the cache are not among `input_tokens`."""
    cached = end.usage["cached_tokens"]
    return {
        "input_tokens": end.usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": end.usage["completion_tokens"],
    }


class _Writer(StreamWriter):
    path, error_event = "/v1/messages", "error"

    def __init__(self, head: dict[str, Any], prompt: int, parser: ParserMaker) -> None:
        super().__init__(1, parser)
        self._head, self._prompt = head, prompt
        self._index, self._open = -1, AnswerPart("text")  # the block that is being sent

    def begin(self) -> list[bytes]:
        """Return the start of the message and of its text."""
        usage = {"input_tokens": self._prompt, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        lines = [_event("message_start", message={**message, "usage": usage}), _event("ping")]
        return lines if self._choices[0].parser is not None else [*lines, *self._begin(self._open)]

    async def end(self, end: Done) -> list[bytes]:
        """Return the rest of the content, and the reason why the answer ended."""
        lines = [] if self._index >= 0 else self._begin(self._open)  # of an empty answer
        reason, stop = _reason(self._choices[0], end)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = _event("message_delta", delta=delta, usage=_usage(end), hetero=end.about)
        return [*lines, *self._stop(), last, _event("message_stop")]

    def _delta(self, event: TokenEvent) -> list[bytes]:
        return [_text_delta(event.text)] if event.text else []

    def _deltas(self, run: Run) -> list[bytes]:
        return fill_template(_TEXT_DELTA, run.texts)

    def _piece(self, index: int, piece: Piece) -> list[bytes]:  # noqa: ARG002  (there is one choice)
        lines = []
        if piece.begins:
            lines = [*(self._stop() if self._index >= 0 else []), *self._begin(piece.part)]
        if not piece.text:
            return lines
        match piece.part.kind:
            case "thought":
                delta = {"type": "thinking_delta", "thinking": piece.text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": piece.text}
            case "text":
                delta = {"type": "text_delta", "text": piece.text}
        return [*lines, _delta(self._index, delta)]

    def _begin(self, part: AnswerPart) -> list[bytes]:
        self._index, self._open = self._index + 1, part
        match part.kind:
            case "thought":
                block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                block = _call_block(part)
            case "text":
                block = _EMPTY
        return [_event("content_block_start", index=self._index, content_block=block)]

    def _stop(self) -> list[bytes]:
        lines = [_event("content_block_stop", index=self._index)]
        if self._open.kind == "thought":
            signed = {"type": "signature_delta", "signature": _signature(self._open)}
            return [_delta(self._index, signed), *lines]
        return lines


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)


def _text_delta(text: str) -> bytes:
    return _delta(0, {"type": "text_delta", "text": text})


_TEXT_DELTA: Final = split_template(_text_delta)
