"""A conversation: its history, its context in the KV cache, and what to do when that is full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from hetero.arguments import check_messages
from hetero.errors import UserError
from hetero.runtime.kv.context import Context

if TYPE_CHECKING:
    from hetero.generation.loop import Delta, Generation, GenerationResult
    from hetero.generation.options import GenerateOptions


class ChatModel(Protocol):
    """A model that answers chats: `hetero.LLM`."""

    max_seq_len: int

    @property
    def context(self) -> Context:
        """Return the model's own context."""

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of messages."""

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Generation:
        """Stream the answer."""


class Conversation:
    """Messages that a model answers in turn.

    A turn prefills only what the context does not hold already. When history and answer no longer
    fit the context, the oldest messages after the system message are left out, a turn at a time;
    `dropped` counts them. `messages` is the whole history, `last` the last finished answer.
    """

    def __init__(
        self, llm: ChatModel, *, system: str | None = None, context: Context | None = None
    ) -> None:
        self._llm = llm
        self._context = llm.context if context is None else context
        self.last: GenerationResult | None = None
        self.messages: list[dict[str, Any]] = []
        self.dropped = 0
        if system:
            self.messages.append({"role": "system", "content": system})

    def say(self, text: str, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """Return the model's answer to a message."""
        for _ in self.stream(text, **options):
            pass
        assert self.last is not None
        return self.last

    def stream(self, text: str, **options: Unpack[GenerateOptions]) -> Iterator[Delta]:
        """Yield deltas of the answer; an answer that is not read to its end is not remembered."""
        config = {"role": "user", "content": text}
        tokens = self.fitting([*self.messages, config], int(options.get("max_tokens", 1)))
        options["chat"] = options["reuse"] = True
        options["context"] = self._context
        with self._llm.stream(tokens, **options) as answer:
            yield from answer
        self.last = answer.result()
        self.messages += [config, {"role": "assistant", "content": self.last.text}]

    def save(self, path: str | Path) -> None:
        """Write history and context to a file (see `Context.save`)."""
        self._context.save(path, messages=self.messages)

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote.

        Raises `ModelError`, and changes nothing, if it is broken or of another model.
        """
        self.messages = self._context.load(path)

    def fitting(self, messages: Sequence[dict[str, Any]], answer: int) -> list[int]:
        """Return token ids of as much of the conversation as leaves room for an answer.

        The answer gets what it asks for, but never more than half of the context: a short memory is
        worse than a short answer. Raises `UserError` if the last message alone does not fit.
        """
        messages = check_messages(messages)
        limit = self._llm.max_seq_len
        room = limit - max(1, min(answer, limit // 2))
        system = messages[:1] if messages[0]["role"] == "system" else []
        turns = messages[len(system) :]
        self.dropped = 0
        while True:
            tokens = self._llm.encode_chat([*system, *turns])
            if len(tokens) <= room:
                return tokens
            if len(turns) == 1:
                break
            later = next((i for i in range(1, len(turns)) if turns[i]["role"] == "user"), 1)
            turns = turns[later:]
            self.dropped += later
        if len(tokens) < limit:
            return tokens
        raise UserError(
            f"the message has {len(tokens)} tokens, the context of {limit} must hold it and an "
            "answer; shorten it or open the model with a larger max_seq_len"
        )
