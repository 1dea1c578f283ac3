"""From a prompt to text: the generation loop, its results and statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from hetero.errors import UserError
from hetero.generation.sampling import Logits, Sampler, SamplingParams, TokenLogprob, token_logprob
from hetero.generation.speculative import Acceptance, LookupDecoder
from hetero.models.tokenizer import StreamDecoder, Tokenizer
from hetero.runtime.engine import Engine

FinishReason: TypeAlias = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """What one device did: operations run and seconds busy (measured)."""

    ops: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measured on this machine. Speeds in tokens/s; `ttft_s` is the time to the first token.

    `reused_tokens` of the prompt were in the context already; `prefill_tokens_per_s` counts the
    others. `decode_tokens_per_s` counts decode steps (one token each after the first); 0 without
    any.
    `speculation` says how many guessed tokens were right, where tokens were guessed.
    `gpu_share` is the part of the time that the GPU was busy, where `max_gpu_share` bounds it.
    `adaptations` are the changes of the cuts since the model was opened, with their reasons.
    `choice` is why `--device auto` chose what it did; empty otherwise.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    reused_tokens: int = 0
    placement: dict[str, DeviceShare | str] = field(default_factory=dict)
    speculation: Acceptance | None = None
    gpu_share: float | None = None
    adaptations: tuple[str, ...] = ()
    choice: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the answer as it is generated. `text` may be empty; `token` is the id."""

    text: str
    token: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished answer.

    `logprobs` has an entry per token of the answer (an end-of-text token included), if asked for;
    `prompt_logprobs` one per token of the prompt but the first, if it was to be echoed too.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the answer's tokens; minus infinity without `logprobs`."""
        if not self.logprobs:
            return -math.inf
        return sum(x.logprob for x in self.logprobs) / len(self.logprobs)


class Clock(Protocol):
    """Seconds from some fixed point."""

    def __call__(self) -> float: ...


class StopFilter:
    """Holds back text that may be the start of a stop string; cuts at the first one found.

    A single string is one stop text, not its letters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = (stops,) if isinstance(stops, str) else stops
        if any(not stop for stop in stops):
            raise UserError("a stop text must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is safe to show now."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class Generation:
    """One answer in the making; iterate over its pieces, then ask for the `result`.

    The engine's context holds the first `reused` tokens of the prompt, and nothing else; the rest
    is prefilled. Used by one thread, which is the engine's control thread meanwhile. `continues`
    says that the text goes on from the prompt (its first piece may begin with a space), not that
    it answers it. With `logprobs` (how many alternatives) every token's log-probability is kept;
    with `echo` the prompt is part of the text, and of the log-probabilities.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        reused: int = 0,
        continues: bool = True,
        eos_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        echo: bool = False,
        fallback: str = "",
        speculative: int = 0,
        choice: str = "",
        clock: Clock = time.perf_counter,
    ) -> None:
        if max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {max_tokens}")
        self._engine = engine
        self._sampler = Sampler(params)
        self._decoder: StreamDecoder = tokenizer.decoder(prompt if continues else ())
        self._end = frozenset(eos_ids)
        self._prompt = list(prompt)
        self._reused = reused
        self._max_tokens = max_tokens
        self._filter = StopFilter(stop)
        self._alternatives = logprobs
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._echo = echo
        self._fallback, self._choice = fallback, choice
        self._clock = clock
        self._tokens: list[int] = []
        self._texts: list[str] = [tokenizer.decode(prompt)] if echo else []
        self._reason: FinishReason | None = None
        self._decode_steps = 0
        self._speculative = speculative
        self._lookup: LookupDecoder | None = None
        self._times: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def context(self) -> list[int]:
        """Tokens that the engine's context holds."""
        return (self._prompt + self._tokens)[: self._engine.position]

    def __iter__(self) -> Iterator[Piece]:
        if self._speculative:
            self._lookup = LookupDecoder(self._engine, self._prompt, self._speculative)
        start = self._clock()
        self._engine.reset_usage()
        logits = self._read_prompt()
        token = self._choose(logits)
        first = last = self._clock()
        decode = self._engine.decode if self._lookup is None else self._lookup.decode
        try:
            while True:
                self._times = (start, first, last)
                piece = self._take(token)
                yield piece
                if piece.finish_reason is not None:
                    return
                logits = decode(token)
                self._decode_steps += 1
                token = self._choose(logits)
                last = self._clock()
        finally:  # also where nobody reads on: the context must hold no guess
            if self._lookup is not None:
                self._lookup.close()

    def result(self) -> GenerationResult:
        """The answer so far; complete once iteration has ended."""
        return GenerationResult(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=self._reason or "length",
            stats=self._stats(),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )

    def _read_prompt(self) -> Logits:
        """Logits after the prompt's last token."""
        rest = self._prompt[self._reused :]
        if not (self._echo and self._alternatives is not None):
            return self._engine.prefill(rest)
        scores = self._engine.score(rest)
        self._prompt_logprobs = tuple(
            token_logprob(logits, token, self._alternatives)
            for logits, token in zip(scores[:-1], rest[1:], strict=True)
        )
        last: Logits = scores[-1]
        return last

    def _choose(self, logits: Logits) -> int:
        token = self._sampler.choose(logits, self._prompt + self._tokens, self._tokens)
        if self._alternatives is not None:
            self._logprobs.append(token_logprob(logits, token, self._alternatives))
        return token

    def _take(self, token: int) -> Piece:
        """Account for a chosen token; decide whether it ends the answer."""
        if token in self._end:
            text, self._reason = self._decoder.finish(), "stop"
        else:
            self._tokens.append(token)
            text = self._decoder.push(token)
            if len(self._tokens) >= self._max_tokens:
                self._reason = "length"
            elif len(self._prompt) + len(self._tokens) >= self._engine.max_seq_len:
                self._reason = "context"
            if self._reason is not None:
                text += self._decoder.finish()
        shown = self._filter.push(text)
        if self._filter.stopped:
            self._reason = "stop"
        elif self._reason is not None:
            shown += self._filter.flush()
        self._texts.append(shown)
        return Piece(text=shown, token=token, finish_reason=self._reason)

    def _stats(self) -> Stats:
        start, first, last = self._times
        usage = self._engine.usage()
        placement: dict[str, DeviceShare | str] = {
            kind: DeviceShare(ops=use.ops, busy_s=use.busy_s) for kind, use in usage.items()
        }
        fallback = self._engine.fallback or self._fallback
        if fallback:
            placement["fallback"] = fallback
        ttft = first - start
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
            gpu_share=share.share if (share := self._engine.gpu_share) is not None else None,
            choice=self._choice,
        )
