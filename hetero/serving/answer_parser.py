"""Answers as they come, taken apart into thoughts, text and calls of functions.

A model writes thoughts and calls as its family was trained to; the forms are recognised from its
chat template. A call that is broken or cut off is text in a whole answer; in a stream its beginning
may have been sent.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hetero.models.tokenizer import HfTokenizer, Tokenizer
from hetero.serving.call_forms import (
    FORMS,
    HERMES,
    MARKERS,
    Call,
    CallForm,
    Schemas,
    read_python,
    read_whole,
)
from hetero.serving.json_text import parse_json

Kind = Literal["thought", "text", "call"]
Mode = Literal["text", "thought", "call", "whole", "header"]
_THOUGHTS: Final = (
    ("<think>", "</think>"),
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
)
_TAIL: Final = 8  # tokens that a beginning and the space behind it have at most
_CHANNEL, _START, _MESSAGE = "<|channel|>", "<|start|>", "<|message|>"  # of gpt-oss
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_SPECIAL: Final = (
    *MARKERS, _CHANNEL, _START, _MESSAGE, *_ENDS, "<|constrain|>", "<think>", "</think>", "[THINK]",
    "[/THINK]", "<|channel>", "<channel|>", "<seed:think>", "</seed:think>", "<thought>",
    "</thought>",
)  # fmt: skip
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_NAMED: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_KEYS: Final = ("name", "type", "function", "parameters", "arguments", "id")
_BARE: Final = re.compile(
    r"(?:```(?:json|tool_code|tool_call)?\s*)?\[?\s*(?:\{\s*(?:\"(\w*)(\"?)|$)|$)"
)
_PYTHON: Final = re.compile(r"(?:```tool_code\s*)?\[?\s*(\w[\w.]*)(\(?)")


@dataclass
class AnswerPart:
    """A part of an answer; the `text` of a call are its arguments.

    `whole`: it is complete, else `raw` is what the model wrote.
    """

    kind: Kind
    text: str = ""
    name: str = ""
    id: str = ""
    whole: bool = True
    raw: str = ""


@dataclass(frozen=True)
class Piece:
    """A text that was added to a part: to one that is new with `begins`."""

    part: AnswerPart
    text: str
    begins: bool = False


@dataclass(frozen=True)
class AnswerForm:
    """The forms of a family: markers of thoughts, and of calls.

    `channels`: everything is in gpt-oss's channels. `shown` are ids of the special tokens that the
    parser reads, which are otherwise no text.
    """

    thoughts: tuple[tuple[str, str], ...] = ()
    calls: tuple[CallForm, ...] = (HERMES,)
    channels: bool = False
    shown: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AnswerForm:
        """Return the forms of a tokenizer's chat template."""
        if not isinstance(tokenizer, HfTokenizer) or tokenizer.chat_template is None:
            return cls()
        source = " ".join(tokenizer.chat_template.templates.values())
        return cls(
            thoughts=tuple(x for x in _THOUGHTS if x[0].strip() in source or x[1] in source),
            calls=(HERMES, *(form for mark, form in FORMS.items() if mark in source)),
            channels=_CHANNEL in source and _MESSAGE in source,
            shown=tokenizer.special_named(_SPECIAL),
        )

    def begun_in(self, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
        """Return the end of a thought that the last tokens of a prompt begin; or nothing."""
        if not self.thoughts:
            return ""
        return self.opened_by(tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False))

    def opened_by(self, prompt: str) -> str:
        """Return the end of a thought whose beginning is at the end of a text; or nothing."""
        tail = prompt.rstrip()
        return next((end for begin, end in self.thoughts if tail.endswith(begin.strip())), "")


