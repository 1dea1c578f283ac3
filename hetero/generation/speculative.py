"""Speculative decoding: one call of the model verifies several guessed tokens.

Guesses are looked up in the text so far, what followed the last occurrence of its last few tokens
(prompt-lookup decoding; Saxena 2023), or come from a smaller model (`draft_model`; Leviathan et al.
2023), for each call from where most tokens a second are expected. The model computes all guessed
positions in one call, which costs little more than one token where weights are streamed. Every
token is still the one that the sampler picks from the model's own logits: guesses only save calls,
they never change the text.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.backends.host.closing import Closing
from hetero.errors import UserError
from hetero.generation.draft_length import DraftLength
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context
from hetero.runtime.sizes import LONGEST_VERIFIED

Logits = npt.NDArray[np.float32]
LONGEST_MATCH: Final = 4  # tokens that are looked up, the longest match first
SHORTEST_MATCH: Final = 2
DRAFTED: Final = 0  # the kind of a model's guesses; those that are looked up have their match's


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


class Guess(NamedTuple):
    """Tokens that may follow a text; those of one `kind` are right about equally often."""

    tokens: Sequence[int] = ()
    kind: int = 0


class Drafter(Closing):
    """Guesses the next tokens of one text, which only grows from call to call.

    `guess_s` are the seconds that each guess takes: 0 where guessing is free.
    """

    guess_s: float = 0.0

    @abstractmethod
    def guess(self, text: Sequence[int], most: int) -> Guess:
        """Return at most `most` tokens that may follow."""


class LookupDrafter(Drafter):
    """Guesses what followed the last occurrence of the text's end; `kind` is its length."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # some tokens -> where they last ended
        self._indexed = 0

    def guess(self, text: Sequence[int], most: int) -> Guess:
        """Return the tokens behind the longest match that is not the end itself."""
        for end in range(self._indexed, len(text)):
            for length in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
                self._ends[tuple(text[end - length : end])] = end
        self._indexed = len(text)
        for length in range(min(LONGEST_MATCH, len(text) - 1), SHORTEST_MATCH - 1, -1):
            if (after := self._ends.get(tuple(text[-length:]))) is not None:
                return Guess(text[after : after + most], length)
        return Guess()

    def close(self) -> None:
        """Release nothing: an index is its answer's own."""


class SpeculativeDecoder:
    """Gives the logits after each token, as `Engine.decode` does, computing several at once.

    `tokens` is the text when `decode` is first called. The steps that verify guesses are lowered at
    once, so that no kernel is compiled while an answer waits. At most `draft_tokens` are guessed,
    fewer or none where that is faster (`DraftLength`): what the text has, or what `drafter` says,
    if there is one. Owned by the generation; `close` leaves the context at the tokens that were
    taken.
    """

    def __init__(
        self,
        engine: Engine,
        context: Context,
        tokens: Sequence[int],
        draft_tokens: int,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 1 <= draft_tokens < LONGEST_VERIFIED:
            raise UserError(
                f"speculative decoding guesses 1 to {LONGEST_VERIFIED - 1} tokens ahead, got "
                f"{draft_tokens}"
            )
        self.statistics = DraftStats()
        self._engine, self._context, self._clock = engine, context, clock
        self._drafter, self._length, self._lookup = drafter, DraftLength(), LookupDrafter()
        self._history = list(tokens)
        self._longest = draft_tokens
        for count in range(1, draft_tokens + 2):
            engine.steps.step(context, "decode", count, count)
        self._start = 0  # context before the last call
        self._guesses: list[Guess] = []  # the last ones, of which the text confirms all so far
        self._confirmed = 0  # tokens of them
        self._draft: Sequence[int] = ()  # the part of it that the last call verified
        self._rows: Logits | None = None
        self._taken = 0  # tokens of the last call that are part of the text

    def decode(self, token: int) -> Logits:
        """Return logits [vocab] after `token`."""
        self._history.append(token)
        self._compare(token)
        if self._rows is not None and list(self._draft[self._taken - 1 : self._taken]) == [token]:
            self.statistics.accepted += 1
            self._taken += 1
            return self._row(self._taken - 1)
        self._forget_wrong()
        left = list(self._context.pending)  # a state went on with wrong guesses
        self._start = self._context.cached + len(left)
        self._draft = self._drafted(len(left))
        if self._draft:
            self._context.cache.keep_state()
        before_s = self._clock()
        if left or self._draft:
            rows = self._engine.verify(self._context, [*left, token, *self._draft])
        else:  # a view of the logits, which are read before the next step
            rows = self._engine.decode(self._context, token)[np.newaxis]
        self._length.took(len(rows), self._clock() - before_s)
        self._rows = rows[len(left) :]
        self._taken = 1
        self.statistics.calls += 1
        self.statistics.drafted += len(self._draft)
        return self._row(0)

    def close(self) -> None:
        """Forget what was computed for guesses that were wrong, and release the drafter."""
        self._forget_wrong()
        if self._drafter is not None:
            self._drafter.close()

    def _forget_wrong(self) -> None:
        if self._rows is not None:
            self._context.rewind(self._start + self._taken)
            self._rows = None

    def _row(self, index: int) -> Logits:
        assert self._rows is not None
        row: Logits = self._rows[index]
        return row

    def _compare(self, token: int) -> None:
        """Learn from the next token whether the last guesses go on being right."""
        at, still = self._confirmed, []
        for guess in (x for x in self._guesses if at < len(x.tokens)):
            right = guess.tokens[at] == token
            self._length.saw(guess.kind, right=right)
            if right:
                still.append(guess)
        self._guesses, self._confirmed = still, at + 1

    def _drafted(self, left: int) -> Sequence[int]:
        """Return the guesses of the next call, in which `left` tokens of the text are computed."""
        room = self._engine.max_seq_len - self._context.cached - left - 1
        most = max(min(self._longest, room, LONGEST_VERIFIED - 1 - left), 0)
        length, drafter = self._length, self._drafter
        copied = self._lookup.guess(self._history, most)
        self._guesses, self._confirmed = [copied], 0
        copies = length.best(copied.kind, len(copied.tokens))
        if drafter is None:
            return copied.tokens[:copies]
        guess_s = drafter.guess_s
        count = length.best_or_probe(DRAFTED, most, guess_s)
        if copies and count and length.knows(DRAFTED):
            drafted = length.speed(DRAFTED, count, guess_s)
            count = 0 if length.speed(copied.kind, copies) >= drafted else count
        if copies and not count:
            return copied.tokens[:copies]
        guess = drafter.guess(self._history, count) if count else Guess()
        self._guesses.append(guess)
        if count and not guess.tokens:  # as dear as one that is wrong
            length.saw(DRAFTED, right=False)
        return guess.tokens
