"""From a prompt to text: the generation loop, its results and statistics."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Literal, Protocol, Self, TypeAlias

import numpy as np

from hetero.backends.errors import DeviceError
from hetero.errors import UserError
from hetero.generation.options import GenerationConfig
from hetero.generation.sampling import Logits, Sampler, SamplingParams, TokenLogprob, token_logprob
from hetero.generation.speculative import DraftStats, LookupDecoder
from hetero.models import LoadedModel
from hetero.models.tokenizer import StreamDecoder
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context, Hold
from hetero.runtime.usage import Work

FinishReason: TypeAlias = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """Work of one device: operations run and seconds busy (measured)."""

    ops: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measured on this machine. Speeds in tokens/s; `ttft_s` is the time to the first token.

    `reused_tokens` of the prompt were in the context already; `prefill_tokens_per_s` counts the
    others. `decode_tokens_per_s` counts decode steps (one token each after the first); 0 without
    any.
    `speculation` says how many guessed tokens were right, where tokens were guessed.
    `gpu_share` is the part of the time that the GPU was busy, where `max_gpu_share` bounds it;
    `npu_idle_share` the part of the prompt's time in which the NPU had nothing to do, where both
    devices work; `prompt_form` how its matmuls are cut and its calls ordered, and what was
    predicted of the other ways, where it has several.
    `adaptations` are the changes of the cuts since the model was opened, with their reasons.
    `choice` is why `--device auto` chose what it did; empty otherwise.
    `shifted_tokens` are those that a full context forgot, with `context_shift`.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    reused_tokens: int = 0
    placement: dict[str, DeviceShare | str] = field(default_factory=dict)
    speculation: DraftStats | None = None
    gpu_share: float | None = None
    npu_idle_share: float | None = None
    prompt_form: str = ""
    adaptations: tuple[str, ...] = ()
    choice: str = ""
    shifted_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the answer as it is generated. `text` may be empty; `token` is the id, `logprob`
    its log-probability, if asked for.
    """

    text: str
    token: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


class Pending:
    """Stands for a piece that the next call returns: see `Generation.advance`."""


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
        """Mean log-probability of the answer's tokens; minus infinity without `logprobs`."""
        if not self.logprobs:
            return -math.inf
        return sum(x.logprob for x in self.logprobs) / len(self.logprobs)


class TimeSource(Protocol):
    """Seconds from some fixed point."""

    def __call__(self) -> float: ...


