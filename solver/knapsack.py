"""One option for each item: the least total cost whose total loss stays within a budget.

That is the multiple-choice knapsack problem. A Lagrangian gives a lower bound, and a solution that
is at most one step of one item away from it. Dynamic programming over the items improves on it: of
partial choices it keeps those that no other one beats in both cost and loss, and that can still
cost less than the best one known by the bound. The result is optimal unless more than `MAX_STATES`
remain; then only the cheapest of each small range of losses are kept, and `Selection.gap` says how
far from the bound the result is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_STATES: Final = 20_000
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Alternative:
    """A way to take an item."""

    cost: float
    loss: float


@dataclass(frozen=True)
class Selection:
    """The index of each item's option; `bound` is a cost that no selection is below."""

    chosen: tuple[int, ...]
    cost: float
    loss: float
    bound: float

    @property
    def gap(self) -> float:
        """Return by which part the cost is at most above the least one."""
        return max(self.cost - self.bound, 0.0) / max(self.cost, 1e-300)


def least_loss(items: Sequence[Sequence[Alternative]]) -> float:
    """Return the smallest total loss."""
    return math.fsum(min(x.loss for x in options) for options in items)


def cheapest(items: Sequence[Sequence[Alternative]], budget: float) -> Selection:
    """Return the selection of least cost whose losses sum up to at most `budget`.

    Raises `ValueError` where none does.
    """
    if least_loss(items) > budget:
        raise ValueError(f"the least loss is {least_loss(items):g}, above the budget {budget:g}")
    if not items:
        return Selection((), 0.0, 0.0, 0.0)
    price, greedy = _lagrangian(items, budget)
    reduced = [min(x.cost + price * x.loss for x in options) for options in items]
    bound = math.fsum(reduced) - price * budget
    exact, chosen = _dynamic(items, budget, price, reduced, greedy)
    cost = _cost(items, chosen)
    loss = math.fsum(x[i].loss for x, i in zip(items, chosen, strict=True))
    return Selection(tuple(chosen), cost, loss, cost if exact else min(bound, cost))


def _cost(items: Sequence[Sequence[Alternative]], chosen: Sequence[int]) -> float:
    return math.fsum(x[i].cost for x, i in zip(items, chosen, strict=True))


def _efficient(options: Sequence[Alternative]) -> list[int]:
    """Return the options that no other one beats, from the cheapest to that of least loss."""
    order = sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].loss))
    kept: list[int] = []
    for i in order:
        if not kept or options[i].loss < options[kept[-1]].loss:
            kept.append(i)
    return kept


def _hull(options: Sequence[Alternative]) -> list[int]:
    """Return those of the efficient options that are the best ones for some price of loss."""
    hull: list[int] = []
    for i in _efficient(options):
        while len(hull) > 1 and _price(options, hull[-2], hull[-1]) >= _price(options, hull[-2], i):
            hull.pop()
        hull.append(i)
    return hull


def _price(options: Sequence[Alternative], a: int, b: int) -> float:
    """Return the cost of each unit of loss that is saved by b instead of a."""
    return (options[b].cost - options[a].cost) / (options[a].loss - options[b].loss)


def _lagrangian(items: Sequence[Sequence[Alternative]], budget: float) -> tuple[float, list[int]]:
    """Return the price of loss at which the bound is highest, and a selection within the budget.

    Items start at their cheapest options, and take the steps that save loss most cheaply.
    """
    hulls = [_hull(options) for options in items]
    steps = sorted(
        (_price(options, a, b), item, b)
        for item, (options, hull) in enumerate(zip(items, hulls, strict=True))
        for a, b in pairwise(hull)
    )
    chosen, price = [hull[0] for hull in hulls], 0.0
    for at, item, option in steps:
        if math.fsum(x[i].loss for x, i in zip(items, chosen, strict=True)) <= budget:
            break
        price, chosen[item] = at, option
    return price, chosen


def _dynamic(
    items: Sequence[Sequence[Alternative]],
    budget: float,
    price: float,
    reduced: Sequence[float],
    greedy: Sequence[int],
) -> tuple[bool, list[int]]:
    """Return whether the search was complete, and the best selection, `greedy` if none is better.

    A state is the cost and loss of a choice for the items so far.
    """
    best, exact = _cost(items, greedy), True
    after = np.concatenate([np.cumsum(np.asarray(reduced)[::-1])[::-1][1:], [0.0]])
    least = np.asarray([min(x.loss for x in options) for options in items])
    left = np.concatenate([np.cumsum(least[::-1])[::-1][1:], [0.0]])
    costs, losses = np.zeros(1), np.zeros(1)
    trail: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
    for item, options in enumerate(items):
        kept = _efficient(options)
        cost = (costs[:, None] + [options[i].cost for i in kept]).ravel()
        loss = (losses[:, None] + [options[i].loss for i in kept]).ravel()
        lowest = cost + price * loss + after[item] - price * budget
        hopeful = np.flatnonzero((loss + left[item] <= budget) & (lowest < best))
        order = hopeful[np.lexsort((loss[hopeful], cost[hopeful]))]
        before = np.concatenate([[np.inf], np.minimum.accumulate(loss[order])[:-1]])
        order = order[loss[order] < before] if len(order) else order
        if len(order) > MAX_STATES:
            exact, order = False, _thinned(order, loss)
        trail.append((order // len(kept), np.asarray(kept)[order % len(kept)]))
        costs, losses = cost[order], loss[order]
    if not len(costs):
        return exact, list(greedy)
    state, chosen = 0, [0] * len(items)  # the cheapest one comes first
    for item in range(len(items) - 1, -1, -1):
        parents, taken = trail[item]
        chosen[item], state = int(taken[state]), int(parents[state])
    within = math.fsum(x[i].loss for x, i in zip(items, chosen, strict=True)) <= budget
    return exact, chosen if within else list(greedy)  # sums are rounded in another order


def _thinned(order: npt.NDArray[np.intp], loss: Float64Array) -> npt.NDArray[np.intp]:
    """Return the cheapest state of each of `MAX_STATES` ranges of losses; costs rise in `order`."""
    values = loss[order]
    ranges = (values - values[-1]) / max(values[0] - values[-1], 1e-300) * (MAX_STATES - 1)
    _, first = np.unique(ranges.astype(np.int64), return_index=True)
    return order[np.sort(first)]
