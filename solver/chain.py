"""Dynamic programming over the operators of a step with the device of each operand as state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero.solver.options import GPU, HOST, INF, Objective, Option

Stages = Sequence[Sequence[Option]]


class Chain(NamedTuple):
    """The best chain: its cost, and the chosen option of every operator."""

    cost: float
    head: tuple[Option, ...]
    block: tuple[Option, ...]
    tail: tuple[Option, ...]


def solve_chain(
    head: Stages, block: Stages, tail: Stages, layers: int, objective: Objective
) -> Chain | None:
    """Minimise head + layers × block + tail, all layers alike. None if no chain is possible.

    How an option leaves does not depend on how it was entered. So layers 2 … L enter the block as
    its last option leaves, and for each value of that state the cost is additive over operators.
    """
    starts = _forward(head, {GPU: (0.0, ())}, objective)
    best: Chain | None = None
    for wrap in (GPU, HOST):
        for start, (before, first) in starts.items():
            ends = _block_from(block, start, wrap, layers, objective)
            if wrap not in ends:
                continue
            inside, middle = ends[wrap]
            for after, last in _forward(tail, {wrap: (0.0, ())}, objective).values():
                total = before + inside + after
                if total < INF and (best is None or total < best.cost):
                    best = Chain(total, first, middle, last)
    return best


Paths = dict[int, tuple[float, tuple[Option, ...]]]


def _block_from(block: Stages, start: int, wrap: int, layers: int, objective: Objective) -> Paths:
    """Cheapest ways through all layers when the first is entered from `start`, the others from
    `wrap`.
    """
    first: Paths = {}
    for option in block[0]:
        enter = objective.cost(option, start)
        if layers > 1:
            enter += (layers - 1) * objective.cost(option, wrap)
        _keep(first, option.leaves, enter, (option,))
    return _forward(block[1:], first, objective, repeat=layers)


def _forward(stages: Stages, paths: Paths, objective: Objective, repeat: int = 1) -> Paths:
    for stage in stages:
        following: Paths = {}
        for option in stage:
            for state, (cost, chosen) in paths.items():
                total = cost + repeat * objective.cost(option, state)
                _keep(following, option.leaves, total, (*chosen, option))
        paths = following
    return paths


def _keep(paths: Paths, state: int, cost: float, chosen: tuple[Option, ...]) -> None:
    if cost < INF and (state not in paths or cost < paths[state][0]):
        paths[state] = (cost, chosen)


class Walk(NamedTuple):
    """A chain walked step by step: seconds, joules-relevant busy times, options with states."""

    seconds: float
    steps: tuple[tuple[Option, int, int], ...]


def walk(chain: Chain, layers: int) -> Walk:
    """Every (option, state it is entered from, how often), and the seconds of it all."""
    steps: list[tuple[Option, int, int]] = []
    state = GPU
    for option in chain.head:
        steps.append((option, state, 1))
        state = option.leaves
    wrap = chain.block[-1].leaves
    for i, option in enumerate(chain.block):
        if i == 0 and state != wrap:
            steps.append((option, state, 1))
            steps.append((option, wrap, layers - 1))
        else:
            steps.append((option, state, layers))
        state = option.leaves
    for option in chain.tail:
        steps.append((option, state, 1))
        state = option.leaves
    return Walk(sum(count * o.seconds(s) for o, s, count in steps), tuple(steps))
