"""The generation loop, from a prompt to text, and its results."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Self, TypeAlias

from hetero.backends.errors import DeviceError
from hetero.backends.host.closing import Closing
from hetero.errors import UserError
from hetero.generation.answer_stats import AnswerMeter, Stats, TimeSource
from hetero.generation.answer_text import AnswerText
from hetero.generation.options import GenerationConfig
from hetero.generation.prompt_reader import PromptReader
from hetero.generation.sampling import Constraint, Logits, SamplingParams, TokenLogprob
from hetero.generation.speculative import Drafter, SpeculativeDecoder
from hetero.generation.token_chooser import TokenChooser
from hetero.models import LoadedModel
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context, Hold

FinishReason: TypeAlias = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A delta of the answer as it is generated.

    `text` may be empty; `token` is the id, `logprob` its log-probability, if requested.
    """

    text: str
    token: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


class Pending:
    """A placeholder of a delta that the next call returns: see `Generation.advance`."""


PENDING: Final = Pending()


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished answer.

    `stop` is the stop text that ended it, if one did.
    `logprobs` has an entry per token of the answer (an end-of-text token included), if asked for;
    `prompt_logprobs` one per token of the prompt but the first, if it was to be echoed too.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stop: str = ""

    @property
    def mean_logprob(self) -> float:
        """Return the mean log-probability of the answer's tokens.

        Minus infinity without `logprobs`.
        """
        if not self.logprobs:
            return -math.inf
        return sum(x.logprob for x in self.logprobs) / len(self.logprobs)


