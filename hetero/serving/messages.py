"""Messages between the HTTP process and the engine process: records, one JSON line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """Generate `choices` answers to a whole text, `tokens`, sampled with seed, seed + 1 and so on.

    `context` is the id of a persistent context, whose text this becomes; without one the text is
    among the app's recent ones, in slot `slot` (-1: any), separate from those of another `salt`.
    `options` are those of `LLM.stream`; `grammar` is llguidance's (empty: none), `thoughts` are the
    fields of a `ThoughtLimit` (empty: none).
    """

    id: int
    app: str
    tokens: list[int]
    options: dict[str, Any]
    choices: int = 1
    context: str = ""
    salt: str = ""
    slot: int = -1
    grammar: str = ""
    thoughts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EmbedRequest:
    """Compute the embeddings of `texts`, token ids each; `dimensions` of them, 0: all."""

    id: int
    app: str
    texts: list[list[int]]
    pooling: str
    dimensions: int = 0


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Cancel an answer, or embeddings."""

    id: int


@dataclass(frozen=True, kw_only=True)
class Control:
    """Run another action on an app's contexts (`hetero.serving.controls`)."""

    id: int
    app: str
    action: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Cancel the running answers, write what is pending, and end."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The engine takes requests. `about` describes model and devices."""

    about: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One token of a choice, and its text.

    `logprob` is [log-probability, [[id, log-probability] …]]; `end`: the token ended the text and
    is no part of it.
    """

    id: int
    choice: int
    text: str
    token: int
    end: bool = False
    logprob: list[Any] | None = None
    finish: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Several tokens of one choice in one message: none ended it or has a log-probability."""

    id: int
    choice: int
    texts: list[str]
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Done:
    """All choices are complete, and on the disk if they are to be stored.

    `usage` counts tokens, `about` is the object `hetero` of a response; `prompt_logprobs` as
    `TokenEvent.logprob`, after the id; `tokens` are the first choice's, `stops` the stop texts that
    ended the choices.
    """

    id: int
    usage: dict[str, int]
    about: dict[str, Any]
    prompt_logprobs: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The embeddings of an `EmbedRequest`, in order: base64 of their float32, little-endian.

    The request waited for `queued_s`.
    """

    id: int
    embeddings: list[str]
    queued_s: float


@dataclass(frozen=True, kw_only=True)
class ControlResult:
    """The result of a `Control`."""

    id: int
    value: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ErrorReply:
    """The request failed.

    `kind` is `user` (the message says what to mend), `quota` (the app has all that it may have),
    `disk` (it cannot be stored), `missing` (no such object), `deleted` (its conversation was) or
    `engine` (not the user's fault).
    """

    id: int
    kind: str
    message: str


ToEngine: TypeAlias = GenerateRequest | EmbedRequest | Cancel | Control | Stop
FromEngine: TypeAlias = Ready | TokenEvent | Run | Done | Embedded | ControlResult | ErrorReply
_KINDS: Final = {kind.__name__: kind for kind in (*get_args(ToEngine), *get_args(FromEngine))}

_json: Final = json.JSONEncoder(separators=(",", ":")).encode  # one for all


def encode(message: ToEngine | FromEngine) -> bytes:
    """Return a message's line. Raises `ValueError` for what JSON cannot hold."""
    return _json({"is": type(message).__name__, **vars(message)}).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Return the message of a line. Raises `ValueError` if it is none."""
    try:
        record = json.loads(line)
        return _KINDS[record.pop("is")](**record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message of this version: {line[:80]!r}") from error


def _has_more_than_text(event: TokenEvent) -> bool:
    return event.end or bool(event.finish) or event.logprob is not None


class Outbox:
    """A buffer of the engine's messages until `flush` writes them.

    Consecutive `TokenEvent`s of a choice become a `Run`; the messages about one choice stay in
    order, and what ends an answer comes after them.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._messages: list[FromEngine] = []
        self._runs: dict[tuple[int, int], Run] = {}  # by answer and choice

    def send(self, message: FromEngine) -> None:
        """Send a message with the next `flush`."""
        if not isinstance(message, TokenEvent):
            self._runs.clear()
            self._messages.append(message)
            return
        at = message.id, message.choice
        if _has_more_than_text(message):
            self._runs.pop(at, None)
            self._messages.append(message)
            return
        if (run := self._runs.get(at)) is None:
            run = self._runs[at] = Run(id=message.id, choice=message.choice, texts=[], tokens=[])
            self._messages.append(run)
        run.texts.append(message.text)
        run.tokens.append(message.token)

    def flush(self) -> None:
        """Write all messages so far."""
        if self._messages:
            self._write(b"".join(map(encode, self._messages)))
            self._messages.clear()
            self._runs.clear()
