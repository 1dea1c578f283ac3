"""Reads a prompt step by step, and what several answers to it share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.generation.sampling import Logits, TokenLogprob, token_logprob
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context


@dataclass
class ReadPrompt:
    """State that several answers to one prompt share.

    Its last logits, the context's length there, the log-probabilities of its tokens.
    """

    logits: Logits | None = None
    length: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptReader:
    """Computes a prompt on a context.

    `tokens` are what the context has left to compute and then the prompt's, of which `rest` are not
    reused. With `logprobs` (how many alternatives) the log-probabilities of the rest are kept in
    `read`. Where `read` has logits already, nothing is computed.
    """

    def __init__(
        self,
        engine: Engine,
        context: Context,
        tokens: Sequence[int],
        rest: Sequence[int],
        *,
        logprobs: int | None,
    ) -> None:
        self._engine, self._context = engine, context
        self._tokens, self._rest, self._logprobs = tokens, rest, logprobs
        self.read = ReadPrompt()
        self._calls: Iterator[Logits | None] | None = None

    def step(self, *, keeps: bool) -> Logits | None:
        """Run the next step; the logits after the prompt, or None while it is read.

        With `keeps` the logits are copied into `read`.
        """
        if self._calls is None:
            self._calls = self._steps()
        logits = next(self._calls)
        if logits is not None:
            self.close()
            if keeps:
                self.read.logits, self.read.length = logits.copy(), self._context.cached
        return logits

    def close(self) -> None:
        """Drop the steps, which refer to this object: a circle."""
        self._calls = None

    def _steps(self) -> Iterator[Logits | None]:
        """Yield once for each step; the last item is the logits after the prompt."""
        if self.read.logits is not None:
            yield self.read.logits
        elif self._logprobs is None:
            yield from self._engine.prefill_calls(self._context, self._tokens)
        else:
            yield from self._score(self._logprobs)

    def _score(self, alternatives: int) -> Iterator[Logits | None]:
        """Prefill as the engine's `prefill_calls`, and keep the log-probabilities of the prompt."""
        first = len(self._tokens) - len(self._rest)  # after what the context had left to compute
        at, last = 0, np.empty(0, np.float32)
        logprobs: list[TokenLogprob] = []
        for part in self._engine.score_calls(self._context, self._tokens):
            for logits in part:
                if first <= at < len(self._tokens) - 1:
                    token = self._rest[at - first + 1]
                    logprobs.append(token_logprob(logits, token, alternatives))
                at += 1
            last = part[-1]
            yield None
        self.read.logprobs = tuple(logprobs)
        yield last
