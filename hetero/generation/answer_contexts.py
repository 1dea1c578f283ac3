"""The context of each answer: the caller's or the model's own, with room for the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from hetero.errors import UserError
from hetero.generation.loop import Generation
from hetero.generation.options import GenerationConfig
from hetero.generation.own_contexts import OwnContexts
from hetero.models import LoadedModel
from hetero.placement.choice import Choice
from hetero.placement.device_set import DeviceSet
from hetero.runtime.engine import ContextFullError, Engine
from hetero.runtime.kv.context import Context, check_shift
from hetero.runtime.sizes import LONGEST_VERIFIED

if TYPE_CHECKING:
    from hetero.generation.drafts import Draft


class OpenModel(Protocol):
    """A model's devices as they are now, and why these."""

    devices: DeviceSet
    choice: Choice


class AnswerContexts:
    """Starts answers on contexts, `own` where the caller gives none.

    What is `opened` says in an answer's statistics why it ran where it did (`Stats`). `draft`
    guesses tokens ahead, the text so far where there is none.
    """

    def __init__(
        self,
        engine: Engine,
        model: LoadedModel,
        own: OwnContexts,
        opened: OpenModel,
        draft: Draft | None = None,
    ) -> None:
        self._engine, self._model, self._own = engine, model, own
        self._opened, self._draft = opened, draft

    def begin(
        self,
        tokens: list[int],
        config: GenerationConfig,
        *,
        is_text: bool,
        keep_prompt: bool,
    ) -> Generation:
        """Check everything and take the context for an answer.

        `is_text`: the prompt was a text, whose beginning token is dropped where it goes on from
        another. Raises `UserError`.
        """
        drafts = None if self._draft is None else self._draft.drafter
        if config.speculative is None:
            guesses = 0 if self._draft is None else LONGEST_VERIFIED - 1
            config = replace(config, speculative=guesses)
        if config.context is None:
            context, hold = self._own.take(tokens[:-1], reuse=config.reuse)
        else:
            context = self._engine.contexts.own(config.context)
            hold = context.hold()
        try:
            goes_on = config.context is not None and not config.reuse
            if goes_on and is_text:
                tokens = self._without_start(context, tokens)
            self._check_room(len(context) if goes_on else 0, tokens)
            if config.context_shift:
                self._check_shift(context, config.keep, many=keep_prompt)
            self._engine.check_tokens(tokens)
            reused = 0 if goes_on else self._rewind(context, tokens, config)
            return Generation(
                self._engine,
                context,
                hold,
                self._model,
                tokens,
                config,
                ended=self._own.end,
                reused=reused,
                keep_prompt=keep_prompt,
                fallback=self._opened.devices.fallback,
                choice=self._opened.choice.reason,
                drafts=drafts,
            )
        except BaseException:
            hold.active = False
            self._own.end()
            raise

    @contextmanager
    def cleared(self) -> Iterator[Context]:
        """Take one of the model's own contexts, empty, for something that is no answer."""
        context, hold = self._own.take((), reuse=False)
        try:
            self._engine.lock.check()
            with self._engine.lock:
                context.rewind(0)
                yield context
        finally:
            hold.active = False
            self._own.end()

    def _rewind(self, context: Context, tokens: Sequence[int], config: GenerationConfig) -> int:
        """Keep what the context shares with the beginning of a text; return how many tokens.

        Only if reuse is requested.
        """
        whole = not config.reuse or (config.echo and config.logprobs is not None)
        kept = 0 if whole else context.shared(tokens[:-1])
        context.rewind(kept)
        context.rewind(context.cached)  # windows or states may have lost what it would go on from
        return context.cached

    def _without_start(self, context: Context, tokens: list[int]) -> list[int]:
        """Return a text's tokens, without the start token if the text continues another."""
        start = self._model.tokenizer.bos_id
        goes_on = len(context) > 0 and len(tokens) > 1 and tokens[0] == start
        return tokens[1:] if goes_on else tokens

    def _check_room(self, before: int, tokens: Sequence[int]) -> None:
        """Raise `UserError` unless the prompt and one token of an answer fit the context."""
        if before + len(tokens) >= self._engine.max_seq_len:
            behind = f" after the {before} that it continues" if before else ""
            remedy = "truncate() the context" if before else "shorten the prompt"
            raise ContextFullError(
                f"a prompt of {len(tokens)} tokens{behind} and its answer do not fit the context "
                f"of {self._engine.max_seq_len}: {remedy} or open the model with a larger "
                "max_seq_len"
            )

    def _check_shift(self, context: Context, keep: int, *, many: bool) -> None:
        """Raise `UserError` unless a full context has tokens to move, and some to drop."""
        check_shift(context.home)
        if many:
            raise UserError("several answers to one prompt share its context: no context_shift")
        if keep + 2 > self._engine.max_seq_len:
            raise UserError(
                f"keep is {keep}, which leaves nothing to forget in a context of "
                f"{self._engine.max_seq_len}: keep at most {self._engine.max_seq_len - 2}"
            )