class StopFilter:
    """A filter that buffers text that may begin a stop string, and cuts at the first stop string.

    A single string is one stop text, not its letters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = (stops,) if isinstance(stops, str) else stops
        if any(not stop for stop in stops):
            raise UserError("a stop text must not be empty")
        self._stops = tuple(stops)
        self._pending = ""
        self.stopped = False
        self.matched = ""  # the stop text that ended it

    def push(self, text: str) -> str:
        """Return text that is safe to show now."""
        self._pending += text
        matches = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            at, self.matched = min(matches)
            shown, self._pending = self._pending[:at], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._pending) - keep
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown

    def flush(self) -> str:
        """Return the buffered text, at the end of the answer."""
        shown, self._pending = self._pending, ""
        return shown

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n])), 0)


class Generation(Iterator[Piece]):
    """One answer in the making. Iterate over its pieces, then ask for the `result`.

    Or drive it from outside: `step` runs the devices once and gives a piece, if there is one, until
    it is `finished`. The devices are taken for a step at a time, so several generations on contexts
    of their own take turns as their readers ask, from one thread or from many; a slow reader keeps
    no thread waiting. Its context is its own until it is finished or closed, and then holds
    the prompt and the answer, whose last token is still to be computed. A generation itself
    is used by one thread at a time.

    `hold` is its use of the context, and `ended` is called when that is over. `prompt` goes on from
    what `context` holds. The first `reused` tokens of it are there already
    and counted only. `whole` says that it is no beginning of a text: with `logprobs` (how many
    alternatives) every token's log-probability is kept; with `echo` the prompt is part of the text,
    and of the log-probabilities. With `keep_prompt` the context is not given up before `close`, and
    `fork` gives further answers.
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
    ) -> None:
        self.context, self._hold, self._ended = context, hold, ended
        self._engine, self._model, self._config = engine, model, config
        self._prompt, self._reused = list(prompt), reused
        self._keeps, self._kept = keep_prompt, _Kept()
        self._fallback, self._choice, self._clock = fallback, choice, clock
        self._todo = [*context.pending, *self._prompt[reused:]]
        self._seen = [*context.tokens, *self._prompt[reused:]]
        self._sampler = Sampler(config.sampling)
        continues = not config.chat
        self._decoder: StreamDecoder = model.tokenizer.decoder(self._prompt if continues else ())
        self._end = frozenset(model.eos_ids)
        self._filter = StopFilter(config.stop)
        self._logprobs: list[TokenLogprob] = []
        self._tokens: list[int] = []
        self._texts: list[str] = [model.tokenizer.decode(prompt)] if config.echo else []
        self._reason: FinishReason | None = None
        self._lookup: LookupDecoder | None = None
        self._calls: Iterator[Logits | None] | None = None  # of the prompt, while it is read
        self._next: int | None = None  # the token that was chosen last
        self._pending_token: int | None = None  # the same, while no piece was made of it
        self._given: Logits | None = None  # those behind it
        self._decode_steps = 0
        self._shifted = 0  # tokens that the context forgot
        self._before = context.work.copy()
        self._work: Work | None = None  # of this answer, once it has ended
        self._times: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def finished(self) -> bool:
        """Return whether there is nothing more to come."""
        return self._reason is not None or not self._hold.active

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece, computed in a thread: the event loop goes on meanwhile."""
        import asyncio  # heavy (it brings sockets and TLS), and its callers have it

        piece = await asyncio.to_thread(next, self, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __next__(self) -> Piece:
        while not self.finished:
            if (piece := self.step()) is not None:
                return piece
        raise StopIteration

    def step(self) -> Piece | None:
        """Run the devices once: a call of the prompt, or for the next token. None while the prompt
        is read. Raises `ValueError` if it is finished, else what the engine does.
        """
        piece = self.advance()
        return self.step() if isinstance(piece, Pending) else piece

    def advance(self) -> Piece | Pending | None:
        """Advance as `step` does, but return `PENDING` where the answer continues whatever the
        piece says: the next call returns it, and runs no device, so another step can begin before
        its text is decoded.
        """
        if self.finished:
            raise ValueError("this answer is finished: ask for its result")
        try:
            if self._pending_token is None:
                if not self._run():
                    return None
                if self._reason is None and not self._config.stop:
                    return PENDING
            piece = self._piece()
        except BaseException as error:
            self.close()
            if not isinstance(error, DeviceError | UserError):
                # A block that a signal handler interrupted on entry ends now, not when the
                # traceback is dropped (which a notebook keeps): the core of this thread, for one.
                traceback.clear_frames(error.__traceback__)
            raise
        if piece.finish_reason is not None:
            self._end_text()
            if not self._keeps:
                self.close()
        return piece

    def _run(self) -> bool:
        """Run the devices once; whether a token was chosen."""
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
        """Return the token whose logits the next `step` computes, if `give` may give them: not
        while the prompt is read, nor where tokens are guessed, or some must be forgotten first.
        """
        free = not (self.finished or self._lookup or self._given is not None or self._is_full())
        return self._next if free and not self.context.pending else None

    def give(self, logits: Logits) -> None:
        """The logits [vocab] behind the token that was `wanted`: it is in the context already."""
        self._given = logits

    def close(self) -> None:
        """Give the context up, which holds what was read so far; idempotent."""
        hold = self._hold
        if hold.active:
            try:
                self._end_text()
            finally:
                self._calls, hold.active = None, False
                self._ended()

    def __del__(self) -> None:
        if hasattr(self, "_hold"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def fork(self, sampling: SamplingParams) -> Generation:
        """Return another answer to the same prompt, which is not read again, on a fork of the
        context.

        Close that context when it is done. Raises `UserError` where there is no memory for it.
        """
        kept = self._kept
        assert self._hold.active
        assert kept.logits is not None, "keep_prompt, and a step behind the prompt"
        context = self.context.copy()
        context.rewind(kept.length)
        other = Generation(
            self._engine,
            context,
            context.hold(),
            self._model,
            self._prompt,
            replace(self._config, sampling=sampling),
            reused=len(self._prompt),
            fallback=self._fallback,
            choice=self._choice,
            clock=self._clock,
        )
        other._kept, other._seen = kept, self._seen[: len(self._seen) - len(self._tokens)]
        return other

    def result(self) -> GenerationResult:
        """Return the answer so far; complete once it is finished."""
        return GenerationResult(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=self._reason or "length",
            stats=self._stats(),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._kept.logprobs,
            stop=self._filter.matched,
        )

    def _prompt_step(self) -> int | None:
        """Return a call of the prompt; the first token behind the last one."""
        if self._calls is None:
            if self._config.speculative:
                self._lookup = LookupDecoder(
                    self._engine, self.context, self._seen, self._config.speculative
                )
            self._times = (self._clock(), 0.0, 0.0)
            self._calls = self._prompt_calls()
        logits = next(self._calls)
        if logits is None:
            return None
        self._calls = None  # it knows this object: a circle
        if self._keeps:
            self._kept.logits, self._kept.length = logits.copy(), self.context.cached
        token = self._choose(logits)
        now = self._clock()
        self._times = (self._times[0], now, now)
        return token

    def _prompt_calls(self) -> Iterator[Logits | None]:
        """Reads the prompt; the last item is the logits behind it."""
        if self._kept.logits is not None:
            yield self._kept.logits
        elif not (self._config.echo and self._config.logprobs is not None):
            yield from self._engine.prefill_calls(self.context, self._todo)
        else:
            yield from self._score()

    def _score(self) -> Iterator[Logits | None]:
        """Prefill as the engine's `prefill_calls`, and keep the log-probabilities of the prompt."""
        rest = self._prompt[self._reused :]
        first = len(self._todo) - len(rest)  # behind what the context had left to compute
        at, last = 0, np.empty(0, np.float32)
        logprobs: list[TokenLogprob] = []
        for part in self._engine.score_calls(self.context, self._todo):
            for logits in part:
                if first <= at < len(self._todo) - 1:
                    token = rest[at - first + 1]
                    logprobs.append(token_logprob(logits, token, self._config.logprobs or 0))
                at += 1
            last = part[-1]
            yield None
        self._kept.logprobs = tuple(logprobs)
        yield last

    def _decode_step(self) -> int:
        assert self._next is not None
        if self._given is None:
            self._compute(self._next)
        assert self._given is not None
        logits, self._given = self._given, None
        self._decode_steps += 1
        token = self._choose(logits)
        self._times = (*self._times[:2], self._clock())
        return token

    def _compute(self, token: int) -> None:
        """The logits behind a token."""
        if self._is_full():
            self._shift()
        if self.context.pending:  # windows have lost what it would go on from
            self._engine.prefill(self.context, self.context.pending)
        if self._lookup is None:
            self._given = self._engine.decode(self.context, token)
        else:
            self._given = self._lookup.decode(token)

    def _is_full(self) -> bool:
        return len(self._seen) >= self._engine.max_seq_len

    def _shift(self) -> None:
        """Make room in the context: half of what is behind the first tokens goes."""
        keep = self._config.keep
        drop = max(1, (self.context.cached - keep) // 2)
        self.context.forget(keep, drop)
        del self._seen[keep : keep + drop]
        self._shifted += drop

    def _choose(self, logits: Logits) -> int:
        constraint = self._config.constraint
        allowed = None if constraint is None else constraint.allowed()
        token = self._sampler.choose(logits, self._seen, self._tokens, allowed)
        if constraint is not None and token not in self._end:
            constraint.accept(token)
        if self._config.logprobs is not None:
            self._logprobs.append(token_logprob(logits, token, self._config.logprobs))
        return token

    def _piece(self) -> Piece:
        """Return the piece of the token that was chosen last."""
        token, self._pending_token = self._pending_token, None
        assert token is not None
        text = "" if token in self._end else self._decoder.push(token)
        if self._reason is not None:
            text += self._decoder.finish()
        shown = self._filter.push(text)
        if self._filter.stopped:
            self._reason = "stop"
        elif self._reason is not None:
            shown += self._filter.flush()
        self._texts.append(shown)
        logprob = self._logprobs[-1] if self._logprobs else None
        return Piece(text=shown, token=token, finish_reason=self._reason, logprob=logprob)

    def _end_text(self) -> None:
        """The context holds no guess, and all that was said; the answer's work is known. Takes no
        lock: also who is collected as garbage does this.
        """
        if self._work is not None:
            return
        if self._pending_token is not None:
            self._piece()
        work = self.context.work.since(self._before)
        if self._lookup is not None:
            self._lookup.close()
        if self._next is not None:  # the prompt was read
            self.context.note(self._seen)
        self._work = work  # last: an end that was interrupted is repeated

    def _stats(self) -> Stats:
        start, first, last = self._times
        work = self._work or self.context.work.since(self._before)
        placement: dict[str, DeviceShare | str] = {
            kind: DeviceShare(ops=use.ops, busy_s=use.busy_s) for kind, use in work.devices.items()
        }
        fallback = self._engine.fallback or self._fallback
        if fallback:
            placement["fallback"] = fallback
        ttft = max(first - start, 0.0)
        shared = self._engine.runner.gpu_share is not None and work.wall_s > 0
        return Stats(
            prompt_tokens=len(self._prompt),
            completion_tokens=len(self._tokens),
            ttft_s=ttft,
            prefill_tokens_per_s=(len(self._prompt) - self._reused) / ttft if ttft else 0.0,
            decode_tokens_per_s=self._decode_steps / (last - first) if last > first else 0.0,
            reused_tokens=self._reused,
            placement=placement,
            speculation=self._lookup.statistics if self._lookup is not None else None,
            adaptations=tuple(self._engine.adaptations),
            gpu_share=work.gpu_busy_s / work.wall_s if shared else None,
            npu_idle_share=work.idle_share("npu") if len(work.devices) == 2 else None,
            prompt_form=work.form,
            choice=self._choice,
            shifted_tokens=self._shifted,
        )


class _Once:
    """Calls something the first time that it is called."""

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
    """Compute what the next step of each answer wants, several in one step of the devices. Answers
    that are left out (their prompt is being read, they are one too many, or it failed) compute it
    themselves, and raise what there is to be raised.

    `on_device_busy` is called once, while the devices compute if they do. It runs no step.
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


@dataclass
class _Kept:
    """State that several answers to one prompt share: its last logits, the context's length there,
    the log-probabilities of its tokens.
    """

    logits: Logits | None = None
    length: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
