"""Dynamic programming over the operators of a step with the device of each operand as state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from hetero.solver.options import GPU, HOST, INF, Objective, Option

Costs = tuple[float, float]  # entered from `GPU`, from `HOST`
PricedOptions = Sequence[tuple[Option, Costs]]
Stages = Sequence[PricedOptions]


class Repeated(NamedTuple):
    """The stages of a layer of one kind (`priced` options), and the number of such layers.

    `sampled`: calls of a prompt that sample nothing leave them out.
    """

    stages: Stages
    layers: int
    sampled: bool = False


class ChosenLayers(NamedTuple):
    """The chosen options of a layer of one kind, and the number of such layers.

    `sampled` as in `Repeated`.
    """

    options: tuple[Option, ...]
    layers: int
    sampled: bool = False


class LayerPath(NamedTuple):
    """The best path: its cost, and the chosen option of every operator."""

    cost: float
    head: tuple[Option, ...]
    blocks: tuple[ChosenLayers, ...]
    tail: tuple[Option, ...]

    @property
    def block(self) -> tuple[Option, ...]:
        """Return the options of a layer of each kind."""
        return tuple(option for kind in self.blocks for option in kind.options)

    def without_sampled(self) -> LayerPath:
        """Return the path of a call that samples nothing."""
        return self._replace(blocks=tuple(x for x in self.blocks if not x.sampled), tail=())


def priced(options: Iterable[Option], objective: Objective) -> PricedOptions:
    """Return an operator's options with their costs, without those that no best path needs.

    For each of those another one leaves in the same state, and costs no more from either state.
    """
    cost, kept = objective.cost, []
    rows = [(option, (cost(option, GPU), cost(option, HOST))) for option in options]
    for state in (GPU, HOST):
        least: float | None = None  # from `HOST`, of those that cost no more from `GPU`
        for row in sorted((x for x in rows if x[0].leaves == state), key=itemgetter(1)):
            if least is None or row[1][HOST] < least:
                least = row[1][HOST]
                kept.append(row)
    return kept


def solve_layers(head: Stages, kinds: Sequence[Repeated], tail: Stages) -> LayerPath | None:
    """Minimise head + Σ layers × block over the kinds of layers + tail, of `priced` options.

    All layers of a kind are alike. None if no path is possible.

    How an option leaves does not depend on how it was entered. All blocks leave in the same state,
    so every layer but the first enters its block in it, whichever kind precedes, and for each value
    of that state the cost is additive over operators. The first layer is of the first kind.
    """
    starts = _forward(head, {GPU: (0.0, ())})
    first, *others = [x.stages for x in kinds]
    best: LayerPath | None = None
    for wrap in sorted({option.leaves for option, _ in first[-1]}):
        more = [
            _block_from(x, wrap, wrap, kind.layers).get(wrap, NOTHING)
            for x, kind in zip(others, kinds[1:], strict=True)
        ]
        for start, (before, opening) in starts.items():
            ends = _block_from(first, start, wrap, kinds[0].layers)
            if wrap not in ends:
                continue
            each = [ends[wrap], *more]
            for after, last in _forward(tail, {wrap: (0.0, ())}).values():
                total = before + sum(inside for inside, _ in each) + after
                if total < INF and (best is None or total < best.cost):
                    blocks = tuple(
                        ChosenLayers(options, kind.layers, kind.sampled)
                        for (_, options), kind in zip(each, kinds, strict=True)
                    )
                    best = LayerPath(total, opening, blocks, last)
    return best


Paths = dict[int, tuple[float, tuple[Option, ...]]]
NOTHING: Final[tuple[float, tuple[Option, ...]]] = (INF, ())


def _block_from(block: Stages, start: int, wrap: int, layers: int) -> Paths:
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


def _forward(stages: Stages, paths: Paths, repeat: int = 1) -> Paths:
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


def walk(path: LayerPath) -> Walk:
    """Every (option, state it is entered from, how often), and the seconds of it all."""
    steps: list[tuple[Option, int, int]] = []
    state = GPU
    for option in path.head:
        steps.append((option, state, 1))
        state = option.leaves
    wrap = path.block[-1].leaves
    for options, layers, _ in path.blocks:
        for i, option in enumerate(options):
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
