"""From a prompt to text: the generation loop, its results and statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from hetero.errors import UserError
from hetero.models.tokenizer import StreamDecoder, Tokenizer
from hetero.runtime.engine import Engine
from hetero.sampling import Sampler, SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """What one device did: operations run and seconds busy (measured)."""

    ops: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Measured on this machine. Speeds in tokens/s; `ttft_s` is the time to the first token.

    `decode_tokens_per_s` counts decode steps (one token each after the first); 0 without any.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    placement: dict[str, DeviceShare | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the answer as it is generated. `text` may be empty; `token` is the id."""

    text: str
    token: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats


class Clock(Protocol):
    """Seconds from some fixed point."""

    def __call__(self) -> float: ...


class StopFilter:
    """Holds back text that may be the start of a stop string; cuts at the first one found."""

    def __init__(self, stops: Sequence[str]) -> None:
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
    """One answer in the making: iterate over its pieces, then read `result()`.

    Runs on the thread that iterates, which is the engine's control thread meanwhile. `continues`
    says that the text goes on from the prompt (its first piece may begin with a space), not that it
    answers it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        continues: bool = True,
        eos_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        fallback: str = "",
        clock: Clock = time.perf_counter,
    ) -> None:
        if max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {max_tokens}")
        self._engine = engine
        self._sampler = Sampler(params)
        self._decoder: StreamDecoder = tokenizer.decoder(prompt if continues else ())
        self._end = frozenset(eos_ids)
        self._prompt = list(prompt)
        self._max_tokens = max_tokens
        self._filter = StopFilter(stop)
        self._fallback = fallback
        self._clock = clock
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._reason: FinishReason | None = None
        self._decode_steps = 0
        self._times: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __iter__(self) -> Iterator[Piece]:
        start = self._clock()
        self._engine.reset_usage()
        logits = self._engine.prefill(self._prompt)
        token = self._sampler.choose(logits, self._prompt)
        first = last = self._clock()
        while True:
            self._times = (start, first, last)
            piece = self._take(token)
            yield piece
            if piece.finish_reason is not None:
                return
            logits = self._engine.decode(token)
            self._decode_steps += 1
            token = self._sampler.choose(logits, self._prompt + self._tokens)
            last = self._clock()

    def result(self) -> GenerationResult:
        """The answer so far; complete once iteration has ended."""
        return GenerationResult(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=self._reason or "length",
            stats=self._stats(),
        )

    def _take(self, token: int) -> Piece:
        """Account for a chosen token; decide whether it ends the answer."""
        if token in self._end:
            text, self._reason = self._decoder.finish(), "stop"
        else:
            self._tokens.append(token)
            text = self._decoder.push(token)
            if len(self._tokens) >= self._max_tokens:
                self._reason = "length"
            elif self._engine.position >= self._engine.max_seq_len:
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
        if self._fallback:
            placement["fallback"] = self._fallback
        ttft = first - start
        return Stats(
            prompt_tokens=len(self._prompt),
            completion_tokens=len(self._tokens),
            ttft_s=ttft,
            prefill_tokens_per_s=len(self._prompt) / ttft if ttft else 0.0,
            decode_tokens_per_s=self._decode_steps / (last - first) if last > first else 0.0,
            placement=placement,
        )
