"""A bound of what a model thinks: after so many tokens its thought is ended, and it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero.generation.sampling import Constraint


@dataclass(frozen=True, kw_only=True)
class ThoughtLimit:
    """The most `tokens` of a thought between `begin` and `end`, as ids.

    `forced` ends it; `begun`: the prompt has begun one.
    """

    tokens: int
    begin: Sequence[int]
    end: Sequence[int]
    forced: Sequence[int]
    begun: bool = False


class ThoughtBudget:
    """The state of one answer under a limit (`hetero.generation.sampling.Constraint`).

    `grammar` is that of the answer, which allows what the limit forces.
    """

    def __init__(
        self, limit: ThoughtLimit, vocabulary: int, grammar: Constraint | None = None
    ) -> None:
        self._limit, self._vocabulary, self._grammar = limit, vocabulary, grammar
        self._tokens: list[int] = []
        self._thinking, self._count = limit.begun, 0
        self._forced: list[int] = []
        self._force()

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Return the token that ends the thought, once it is due, else what the grammar allows."""
        if not self._forced:
            return None if self._grammar is None else self._grammar.allowed()
        mask = np.zeros(self._vocabulary, dtype=np.bool_)
        mask[self._forced[0]] = True
        return mask

    def accept(self, token: int) -> None:
        """Advance by a token."""
        if self._grammar is not None:
            self._grammar.accept(token)
        self._tokens.append(token)
        if self._forced:
            del self._forced[0]
            self._thinking = bool(self._forced)
        elif self._thinking:
            self._count += 1
            self._thinking = not self._ends_with(self._limit.end)
        elif self._ends_with(self._limit.begin):
            self._thinking, self._count = True, 0
        self._force()

    def _force(self) -> None:
        if self._thinking and not self._forced and self._count >= self._limit.tokens:
            self._forced = list(self._limit.forced)

    def _ends_with(self, ids: Sequence[int]) -> bool:
        return self._tokens[-len(ids) :] == list(ids)