class _Braces:
    """The end of an object or list in a text that comes in pieces: JSON's, or Python's `quotes`."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes, self._quote = quotes, ""  # the one of the text that is open
        self._depth, self._escaped, self._at = 0, False, 0
        self.end = 0  # offset behind it; 0 while it is open

    def read(self, text: str, start: int) -> int:
        """Read on in a text that has grown, from `start`; return the end, 0 while it is open."""
        at = max(self._at, start)
        while at < len(text) and not self.end:
            self._character(text[at])
            at += 1
            if self._depth == 0:
                self.end = at
        self._at = at
        return self.end

    def _character(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in self._quotes:
            self._quote = character
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


@dataclass
class _OpenCall:
    """The call that is being read. `part`: it is sent as it comes, its arguments from `start`."""

    form: CallForm | None = None  # None: an answer that is nothing else
    name: str = ""  # where the form has it outside of the arguments
    outer: _Braces = field(default_factory=_Braces)
    inner: _Braces = field(default_factory=_Braces)
    part: AnswerPart | None = None
    start: int = 0
    sent: int = 0

    def __post_init__(self) -> None:
        if self.form is not None and self.form.read is read_python:
            self.outer = _Braces("\"'")


class AnswerParser:
    """Takes an answer apart while it comes. Owned by the task that reads the answer.

    `schemas` are the parameters of the functions that may be called. `closes` is the end of a
    thought that the prompt began; without `bare` only what the family's markers begin is a call.
    """

    def __init__(
        self,
        form: AnswerForm,
        schemas: Mapping[str, Any] | None = None,
        *,
        closes: str = "",
        bare: bool = True,
    ) -> None:
        self._form = form
        self._schemas: Schemas = schemas or {}
        self._calls = form.calls if self._schemas else ()
        self.parts: list[AnswerPart] = []
        self._pieces: list[Piece] = []
        self._rest = ""
        self._ends: tuple[str, ...] = (closes,) if closes else ()
        self._mode: Mode = "thought" if closes else "header" if form.channels else "text"
        self._call = _OpenCall()
        self._strips = True  # space is not part of what comes next
        self._fresh = bare and bool(self._schemas)  # it may be a call and nothing else

    @property
    def thinking(self) -> bool:
        """Return whether what comes next is a thought."""
        return self._mode == "thought"

    def feed(self, text: str, *, last: bool = False) -> list[Piece]:
        """Return the pieces that a text adds, with `last` also those that were kept back."""
        self._rest += text
        while self._step(last=last):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _step(self, *, last: bool) -> bool:
        match self._mode:
            case "text":
                return self._in_text(last=last)
            case "thought":
                return self._in_thought(last=last)
            case "header":
                return self._in_header(last=last)
        return self._in_call(last=last)

    # --- text and thoughts ------------------------------------------------------------------

    def _in_text(self, *, last: bool) -> bool:
        if self._strips:
            self._rest = self._rest.lstrip()
            if not self._rest:
                return False
        if self._fresh and self._may_be_call():
            self._mode, self._call = "whole", _OpenCall()
            return True
        self._fresh = False
        markers = [begin for begin, _ in self._form.thoughts]
        markers += [form.begin for form in self._calls]
        markers += self._ends
        marker = self._until(markers, "text", last=last, trims=bool(markers))
        if not marker:
            return False
        self._strips = True
        if marker in self._ends:
            self._mode = "header"
        elif form := next((x for x in self._calls if x.begin == marker), None):
            self._mode, self._call = "call", _OpenCall(form)
        else:
            self._mode, self._ends = "thought", (dict(self._form.thoughts)[marker],)
        return True

    def _in_thought(self, *, last: bool) -> bool:
        if self._strips:
            self._rest = self._rest.lstrip()
            if not self._rest:
                return False
        marker = self._until(self._ends, "thought", last=last, trims=True)
        if not marker:
            return False
        self._strips, self._fresh = True, bool(self._schemas)
        self._mode = "header" if self._form.channels else "text"
        self._ends = ()
        return True

    def _until(self, markers: Iterable[str], kind: Kind, *, last: bool, trims: bool) -> str:
        """Add the text up to a marker, and return that; else what cannot be part of one.

        With `trims` space before a marker is left out, so it is kept back.
        """
        matches = [(at, mark) for mark in markers if (at := self._rest.find(mark)) >= 0]
        if matches:
            at, marker = min(matches, key=lambda x: (x[0], -len(x[1])))
            text, self._rest = self._rest[:at], self._rest[at + len(marker) :]
            self._add(kind, text.rstrip() if trims else text)
            return marker
        cut = len(self._rest)
        if not last:
            cut -= max((_overlap(self._rest, mark) for mark in markers), default=0)
            if trims:
                cut = len(self._rest[:cut].rstrip())
        text, self._rest = self._rest[:cut], self._rest[cut:]
        self._add(kind, text.rstrip() if last and kind == "thought" else text)
        return ""

    def _add(self, kind: Kind, text: str) -> None:
        if not text:
            return
        self._strips = False
        begins = not self.parts or self.parts[-1].kind != kind
        if begins:
            self.parts.append(AnswerPart(kind))
        self.parts[-1].text += text
        self._pieces.append(Piece(self.parts[-1], text, begins))

    # --- channels ---------------------------------------------------------------------------

    def _in_header(self, *, last: bool) -> bool:
        """Read up to a channel's message; without a channel it is text."""
        rest = self._rest.lstrip()
        if not rest and not last:
            return False
        if not any(rest.startswith(x) or x.startswith(rest) for x in (_CHANNEL, _START)):
            self._mode, self._ends = "text", _ENDS
            return bool(rest)
        head, marker, body = rest.partition(_MESSAGE)
        if not marker:
            self._rest = "" if last else self._rest
            return False
        self._rest, self._ends, self._strips = body, (*_ENDS, _START), False
        recipient = _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._schemas:
            form = CallForm(head + marker, "", _no_calls)
            self._mode, self._call = "call", _OpenCall(form, name=recipient[1])
        else:
            thought = "analysis" in head
            self._mode, self._fresh = ("thought" if thought else "text"), False
        return True

    # --- calls ------------------------------------------------------------------------------

    def _may_be_call(self) -> bool:
        """Return whether what there is may be the beginning of a call in JSON or Python."""
        match = _BARE.match(self._rest)
        if match is not None:
            key, closed = match[1], match[2]
            if key is None:
                return match.end() == len(self._rest)
            return key in _KEYS if closed else any(x.startswith(key) for x in _KEYS)
        if "```json".startswith(self._rest) or "```tool_code".startswith(self._rest):
            return True
        call = _PYTHON.match(self._rest)
        if call is None or not self._rest.startswith(("[", "```")):
            return False
        names = self._schemas
        return call[1] in names if call[2] else any(x.startswith(call[1]) for x in names)

    def _in_call(self, *, last: bool) -> bool:
        call, text = self._call, self._rest
        self._send_arguments()
        end, after = self._end_of_call(last=last)
        if end < 0:
            if call.form is None and call.part is None and not last and not self._may_be_call():
                self._mode, self._fresh = "text", False
                return True
            return False
        body, self._rest = text[:end], text[after:]
        begin = "" if call.form is None else call.form.begin
        self._mode, self._strips = ("header" if self._form.channels else "text"), True
        try:
            calls = self._read(body)
        except ValueError:
            self._broken(begin + text[: end if call.name else after])
            return True
        if call.part is not None:
            call.part.whole, call.part.raw = True, ""
            calls = calls[1:]
        for name, arguments in calls:
            self._begin_call(name, arguments, whole=True)
        return True

    def _read(self, body: str) -> Sequence[Call]:
        call = self._call
        if call.name:
            arguments = body.strip() or "{}"
            if not isinstance(parse_json(arguments), dict):
                raise ValueError("arguments are an object")
            return [(call.name, arguments)]
        if call.form is None:
            return read_whole(body, self._schemas)
        return call.form.read(body, self._schemas)

    def _end_of_call(self, *, last: bool) -> tuple[int, int]:
        """Return the offsets of a call's end and behind its end marker; -1 while it is open."""
        call, text = self._call, self._rest
        if call.name:
            matches = [(at, x) for x in self._ends if (at := text.find(x)) >= 0]
            if matches:
                at, marker = min(matches)
                return at, at if marker == _START else at + len(marker)
        elif call.form is not None and call.form.end:
            start = len(text) - len(text.lstrip())
            if text[start : start + 1] in ("{", "["):
                start = call.outer.read(text, start) or len(text)
            at = text.find(call.form.end, start)
            if at >= 0:
                return at, at + len(call.form.end)
        return (len(text), len(text)) if last else (-1, -1)

    def _send_arguments(self) -> None:
        """Send a call's name once it is known, and its arguments as they come."""
        call, text = self._call, self._rest
        if call.part is None:
            match = None if call.name else _NAMED.match(text)
            if match is not None and match[1] in self._schemas:
                call.start = match.end()
                call.part = self._begin_call(match[1], "", whole=False)
            elif call.name and text.lstrip().startswith("{"):
                call.start = len(text) - len(text.lstrip())
                call.part = self._begin_call(call.name, "", whole=False)
            else:
                return
            call.sent = call.start
        end = call.inner.read(text, call.start) or len(text)
        if end > call.sent:
            added, call.sent = text[call.sent : end], end
            call.part.text += added
            self._pieces.append(Piece(call.part, added))

    def _begin_call(self, name: str, arguments: str, *, whole: bool) -> AnswerPart:
        part = AnswerPart("call", arguments, name, f"call_{secrets.token_hex(12)}", whole)
        self.parts.append(part)
        self._fresh = False
        self._pieces.append(Piece(part, arguments, begins=True))
        return part

    def _broken(self, raw: str) -> None:
        """Make text of what is no call."""
        if self._call.part is not None:
            self._call.part.raw = raw
            return
        self._fresh = False
        self._add("text", raw)


def _no_calls(_text: str, _schemas: Schemas) -> list[Call]:
    return []


def _overlap(text: str, marker: str) -> int:
    """Return how many of the last characters may begin a marker."""
    start = max(len(text) - len(marker) + 1, 0)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def whole_parts(parts: Collection[AnswerPart]) -> list[AnswerPart]:
    """Return the parts of a whole answer: calls that are not complete are text."""
    merged: list[AnswerPart] = []
    for given in parts:
        part = given if given.kind != "call" or given.whole else AnswerPart("text", given.raw)
        if merged and merged[-1].kind == part.kind == "text":
            merged[-1] = AnswerPart("text", merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged
