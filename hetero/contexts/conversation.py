"""A conversation: its history, its context in the KV cache, and what to do when that is full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from hetero.arguments import check_messages
from hetero.errors import UserError
from hetero.generation.loop import GenerationResult, Piece

if TYPE_CHECKING:
    from hetero.generation.llm import LLM
    from hetero.generation.options import GenerateOptions


class Conversation:
    """Messages that a model answers in turn.

    A turn prefills only what the context does not hold already. When history and answer no longer
    fit the context, the oldest messages after the system message are left out, a turn at a time;
    `dropped` counts them. `messages` is the whole history.
    """

    def __init__(self, llm: LLM, *, system: str | None = None) -> None:
        self._llm = llm
        self.messages: list[dict[str, Any]] = []
        self.dropped = 0
        if system:
            self.messages.append({"role": "system", "content": system})

    def say(self, text: str, **options: Unpack[GenerateOptions]) -> GenerationResult:
        """The model's answer to a message."""
        ended: list[GenerationResult] = []
        for _ in self.stream(text, on_end=ended, **options):
            pass
        return ended[0]

    def stream(
        self,
        text: str,
        *,
        on_end: list[GenerationResult] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Piece]:
        """Pieces of the answer; an answer that is not read to its end is not remembered."""
        asked = {"role": "user", "content": text}
        tokens = self._fitting([*self.messages, asked], int(options.get("max_tokens", 1)))
        ended: list[GenerationResult] = []
        options["chat"] = options["reuse"] = True
        yield from self._llm.stream(tokens, on_end=ended, **options)
        self.messages += [asked, {"role": "assistant", "content": ended[0].text}]
        if on_end is not None:
            on_end += ended

    def save(self, path: str | Path) -> None:
        """Write history and context to a file (see `LLM.save_session`)."""
        self._llm.save_session(path, messages=self.messages)

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote. Raises `ModelError`, and changes nothing, if it is
        broken or of another model.
        """
        self.messages = self._llm.load_session(path)

    def _fitting(self, messages: Sequence[dict[str, Any]], answer: int) -> list[int]:
        """Token ids of as much of the conversation as leaves room for an answer.

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