class Generation(Iterator[Delta], Closing):
    """A running answer. Iterate over its deltas, then ask for the `result`.

    Or drive it from outside: `step` runs the devices once and gives a delta, if there is one, until
    it is `finished`. The devices are taken for a step at a time, so several generations on contexts
    of their own take turns as their readers ask, from one thread or from many; a slow reader keeps
    no thread waiting. Its context is its own until it is finished or closed, and then has the
    prompt and the answer, whose last token is still to be computed. A generation itself is used by
    one thread at a time.

    `hold` is its use of the context, and `ended` is called when that is over. `prompt` continues
    the text of `context`. The first `reused` tokens of it are there already and counted only. With
    `logprobs` (how many alternatives) every token's log-probability is kept; with `echo` the prompt
    is part of the text, and of the log-probabilities. With `keeps_prompt`, which is set before the
    first step, the context is not released before `close`, and `fork` gives further answers.
    `drafts` returns what guesses tokens of a context's text, with `config.speculative`.
    """

    def __init__(
        self,
        engine: Engine,
        context: Context,
        hold: Hold,
        model: LoadedModel,
        prompt: Sequence[int],
        config: GenerationConfig,
        *,
        ended: Callable[[], object] = lambda: None,
        reused: int = 0,
        keep_prompt: bool = False,
        fallback: str = "",
        choice: str = "",
        clock: TimeSource = time.perf_counter,
        drafts: Callable[[Context, Sequence[int]], Drafter] | None = None,
    ) -> None:
        self.context, self._hold, self._ended = context, hold, ended
        self._engine, self._model, self._config = engine, model, config
        self._prompt, self._reused = list(prompt), reused
        self.keeps_prompt, self._started = keep_prompt, False
        self._fallback, self._choice, self._clock, self._drafts = fallback, choice, clock, drafts
        rest = self._prompt[reused:]
        scored = config.logprobs if config.echo else None
        self._reader = PromptReader(
            engine, context, [*context.pending, *rest], rest, logprobs=scored
        )
        self._meter = AnswerMeter(context, clock)
        self._seen = [*context.tokens, *rest]
        continues = not config.chat
        decoder = model.tokenizer.decoder(
            self._prompt if continues else (), shown=config.shown_tokens
        )
        echo = model.tokenizer.decode(prompt) if config.echo else ""
        self._text = AnswerText(decoder, config.stop, echo)
        self._end = frozenset(model.eos_ids)
        self._chooser = TokenChooser(config, self._end)
        self._tokens: list[int] = []
        self._reason: FinishReason | None = None
        self._guesses: SpeculativeDecoder | None = None
        self._next: int | None = None  # the token that was chosen last
        self._pending_token: int | None = None  # the same, while no delta was made of it
        self._given: Logits | None = None  # those behind it

    @property
    def finished(self) -> bool:
        """Return whether there is nothing more to come."""
        return self._reason is not None or not self._hold.active

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta, computed in a thread while the event loop continues."""
        import asyncio  # heavy (it brings sockets and TLS), and its callers have it

        delta = await asyncio.to_thread(next, self, None)
        if delta is None:
            raise StopAsyncIteration
        return delta

    def __next__(self) -> Delta:
        while not self.finished:
            if (delta := self.step()) is not None:
                return delta
        raise StopIteration

    def step(self) -> Delta | None:
        """Run the devices once: a call of the prompt, or for the next token.

        None while the prompt is read. Raises `ValueError` if it is finished, else what the engine
        does.
        """
        delta = self.advance()
        return self.step() if isinstance(delta, Pending) else delta

    def advance(self) -> Delta | Pending | None:
        """Advance as `step` does, but return `PENDING` where the answer continues in any case.

        The next call returns the delta, and runs no device, so another step can begin before its
        text is decoded.
        """
        if self.finished:
            raise ValueError("this answer is finished: ask for its result")
        try:
            if self._pending_token is None:
                if not self._run():
                    return None
                if self._reason is None and not self._config.stop:
                    return PENDING
            delta = self._delta()
        except BaseException as error:
            self.close()
            if not isinstance(error, DeviceError | UserError):
                # A block that a signal handler interrupted on entry ends now, not when the
                # traceback is dropped (which a notebook keeps): the core of this thread, for one.
                traceback.clear_frames(error.__traceback__)
            raise
        if delta.finish_reason is not None:
            self._end_text()
            if not self.keeps_prompt:
                self.close()
        return delta

    def _run(self) -> bool:
        """Run the devices once; return whether a token was chosen."""
        self._hold.thread = threading.get_ident()
        self._engine.lock.check()
        with self._engine.lock:
            token = self._prompt_step() if self._next is None else self._decode_step()
        if token is None:
            return False
        self._next = self._pending_token = token
        if token in self._end:
            self._reason = "stop"
            return True
        self._tokens.append(token)
        self._seen.append(token)
        if len(self._tokens) >= self._config.max_tokens:
            self._reason = "length"
        elif len(self._seen) >= self._engine.max_seq_len and not self._config.context_shift:
            self._reason = "context"
        return True

    @property
    def wanted(self) -> int | None:
        """Return the token whose logits the next `step` computes, if `give` may give them.

        Not while the prompt is read, nor where tokens are guessed, or some must be dropped first.
        """
        free = not (self.finished or self._guesses or self._given is not None or self._is_full())
        return self._next if free and not self.context.pending else None

    def give(self, logits: Logits) -> None:
        """Take the logits [vocab] after the `wanted` token, which is in the context already."""
        self._given = logits

    def close(self) -> None:
        """Release the context, which has what was read so far; idempotent."""
        hold = self._hold
        if hold.active:
            try:
                self._end_text()
            finally:
                self._reader.close()
                hold.active = False
                self._ended()

    def __del__(self) -> None:
        if hasattr(self, "_hold"):
            self.close()

    def fork(
        self,
        sampling: SamplingParams,
        constraint: Constraint | None = None,
        target: Context | None = None,
    ) -> Generation:
        """Return another answer to the same prompt, on a fork of the context (`Context.copy`).

        The prompt is not read again. Close that context when it is done. Raises `UserError` where
        there is no memory for it.
        """
        read = self._reader.read
        assert self._hold.active
        assert read.logits is not None, "keeps_prompt, and a step behind the prompt"
        context = self.context.copy(target)
        context.rewind(read.length)
        other = Generation(
            self._engine,
            context,
            context.hold(),
            self._model,
            self._prompt,
            replace(self._config, sampling=sampling, constraint=constraint),
            reused=len(self._prompt),
            fallback=self._fallback,
            choice=self._choice,
            clock=self._clock,
            drafts=self._drafts,
        )
        other._reader.read, other._seen = read, self._seen[: len(self._seen) - len(self._tokens)]
        return other

    def result(self) -> GenerationResult:
        """Return the answer so far; complete once it is finished."""
        return GenerationResult(
            text=str(self._text),
            tokens=tuple(self._tokens),
            finish_reason=self._reason or "length",
            stats=self._meter.stats(
                self._engine,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(self._tokens),
                reused_tokens=self._reused,
                fallback=self._fallback,
                speculation=self._guesses.statistics if self._guesses is not None else None,
                choice=self._choice,
            ),
            logprobs=tuple(self._chooser.logprobs),
            prompt_logprobs=self._reader.read.logprobs,
            stop=self._text.stop,
        )

    def _prompt_step(self) -> int | None:
        """Run a call of the prompt; return the first token after the last one."""
        if not self._started:
            self._started = True
            if self._config.speculative:
                self._guesses = SpeculativeDecoder(
                    self._engine, self.context, self._seen, self._config.speculative,
                    self._drafts and self._drafts(self.context, self._seen), self._clock,
                )  # fmt: skip
            self._meter.start()
        logits = self._reader.step(keeps=self.keeps_prompt)
        if logits is None:
            return None
        token = self._chooser.choose(logits, self._seen, self._tokens)
        self._meter.first_token()
        return token

    def _decode_step(self) -> int:
        assert self._next is not None
        if self._given is None:
            self._compute(self._next)
        assert self._given is not None
        logits, self._given = self._given, None
        token = self._chooser.choose(logits, self._seen, self._tokens)
        self._meter.next_token()
        return token

    def _compute(self, token: int) -> None:
        """Compute the logits after a token."""
        if self._is_full():
            self._shift()
        if self.context.pending:  # windows have lost what it would go on from
            self._engine.prefill(self.context, self.context.pending)
        if self._guesses is None:
            self._given = self._engine.decode(self.context, token)
        else:
            self._given = self._guesses.decode(token)

    def _is_full(self) -> bool:
        return len(self._seen) >= self._engine.max_seq_len

    def _shift(self) -> None:
        """Make room in the context: drop half of the tokens after the first ones."""
        keep = self._config.keep
        drop = max(1, (self.context.cached - keep) // 2)
        self.context.forget(keep, drop)
        del self._seen[keep : keep + drop]
        self._meter.shifted_tokens += drop

    def _delta(self) -> Delta:
        """Return the delta of the token that was chosen last."""
        token, self._pending_token = self._pending_token, None
        assert token is not None
        said = None if token in self._end else token
        shown = self._text.push(said, ends=self._reason is not None)
        if self._text.stopped:
            self._reason = "stop"
        logprob = self._chooser.logprobs[-1] if self._chooser.logprobs else None
        return Delta(text=shown, token=token, finish_reason=self._reason, logprob=logprob)

    def _end_text(self) -> None:
        """Drop guesses from the context, add the whole text, and record the answer's work.

        Takes no lock: it also runs when the generation is collected as garbage.
        """
        if self._meter.ended:
            return
        if self._pending_token is not None:
            self._delta()
        work = self._meter.work
        if self._guesses is not None:
            self._guesses.close()
        if self._next is not None:  # the prompt was read
            self.context.note(self._seen)
        self._meter.end(work)  # last: an end that was interrupted is repeated


class _Once:
    """A function that is called only the first time."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


