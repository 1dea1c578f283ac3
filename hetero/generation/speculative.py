"""Speculative decoding without a second model: drafts looked up in the text so far.

What follows the last occurrence of the last few tokens is a guess at what comes next (prompt-lookup
decoding; Saxena 2023). The model computes all guessed positions in one call, which costs little
more than one token where weights are streamed. Every token is still the one that the sampler picks
from the model's own logits: guesses only save calls, they never change the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hetero.errors import UserError
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.sizes import LONGEST_VERIFIED

Logits = npt.NDArray[np.float32]
LONGEST_MATCH: Final = 4  # tokens that are looked up, the longest match first
SHORTEST_MATCH: Final = 2


@dataclass
class DraftStats:
    """Statistics of drafting: tokens guessed, guesses accepted, calls of the model."""

    drafted: int = 0
    accepted: int = 0
    calls: int = 0

    @property
    def rate(self) -> float:
        """Part of the guesses that were right."""
        return self.accepted / self.drafted if self.drafted else 0.0


class LookupDecoder:
    """Gives the logits after each token, as `Engine.decode` does, computing several at once.

    `tokens` is the text when `decode` is first called. The steps that verify guesses are lowered at
    once, so that no kernel is compiled while an answer waits. Owned by the generation; `close`
    leaves the context at the tokens that were taken.
    """

    def __init__(
        self, engine: Engine, context: Context, tokens: Sequence[int], draft_tokens: int
    ) -> None:
        if not 1 <= draft_tokens < LONGEST_VERIFIED:
            raise UserError(
                f"speculative decoding guesses 1 to {LONGEST_VERIFIED - 1} tokens ahead, got "
                f"{draft_tokens}"
            )
        self.statistics = DraftStats()
        self._engine, self._context = engine, context
        self._history = list(tokens)
        self._longest = draft_tokens
        for count in range(1, draft_tokens + 2):
            engine.steps.step(context, "decode", count, count)
        self._start = 0  # context before the last call
        self._draft: list[int] = []
        self._rows: Logits | None = None
        self._taken = 0  # tokens of the last call that are part of the text

    def decode(self, token: int) -> Logits:
        """Return logits [vocab] after `token`."""
        self._history.append(token)
        guessed = self._draft[self._taken - 1 : self._taken] if self._rows is not None else []
        if guessed == [token]:
            self.statistics.accepted += 1
            self._taken += 1
            return self._row(self._taken - 1)
        self.close()
        left = list(self._context.pending)  # a state went on with wrong guesses
        self._start = self._context.cached + len(left)
        self._draft = self._guess(len(left))
        if self._draft:
            self._context.cache.keep_state()
        rows = self._engine.verify(self._context, [*left, token, *self._draft])
        self._rows = rows[len(left) :]
        self._taken = 1
        self.statistics.calls += 1
        self.statistics.drafted += len(self._draft)
        return self._row(0)

    def close(self) -> None:
        """Forget what was computed for guesses that were wrong."""
        if self._rows is not None:
            self._context.rewind(self._start + self._taken)
            self._rows = None

    def _row(self, index: int) -> Logits:
        assert self._rows is not None
        row: Logits = self._rows[index]
        return row

    def _guess(self, left: int) -> list[int]:
        """Return tokens that followed the last occurrence of the end of the text.

        `left` tokens of the text are computed in the same step.
        """
        room = self._engine.max_seq_len - self._context.cached - left - 1
        longest = min(self._longest, room, LONGEST_VERIFIED - 1 - left)
        history = np.asarray(self._history)
        for length in range(min(LONGEST_MATCH, len(history) - 1), SHORTEST_MATCH - 1, -1):
            if longest < 1:
                break
            windows = np.lib.stride_tricks.sliding_window_view(history[:-1], length)
            matches = np.flatnonzero((windows == history[-length:]).all(axis=1))
            if matches.size:
                after = int(matches[-1]) + length
                return [int(token) for token in history[after : after + longest]]
        return []
