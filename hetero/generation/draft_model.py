"""A draft model: a smaller model of the same vocabulary, which guesses what a larger one says."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from hetero.backends.host.closing import Closing
from hetero.errors import ModelError
from hetero.generation.draft_length import RECENT
from hetero.generation.loading import LoadOptions, ModelLoader
from hetero.generation.speculative import Drafter, Guess
from hetero.models import LoadedModel
from hetero.runtime.engine import Engine
from hetero.runtime.kv.context import Context, Hold
from hetero.runtime.sizes import LONGEST_VERIFIED

LEAST_PROBABILITY: Final = 0.5  # of a guess, by the draft model: those behind are not worth it
FIRST_GUESS_S: Final = 1e-6  # until a guess was timed: it costs something, but is worth trying


class TimedDrafter(Drafter):
    """Guesses of a model for one answer, timed.

    `guessed` returns tokens that may follow a text, and how many steps they took beyond its own;
    `ended` is called once, when the answer ends.
    """

    def __init__(
        self,
        guessed: Callable[[Sequence[int], int], tuple[list[int], int]],
        ended: Callable[[], object],
    ) -> None:
        self._guessed, self._ended = guessed, ended
        self._times: deque[float] = deque(maxlen=RECENT)
        self._computed = 0  # tokens of the text at the last guess
        self.guess_s = FIRST_GUESS_S

    def guess(self, text: Sequence[int], most: int) -> Guess:
        """Return the likeliest tokens, up to the first that is not likely."""
        before_s = time.perf_counter()
        tokens, steps = self._guessed(text, most)
        if self._computed and len(text) - self._computed <= LONGEST_VERIFIED:
            self._times.append((time.perf_counter() - before_s) / (steps + 1))
            self.guess_s = statistics.median(self._times)
        self._computed = len(text)
        return Guess(tokens)

    def close(self) -> None:
        """Release what the answer used, for others."""
        self._ended()


def likeliest(
    engine: Engine, context: Context, missing: Sequence[int], most: int, vocabulary: int
) -> tuple[list[int], int]:
    """Append tokens to a context; return the likeliest ones behind them, and the further steps.

    They end before the first that is not likely.
    """
    tokens: list[int] = []
    if len(missing) <= LONGEST_VERIFIED:
        logits = engine.verify(context, missing)[-1]
    else:
        logits = engine.prefill(context, missing)
    while True:
        token = int(np.argmax(logits[:vocabulary]))
        if LEAST_PROBABILITY * float(np.exp(logits - logits[token]).sum()) > 1:
            break
        tokens.append(token)
        if len(tokens) == most:
            break
        logits = engine.decode(context, token)
    return tokens, len(tokens) - (len(tokens) == most)


class DraftModel(Closing):
    """A draft model on devices of its own, for any number of answers at once.

    Each answer has a context of it, and goes on from what the last one left there. Its engine's
    lock orders the guesses of answers in different threads. With `layers` it is the first layers of
    the model itself (`hetero.models.first_layers`). Raises `ModelError` for a model of another
    vocabulary.
    """

    def __init__(
        self, path: str, target: LoadedModel, options: LoadOptions, layers: int = 0
    ) -> None:
        loader = ModelLoader(path, options, shortens=True, layers=layers)
        if not layers:
            check_vocabulary(loader.model, target)
        self._vocabulary = target.config.vocab_size
        self._engine, self._own = loader.load()
        self._model = loader.model

    def drafter(self, _context: Context, text: Sequence[int]) -> Drafter:
        """Return what guesses on from a text, with a context that shares most of its beginning."""
        context, hold = self._own.take(text[:-1], reuse=True)
        return TimedDrafter(partial(self.guess, context), partial(self.end, hold))

    def guess(self, context: Context, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return tokens that may follow a text, and how many steps they took beyond its own."""
        engine = self._engine
        if len(text) + most > engine.max_seq_len:
            return [], 0
        engine.lock.check()
        with engine.lock:
            context.rewind(context.shared(text[:-1]))
            context.rewind(context.cached)  # states may have lost what it would go on from
            return likeliest(engine, context, text[context.cached :], most, self._vocabulary)

    def end(self, hold: Hold) -> None:
        """End the use of a context."""
        if hold.active:
            hold.active = False
            self._own.end()

    def close(self) -> None:
        """Free its devices; idempotent."""
        with self._engine.lock:
            self._engine.close()
        self._model.weights.close()


def check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """Raise `ModelError` unless ids mean the same to both models."""
    ours, theirs = draft.tokenizer.vocabulary(), target.tokenizer.vocabulary()
    if ours == theirs:
        return
    other = next(x for x in sorted(set(ours) | set(theirs)) if ours.get(x) != theirs.get(x))
    raise ModelError(
        f"{draft.name} has another vocabulary than {target.name} (token {other} is "
        f"{ours.get(other)!r} there, {theirs.get(other)!r} here): a draft model needs the same "
        "tokenizer, so take a smaller model of the same family"
    )
