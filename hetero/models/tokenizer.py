"""Text to token ids and back, as a whole or incrementally while a model writes."""

from __future__ import annotations

import codecs
import json
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from pydantic_core import from_json

from hetero.backends.host.files import read_document
from hetero.errors import ModelError
from hetero.models.chat_template import ChatTemplate, Message, load_templates
from hetero.models.end_tokens import named_ends
from hetero.models.fields import read_json_object
from hetero.models.tokenizer_limits import (
    LIMITS,
    Growth,
    check_tokenizer,
)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONTEXT_TOKENS = 16
_LONG = 8192  # characters or ids from which on other threads go on meanwhile
_MAX_UNRESOLVED = 64
_panics = threading.Lock()  # stderr is the process's


class StreamDecoder(ABC):
    """Text of a growing sequence of ids. The deltas joined are the decoded text of all ids.

    A delta never ends inside a character: bytes that begin one are pending until it is complete.
    """

    @abstractmethod
    def push(self, token: int) -> str:
        """Return the text that becomes certain with this token; often ""."""

    @abstractmethod
    def finish(self) -> str:
        """Return the pending text: U+FFFD for a character that was never completed."""


class Tokenizer(ABC):
    """Token ids of a model's vocabulary. `eos_ids` end a text."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    vocab_size: int
    chat_template: ChatTemplate | None

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        `add_special_tokens` adds what the model expects around a prompt (bos).
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Ids outside the vocabulary are skipped."""

    @abstractmethod
    def decoder(
        self,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> StreamDecoder:
        """Return a streaming decoder for text that continues `context` (its ids are not repeated).

        Of special tokens, those of `shown` are text.

        With the prompt as context the first delta keeps the space that separates it from the
        prompt; without, it starts a text of its own (an answer in a chat).
        """

    @abstractmethod
    def vocabulary(self) -> Mapping[int, str]:
        """Return the tokens by id, as the tokenizer spells them."""

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the text of a conversation (options as in `ChatTemplate.render`).

        Raises `ModelError` for a model without a chat template.
        """
        if self.chat_template is None:
            raise ModelError(
                "this model has no chat template; use --raw (the prompt as it is), or a model with "
                "chat_template in tokenizer_config.json (GGUF: tokenizer.chat_template)"
            )
        return self.chat_template.render(messages, **options)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the ids of a conversation; the template writes the special tokens itself."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


class HfTokenizer(Tokenizer):
    """A `tokenizer.json` with its `tokenizer_config.json`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
        *,
        where: str = "tokenizer",
        growth: Growth | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        """Take `ends`, the ids that end a text.

        By default they come from `config` and the names of special tokens.
        """
        self._where = where
        self._growth = growth or Growth()
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        settings = config or {}
        added = backend.get_added_tokens_decoder()
        self._special = {id_ for id_, token in added.items() if token.special}
        self.added_tokens = {token.content: id_ for id_, token in added.items()}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = _special_tokens(settings)
        self.bos_id = self._id_of("bos_token")
        if ends is None:
            eos = self._id_of("eos_token")
            named = named_ends({added[id_].content: id_ for id_ in self._special}).values()
            ends = [*([] if eos is None else [eos]), *named]
        self.eos_ids = tuple(dict.fromkeys(ends))
        self._force_bos = settings.get("add_bos_token") is True
        self._byte_tokens = _byte_tokens(backend)
        self.chat_template = (
            ChatTemplate(templates, self.special_tokens, where=f"{where}: chat template")
            if templates
            else None
        )

    @classmethod
    def from_directory(cls, directory: Path) -> HfTokenizer:
        """Read a model directory. Raises `ModelError` for missing or broken files."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{directory}: has no tokenizer.json; download it, or save it with transformers' "
                "AutoTokenizer.save_pretrained"
            )
        data = _read(path)
        with _library(f"{path}: is not a tokenizer"):
            growth = check_tokenizer(from_json(data), str(path))
            with quiet_panics():
                backend = tokenizers.Tokenizer.from_buffer(data)
        config = _optional_json(directory / "tokenizer_config.json")
        special = _optional_json(directory / "special_tokens_map.json")
        return cls(
            backend,
            special | config,
            load_templates(directory, config),
            where=str(directory),
            growth=growth,
        )

    def save(self, directory: Path) -> list[Path]:
        """Write the files that `from_directory` reads; return them."""
        path, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
        path.write_text(self.to_json(), encoding="utf-8", newline="\n")
        raw: dict[str, Any] = {**self.special_tokens, "add_bos_token": self._force_bos}
        if self.chat_template is not None:
            templates = self.chat_template.templates
            raw["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
        settings.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8", newline="\n")
        return [path, settings]

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens, which are no text."""
        return frozenset(self._special)

    def special_named(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those of these texts that are special tokens."""
        ids = map(self._backend.token_to_id, texts)
        return frozenset(id_ for id_ in ids if id_ in self._special)

    def vocabulary(self) -> Mapping[int, str]:
        """Return the tokens by id, added ones included."""
        return {id_: text for text, id_ in self._backend.get_vocab().items()}

    def to_json(self) -> str:
        """Return the contents of `tokenizer.json`."""
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with what the post-processor and `add_bos_token` add.

        Bytes that a terminal passed on undecoded are read as UTF-8, U+FFFD for what is none.
        """
        clean = _unicode(text)
        if self._growth.own and self._growth.of(len(clean)) > LIMITS.characters:
            raise ModelError(
                f"{self._where}: its tokenizer may make more than {LIMITS.characters} characters "
                f"of this text of {len(clean)}; give less"
            )
        with _library(f"{self._where}: the tokenizer fails on this text"):
            if len(clean) < _LONG:
                encoding = self._backend.encode(clean, add_special_tokens=add_special_tokens)
            else:  # without Python's lock, which the other call keeps
                (encoding,) = self._backend.encode_batch_fast(
                    [clean], add_special_tokens=add_special_tokens
                )
            ids: list[int] = encoding.ids
        if add_special_tokens and self._force_bos and self.bos_id is not None:
            return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, as the tokenizer's decoder writes it."""
        with _library(f"{self._where}: the tokenizer fails on these ids"):
            if len(ids) < _LONG:
                return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
            (text,) = self._backend.decode_batch(
                [list(ids)], skip_special_tokens=skip_special_tokens
            )
        return str(text)

    def decoder(
        self,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> StreamDecoder:
        """Return a streaming decoder for text that continues `context`."""
        skipped = self._special - set(shown) if skip_special_tokens else set[int]()
        stream = _WindowDecoder(self._backend, skipped, self._byte_tokens)
        stream.skip(context[-_CONTEXT_TOKENS:])
        return stream

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        id_: int | None = None if token is None else self._backend.token_to_id(token)
        return id_


class _WindowDecoder(StreamDecoder):
    """A decoder of a window of the last tokens, which returns what is new since the last delta.

    The window starts with the tokens of the previous delta, because a decoder may treat the start
    of a text specially (strip a space). A text that ends in U+FFFD may end inside a character: that
    last character is pending. Tokens for single bytes (`<0xE2>`) turn into U+FFFD as a whole run
    unless they are complete, so they stay outside of the window until they are.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, skipped: set[int], byte_tokens: Mapping[int, int]
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._byte_tokens = byte_tokens
        self._bytes: list[int] = []  # ids of byte tokens that begin a character
        self._window: list[int] = []
        self._resolved = 0  # tokens of the window whose text is out
        self._sent = 0  # characters of the window's text that are out

    def push(self, token: int) -> str:
        """Return the text that becomes certain with this token."""
        if token in self._skipped:
            return ""
        if token in self._byte_tokens:
            self._bytes.append(token)
            if self._is_incomplete():
                return ""
        else:
            self._bytes.append(token)
        self._window += self._bytes
        self._bytes.clear()
        return self._emit(final=False)

    def finish(self) -> str:
        """Return the pending text."""
        self._window += self._bytes
        self._bytes.clear()
        return self._emit(final=True)

    def _is_incomplete(self) -> bool:
        """Return whether the pending bytes are exactly the beginning of a character."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(bytes(self._byte_tokens[token] for token in self._bytes))
        except UnicodeDecodeError:
            return False
        return decoder.getstate()[0] != b""

    def skip(self, context: Sequence[int]) -> None:
        """Take tokens whose text was returned already."""
        for token in context:
            self.push(token)
        self.finish()

    def _emit(self, *, final: bool) -> str:
        text = self._text(self._window)
        open_ended = not final and not self._byte_tokens and text.endswith(REPLACEMENT)
        stable = text[:-1] if open_ended else text
        delta = stable[self._sent :]
        self._sent += len(delta)
        if (delta and not open_ended) or len(self._window) - self._resolved > _MAX_UNRESOLVED:
            self._advance(pending=len(text) - len(stable))
        return delta

    def _advance(self, pending: int) -> None:
        """Let the window begin with the tokens of the last delta.

        `pending` characters are not out yet. Also done after many tokens that are no text at all:
        the window must not grow without end.
        """
        del self._window[: self._resolved]
        self._resolved = len(self._window)
        self._sent = len(self._text(self._window)) - pending

    def _text(self, ids: list[int]) -> str:
        with _library("the tokenizer fails on these ids"):
            text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


class ByteTokenizer(Tokenizer):
    """A tokenizer for random models: UTF-8 bytes are ids. Other ids read as `<id>`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = ()
        self.bos_id = None
        self.chat_template = None

    def vocabulary(self) -> Mapping[int, str]:
        """Return the bytes by id, as Latin-1 spells them."""
        return {id_: chr(id_) for id_ in range(min(self.vocab_size, 256))}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        """Return the bytes of the text in UTF-8."""
        return list(_unicode(text).encode("utf-8"))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the bytes' text, U+FFFD for what is not UTF-8."""
        stream = self.decoder(skip_special_tokens=skip_special_tokens)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def decoder(
        self,
        context: Sequence[int] = (),  # noqa: ARG002  (bytes need none)
        *,
        skip_special_tokens: bool = True,  # noqa: ARG002
        shown: Collection[int] = (),  # noqa: ARG002
    ) -> StreamDecoder:
        """Return a streaming decoder."""
        return _ByteDecoder()


class _ByteDecoder(StreamDecoder):
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the characters that this byte completes, or the name of another id."""
        if 0 <= token < 256:
            return self._utf8.decode(bytes([token]))
        return self.finish() + f"<{token}>"

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _unicode(text: str) -> str:
    """Return text without lone surrogates, which tokenizers do not take.

    Python puts them in the place of bytes on the command line and on stdin that are not in the
    locale's encoding.
    """
    try:
        data = text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:
        data = text.encode("utf-8", errors="surrogatepass")
    return data.decode("utf-8", errors="replace")


def _read(path: Path) -> bytes:
    try:
        return read_document(path, LIMITS.file_bytes)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from error


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Hide what the library prints of a panic: the error that follows says it.

    Other output to stderr is printed at the end.
    """
    with _panics, ExitStack() as stack:
        try:
            captured = stack.enter_context(tempfile.TemporaryFile())
            saved = os.dup(2)
        except OSError:  # no place for it, or no stderr
            yield
            return
        panicked = False
        try:  # around the call too: a signal handler may raise right after it
            os.dup2(captured.fileno(), 2)
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            captured.seek(0)
            if not panicked:
                os.write(2, captured.read())


@contextmanager
def _library(what: str) -> Iterator[None]:
    """Raise the library's errors as `ModelError`: it raises bare `Exception`, and panics."""
    try:
        yield
    except BaseException as error:
        known = type(error) in (Exception, ValueError)  # the library's, and the JSON parser's
        if not known and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what} ({error}); download the file again") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; older files wrap them in an object with `content`."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = _unicode(text)  # JSON can say halves of characters, "\\ud800"
    return tokens


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Return the ids of `<0x00>` … `<0xFF>` and their bytes, if the decoder joins them."""
    decoder = backend.decoder
    # Its own state alone: that of the whole pipeline takes gigabytes where an id is 2^31.
    if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
        return {}
    ids: dict[int, int] = {}
    for value in range(256):
        id_ = backend.token_to_id(f"<0x{value:02X}>")
        if id_ is not None:
            ids[id_] = value
    return ids
