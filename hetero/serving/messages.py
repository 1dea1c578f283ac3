"""What the HTTP process and the engine process tell each other: records, one JSON line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Ask:
    """An answer is wanted to a whole text, `tokens`; `choices` of them, drawn with seed, seed + 1 …

    `context` is the id of a context that persists, whose text this becomes; without one the text is
    among the app's recent ones, in slot `slot` (-1: any), apart from those of another `salt`.
    `options` are those of `LLM.stream`; `grammar` is llguidance's (empty: none).
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


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Nobody waits for an answer any more."""

    id: int


@dataclass(frozen=True, kw_only=True)
class Control:
    """Something else is wanted of an app's contexts (`hetero.serving.controls`)."""

    id: int
    app: str
    action: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """No more of this: give up what runs, write what is to be written, end."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The engine takes questions. `about` says what it is."""

    about: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Said:
    """A piece of one choice. `logprob` is [log-probability, [[id, log-probability] …]]; `end` says
    that the token ended the text and is no part of it.
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
    """Pieces of one choice that are told together: texts and tokens, none of which ended it, or has
    anything else to tell.
    """

    id: int
    choice: int
    texts: list[str]
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All choices are there, and on the disk if they were to be. `usage` counts tokens, `about` is
    the object `hetero` of a response; `prompt_logprobs` as `Said.logprob`, with the id in front;
    `tokens` are the first choice's, `stops` the stop texts that ended the choices.
    """

    id: int
    usage: dict[str, int]
    about: dict[str, Any]
    prompt_logprobs: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Replied:
    """What a `Control` asked for."""

    id: int
    value: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """It cannot be done. `kind` is `user` (the message says what to mend), `quota` (the app has all
    that it may have), `disk` (no room to keep it), `missing` (no such thing) or `engine` (not the
    user's fault).
    """

    id: int
    kind: str
    message: str


ToEngine: TypeAlias = Ask | Cancel | Control | Stop
FromEngine: TypeAlias = Ready | Said | Run | Finished | Replied | Refused
_KINDS: Final = {
    kind.__name__: kind
    for kind in (Ask, Cancel, Control, Stop, Ready, Said, Run, Finished, Replied, Refused)
}

_json: Final = json.JSONEncoder(separators=(",", ":")).encode  # one for all


def encode(message: ToEngine | FromEngine) -> bytes:
    """The line. Raises `ValueError` for what is no JSON."""
    return _json({"is": type(message).__name__, **vars(message)}).encode() + b"\n"


def decode(line: bytes) -> Any:
    """The record of a line. Raises `ValueError` if it is none."""
    try:
        record = json.loads(line)
        return _KINDS[record.pop("is")](**record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message of this version: {line[:80]!r}") from error


def _more_than_text(said: Said) -> bool:
    return said.end or bool(said.finish) or said.logprob is not None


class Outbox:
    """What the engine tells, up to the next `flush`, which writes it: what an answer says piece by
    piece is a `Run`. What is told of one answer stays in order.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._told: list[FromEngine] = []
        self._runs: dict[int, Run] = {}  # by answer, while nothing else was told of it

    def send(self, message: FromEngine) -> None:
        """Tell this with the next `flush`."""
        if not isinstance(message, Said) or _more_than_text(message):
            self._runs.pop(-1 if isinstance(message, Ready) else message.id, None)
            self._told.append(message)
            return
        run = self._runs.get(message.id)
        if run is None or run.choice != message.choice:
            run = Run(id=message.id, choice=message.choice, texts=[], tokens=[])
            self._runs[message.id] = run
            self._told.append(run)
        run.texts.append(message.text)
        run.tokens.append(message.token)

    def flush(self) -> None:
        """Write what there is."""
        if self._told:
            self._write(b"".join(map(encode, self._told)))
            self._told.clear()
            self._runs.clear()
