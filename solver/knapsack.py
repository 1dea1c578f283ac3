"""One option for each item: the least total cost whose total loss stays within a budget.

That is the multiple-choice knapsack problem. A Lagrangian gives a lower bound, and a solution that
is at most one step of one item away from it. Dynamic programming over the items improves on it: of
partial choices it keeps those that no other one beats in both cost and loss, and that can still
cost less than the best one known by the bound. The result is optimal unless more than `MAX_STATES`
remain; then only the cheapest of each small range of losses are kept, and `Selection.gap` says how
far from the bound the result is.

Items may also be in groups whose costs depend on a setting that the group shares (`cheapest_set`).
A price of loss gives every combination of settings a lower bound; they are tried from the lowest
on, until the next one's bound is no better than the best selection.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_STATES: Final = 20_000
MAX_TRIES: Final = 64  # combinations of settings that are searched
_STEPS: Final = 50  # of the search for the best price of loss
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


@dataclass(frozen=True)
class Setting:
    """A setting of a group: what it costs itself, and the options of the group's items under it."""

    cost: float
    items: Sequence[Sequence[Alternative]]


@dataclass(frozen=True)
class SetSelection:
    """The index of each group's setting, and the selection of all groups' items, in their order."""

    settings: tuple[int, ...]
    selection: Selection


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


def cheapest_set(groups: Sequence[Sequence[Setting]], budget: float) -> SetSelection:
    """Return the settings and the selection of least cost whose losses are within `budget`.

    The cost is that of the settings and of all items. Raises `ValueError` where no selection is
    within the budget.
    """
    price = _price_of_sets(groups, budget)
    reduced = [[_reduced(x, price) for x in group] for group in groups]
    best: SetSelection | None = None
    least = math.inf
    for tries, (total, chosen) in enumerate(_rising(reduced)):
        bound = total - price * budget
        if best is not None and (bound >= best.selection.cost or tries == MAX_TRIES):
            least = min(least, max(bound, 0.0))
            break
        settings = [group[i] for group, i in zip(groups, chosen, strict=True)]
        items = [item for x in settings for item in x.items]
        if least_loss(items) > budget:
            continue
        own, selected = math.fsum(x.cost for x in settings), cheapest(items, budget)
        selected = replace(selected, cost=selected.cost + own, bound=selected.bound + own)
        least = min(least, selected.bound)
        if best is None or selected.cost < best.selection.cost:
            best = SetSelection(chosen, selected)
    if best is None:
        raise ValueError(f"no setting of the groups has losses within the budget {budget:g}")
    selection = replace(best.selection, bound=min(least, best.selection.cost))
    return replace(best, selection=selection)


def lower_bound(groups: Sequence[Sequence[Setting]], budget: float) -> float:
    """Return a cost that no selection within `budget` is below."""
    price = _price_of_sets(groups, budget)
    return math.fsum(min(_reduced(x, price) for x in g) for g in groups) - price * budget


def _reduced(setting: Setting, price: float) -> float:
    """Return the least cost of a setting where loss has a price."""
    return setting.cost + math.fsum(
        min(x.cost + price * x.loss for x in options) for options in setting.items
    )


def _price_of_sets(groups: Sequence[Sequence[Setting]], budget: float) -> float:
    """Return a price of loss for which the lower bound is high; any price gives a bound."""

    def bound(price: float) -> float:
        return math.fsum(min(_reduced(x, price) for x in g) for g in groups) - price * budget

    if all(len(group) == 1 for group in groups):
        items = [item for group in groups for item in group[0].items]
        return _lagrangian(items, budget)[0]
    prices = [
        _price(options, a, b)
        for group in groups
        for setting in group
        for options in setting.items
        for a, b in pairwise(_hull(options))
    ]
    if not prices:
        return 0.0
    low, high = 0.0, max(prices)  # the bound is concave, and falls behind the highest
    for _ in range(_STEPS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        low, high = (first, high) if bound(first) < bound(second) else (low, second)
    return max((0.0, low, (low + high) / 2), key=bound)


def _rising(costs: Sequence[Sequence[float]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield one index of each list and the sum of what they stand for, the sums rising."""
    orders = [sorted(range(len(x)), key=x.__getitem__) for x in costs]

    def entry(places: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return math.fsum(c[o[i]] for c, o, i in zip(costs, orders, places, strict=True)), places

    heap, seen = [entry((0,) * len(costs))], {(0,) * len(costs)}
    while heap:
        total, places = heapq.heappop(heap)
        yield total, tuple(o[i] for o, i in zip(orders, places, strict=True))
        for at, place in enumerate(places):
            after = (*places[:at], place + 1, *places[at + 1 :])
            if place + 1 < len(costs[at]) and after not in seen:
                seen.add(after)
                heapq.heappush(heap, entry(after))


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
