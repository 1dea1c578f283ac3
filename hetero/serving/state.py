"""The endpoints' view of a model: its tokenizer, its engine, and what all models share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, TypeVar

import anyio.to_thread

from hetero.errors import UserError
from hetero.generation.defaults import CHAT_SAMPLING, model_sampling
from hetero.models import LoadedModel
from hetero.serving.answer_parser import AnswerForm
from hetero.serving.call_grammars import CallWriter
from hetero.serving.database import StoredTokens
from hetero.serving.engine_client import EngineClient
from hetero.serving.errors import ApiError, too_long
from hetero.serving.grammars import TokenBytes
from hetero.serving.metrics import Metrics
from hetero.serving.store import Store
from hetero.serving.template_facts import TemplateFacts

T = TypeVar("T")
SHORT: Final = 1000  # characters
LONG: Final = 50_000  # characters, which take a tenth of a second
TOKEN_CHARACTERS: Final = 16  # which few tokens have
CUT_TOKENS: Final = 16  # at most so many more has a text because it is cut off


def characters_of(value: Any) -> int:
    """Return how many characters the texts in messages, items or tools have."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(characters_of, value.values()))
    return sum(map(characters_of, value)) if isinstance(value, list | tuple) else 0


@dataclass(kw_only=True)
class State:
    """One model's objects, used in one event loop.

    `names` are the model's names (`*`: any), `engine` is replaced when it is loaded again, `store`
    and `metrics` are the server's. `reasoning_budget` is the most tokens of a thought (-1: no
    limit), `pooling` that of embeddings (None: what the model's files say).
    """

    model: LoadedModel
    names: Sequence[str]
    engine: EngineClient
    store: Store
    metrics: Metrics
    token_bytes: TokenBytes
    slots: int
    reasoning_budget: int = -1
    pooling: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._texts, self._long_texts = anyio.CapacityLimiter(2), anyio.CapacityLimiter(1)

    @property
    def max_seq_len(self) -> int:
        """Return the most tokens of prompt and answer."""
        return int(self.engine.about["max_seq_len"])

    @property
    def shifts(self) -> bool:
        """Return whether a full context can forget tokens and go on (`context_shift`)."""
        return bool(self.engine.about["context_shift"])

    @property
    def template(self) -> str:
        """Return the chat template's source; empty if there is none."""
        template = self.model.tokenizer.chat_template
        return "" if template is None else template.templates.get("default", "")

    @property
    def name(self) -> str:
        """Return the model's first name."""
        return next(name for name in self.names if name != "*")

    def named(self, name: str | None) -> str:
        """Return the model's name for a response: the one that it was asked for by."""
        return name or self.name

    def stored_tokens(self, tokens: list[int]) -> StoredTokens:
        """Return tokens as the records have them: with the model that they are of."""
        return {"model": self.model.name, "ids": tokens}

    def tokens_of(self, stored: StoredTokens) -> list[int]:
        """Return stored tokens; none of another model's."""
        if isinstance(stored, list):  # of a version that served one model
            return stored
        return stored["ids"] if stored["model"] == self.model.name else []

    def check_slot(self, slot: int) -> int:
        """Return a slot's number, or -1. Raises `ApiError`."""
        if not -1 <= slot < self.slots:
            raise ApiError(
                400, f"slots are numbered 0 to {self.slots - 1}; -1 is any", param="id_slot"
            )
        return slot

    async def check_length(self, texts: Sequence[str], param: str) -> None:
        """Raise `ApiError` for texts whose beginning alone has more tokens than the context.

        Only that is encoded of long texts, which would keep the threads of tokenizer and template
        from other apps' requests.
        """
        room = self.max_seq_len
        beginning, whole = room * TOKEN_CHARACTERS, sum(map(len, texts))
        if whole <= 2 * beginning:  # then encoding all of it takes no longer
            return
        tokens = await self.encoded("".join(texts)[:beginning])
        if len(tokens) > room + CUT_TOKENS:
            size = f"and of its {whole} characters the first {beginning} alone have more"
            raise too_long(room, size, param)

    async def texts(
        self, work: Callable[..., T], *arguments: Any, characters: int = 0, **options: Any
    ) -> T:
        """Run work of tokenizer, template or grammar on about so many `characters` in a thread.

        Long texts wait for each other, in a thread of their own, so that short ones do not wait for
        them. Raises `UserError` as `ApiError`.
        """
        call = partial(work, *arguments, **options)
        limiter = self._long_texts if characters > LONG else self._texts
        try:
            return await anyio.to_thread.run_sync(call, limiter=limiter)
        except UserError as error:
            raise ApiError(400, str(error)) from error

    async def encoded(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        (tokens,) = await self.all_encoded([text])
        return tokens

    async def all_encoded(self, texts: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the tokens of texts; of short ones without the cost of waking a thread."""
        if (characters := sum(len(x) for x in texts if isinstance(x, str))) > SHORT:
            return await self.texts(self._encode_all, texts, characters=characters)
        try:
            return self._encode_all(texts)
        except UserError as error:
            raise ApiError(400, str(error)) from error

    def _encode_all(self, texts: Sequence[str | list[int]]) -> list[list[int]]:
        return [self.model.encode(x) if isinstance(x, str) else x for x in texts]

    def token_text(self, token: int) -> str:
        """Return a token's text for clients: bytes that are no character are U+FFFD."""
        return self.token_bytes.of(token).decode("utf-8", "replace")

    @cached_property
    def template_facts(self) -> TemplateFacts:
        """Return the abilities of the chat template; trying them out takes milliseconds."""
        return TemplateFacts.of(self.model.tokenizer)

    @cached_property
    def answer_form(self) -> AnswerForm:
        """Return how the model writes thoughts and calls."""
        return AnswerForm.of(self.model.tokenizer)

    @cached_property
    def call_writer(self) -> CallWriter:
        """Return the maker of grammars of answers with calls."""
        return CallWriter.of(self.model.tokenizer, self.answer_form, self.token_bytes)

    @cached_property
    def sampling(self) -> Mapping[str, Any]:
        """Return the sampling options of requests that give none: the authors', else a chat's."""
        return {**(model_sampling(self.model.source) or CHAT_SAMPLING)}
