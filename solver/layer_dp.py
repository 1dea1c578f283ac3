"""Dynamic programming over the operators of a step with the device of each operand as state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from hetero.solver.options import GPU, HOST, INF, Objective, Option

Stages = Sequence[Sequence[Option]]
Costs = tuple[float, float]  # entered from `GPU`, from `HOST`
Priced = list[list[tuple[Option, Costs]]]


class LayerPath(NamedTuple):
    """The best path: its cost, and the chosen option of every operator."""

    cost: float
    head: tuple[Option, ...]
    block: tuple[Option, ...]
    tail: tuple[Option, ...]


def solve_layers(
    head: Stages, block: Stages, tail: Stages, layers: int, objective: Objective
) -> LayerPath | None:
    """Minimise head + layers × block + tail, all layers alike. None if no path is possible.

    How an option leaves does not depend on how it was entered. So layers 2 … L enter the block as
    its last option leaves, and for each value of that state the cost is additive over operators.
    """
    starts = _forward(_priced(head, objective), {GPU: (0.0, ())})
    stages, ending = _priced(block, objective), _priced(tail, objective)
    best: LayerPath | None = None
    for wrap in sorted({option.leaves for option in block[-1]}):
        for start, (before, first) in starts.items():
            ends = _block_from(stages, start, wrap, layers)
            if wrap not in ends:
                continue
            inside, middle = ends[wrap]
            for after, last in _forward(ending, {wrap: (0.0, ())}).values():
                total = before + inside + after
                if total < INF and (best is None or total < best.cost):
                    best = LayerPath(total, first, middle, last)
    return best


Paths = dict[int, tuple[float, tuple[Option, ...]]]
NOTHING: Final[tuple[float, tuple[Option, ...]]] = (INF, ())


def _priced(stages: Stages, objective: Objective) -> Priced:
    cost = objective.cost
    return [[(o, (cost(o, GPU), cost(o, HOST))) for o in stage] for stage in stages]


def _block_from(block: Priced, start: int, wrap: int, layers: int) -> Paths:
    """Return the cheapest ways through all layers.

    The first is entered from `start`, the others from `wrap`.
    """
    first: Paths = {}
    for option, costs in block[0]:
        enter = costs[start]
        if layers > 1:
            enter += (layers - 1) * costs[wrap]
        if enter < first.get(option.leaves, NOTHING)[0]:
            first[option.leaves] = (enter, (option,))
    return _forward(block[1:], first, repeat=layers)


def _forward(stages: Priced, paths: Paths, repeat: int = 1) -> Paths:
    for stage in stages:
        following: Paths = {}
        for option, costs in stage:
            for state, (cost, chosen) in paths.items():
                total = cost + repeat * costs[state]
                if total < following.get(option.leaves, NOTHING)[0]:
                    following[option.leaves] = (total, (*chosen, option))
        paths = following
    return paths


class Walk(NamedTuple):
    """A path step by step: seconds, joules-relevant busy times, options with states."""

    seconds: float
    steps: tuple[tuple[Option, int, int], ...]


def walk(path: LayerPath, layers: int) -> Walk:
    """Every (option, state it is entered from, how often), and the seconds of it all."""
    steps: list[tuple[Option, int, int]] = []
    state = GPU
    for option in path.head:
        steps.append((option, state, 1))
        state = option.leaves
    wrap = path.block[-1].leaves
    for i, option in enumerate(path.block):
        if i == 0 and state != wrap:
            steps.append((option, state, 1))
            steps.append((option, wrap, layers - 1))
        else:
            steps.append((option, state, layers))
        state = option.leaves
    for option in path.tail:
        steps.append((option, state, 1))
        state = option.leaves
    return Walk(sum(count * o.seconds(s) for o, s, count in steps), tuple(steps))
