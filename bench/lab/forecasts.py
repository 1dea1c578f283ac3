"""Which context comes next: orders of eviction by a forecast, and reading its chunks ahead.

recency   what was called last
learned   first-order Markov: how often a context followed the last one, and where there are few
          such calls how often one of its rank by recency did
oracle    knows the trace (Belady): what is used last leaves, what comes next is read
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from hetero.contexts.chunks import Chunk
from lab.managers import MANAGERS
from lab.simulated import Call, SimulatedContext, SimulatedService

# The chance of each context to be the next after a call, or any number that orders them so.
Forecast: TypeAlias = Callable[[int, Sequence[int]], dict[int, float]]
PRIOR = 4.0  # calls that the rank by recency counts as


def recency() -> Forecast:
    """Forecast what was called last."""
    return lambda _, calls: {x: float(i) for i, x in enumerate(calls)}


def learned() -> Forecast:
    """A forecast from the calls so far."""
    follows, ranks = Counter[tuple[int, int]](), Counter[int]()
    from_one: Counter[int] = Counter()
    recent: list[int] = []

    def next_one(_: int, calls: Sequence[int]) -> dict[int, float]:
        one = calls[-1]
        if one in recent:
            ranks[recent.index(one)] += 1
            recent.remove(one)
        if len(calls) > 1:
            follows[calls[-2], one] += 1
            from_one[calls[-2]] += 1
        recent.insert(0, one)
        count = sum(ranks.values()) + len(recent)
        return {
            x: (follows[one, x] + PRIOR * (ranks[rank] + 1) / count) / (from_one[one] + PRIOR)
            for rank, x in enumerate(recent)
        }

    return next_one


def oracle(trace: Sequence[Call]) -> Forecast:
    """A forecast from the trace itself."""

    def next_one(at: int, calls: Sequence[int]) -> dict[int, float]:
        later = [call.context for call in trace[at + 1 :]]
        ends = len(later)
        return {x: -float(later.index(x) if x in later else ends) for x in {*calls}}

    return next_one


class ForecastService(SimulatedService):
    """Evicts the least likely contexts first; with `ahead` reads the likely ones between calls."""

    def __init__(self, *options: Any, forecast: Forecast, ahead: bool) -> None:
        codec, machine, budget = options
        super().__init__(codec, machine, MANAGERS["llms"].without("lctru"), budget)
        self._forecast, self._ahead = forecast, ahead
        self._order: list[int] = []
        self._known: dict[int, SimulatedContext] = {}

    def leave(self, context: SimulatedContext, tokens: Sequence[int], now_s: float) -> None:
        """Leave a context, then order eviction by the forecast."""
        super().leave(context, tokens, now_s)
        number = int(context.app)
        self._known[number] = context
        chances = self._forecast(len(self._order), [*self._order, number])
        if self._ahead:  # what is in the cache need not be in memory until another call
            chances[number] = -float("inf")
        self._order.append(number)
        likely = sorted(self._known, key=lambda x: chances[x])
        for rank, x in enumerate(likely):
            for chunk in self._known[x].chunks:
                chunk.used = rank
        if self._ahead:
            wanted = [chunk for x in reversed(likely) for chunk in self._known[x].chunks]
            self._read_ahead(wanted)

    def _read_ahead(self, wanted: Sequence[Chunk]) -> None:
        """Read chunks, the first ones first, as many as the budget has room for."""
        sizes = [self._codes(chunk).nbytes for chunk in wanted]
        first = [x for x, end in zip(wanted, accumulate(sizes), strict=True)
                 if end <= self.memory.budget.limit]  # fmt: skip
        away = [x for x in first if x.codes is None and x.place is not None]
        with self.memory.pinned(first):
            self.memory.free(sum(self._codes(x).nbytes for x in away))
            for chunk in away:
                codes = self._codes(chunk)
                if not self.memory.claim(codes.nbytes):
                    return
                self.memory.keep(chunk, codes)