def decode_together(
    engine: Engine,
    answers: Sequence[Generation],
    on_device_busy: Callable[[], object] = lambda: None,
) -> None:
    """Compute the next step of each answer, several in one step of the devices.

    Answers that are left out (their prompt is being read, they are one too many, or it failed)
    compute it themselves, and raise their errors. `on_device_busy` is called once, while the
    devices compute if they do. It runs no step.
    """
    once = _Once(on_device_busy)
    wanted = ((answer, answer.wanted) for answer in answers)
    waiting = [(answer, token) for answer, token in wanted if token is not None]
    count = -(-len(waiting) // engine.max_rows)
    for first in range(count):
        part = waiting[first::count]
        rows = [(answer.context, token) for answer, token in part]
        rows_logits: Sequence[Logits | None] = ()
        engine.lock.check()
        try:
            with engine.lock:
                if len(rows) > 1:
                    rows_logits = engine.decode_rows(rows, once)
                elif count == 1:  # another's prompt may be read before these are taken: a copy
                    rows_logits = [engine.decode(*rows[0], once).copy()]
        except (DeviceError, UserError):  # which of them it is for, each will learn
            continue
        for (answer, _), logits in zip(part, rows_logits, strict=bool(rows_logits)):
            if logits is not None:
                answer.give(logits)
    once()
