"""Chooses the row cuts of a plan of several scenarios (docs/explanation/solver.md, "Segments").

A device with static shapes has a kernel for each run of rows between a matmul's cut points, of all
prompt lengths and of decoding, and runs a tile as several of them. So a cut that one length wants
costs the others a call, and few cuts may be faster together than each length's best one.

Notation: M token counts, C wanted cuts, K kept ones, G graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from hetero.profiler.model_graph import OpName
from hetero.solver.chooser import Chooser
from hetero.solver.kernel_times import Floats, Ints
from hetero.solver.options import GPU, INF, Objective, Option
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario
from hetero.solver.tilings import Grid, MatMulSpace

EXACT: Final = 6  # cuts up to which every subset is tried
Subset = tuple[int, ...]


def row_cuts(
    planner: Planner,
    name: OpName,
    scenarios: Sequence[Scenario],
    objective: Objective,
    count: int,
) -> tuple[int, ...]:
    """Return at most `count` row cuts of a matmul that together serve these scenarios best.

    Best is the least mean slowdown of this matmul, decoding counting as much as all prompts.

    They are chosen among the rows that are best for one scenario: all subsets are tried where these
    are few, else cuts are taken away one by one.
    """
    if not planner.kernels.has("npu"):
        return ()
    wanted = _Wanted(planner, name, scenarios, objective)
    everything = tuple(range(len(wanted.rows)))
    if len(everything) > EXACT:
        chosen = _fewer(wanted.slowdown, everything, count)
    else:
        sizes = range(min(count, len(everything)) + 1)
        chosen = min(
            (x for size in sizes for x in combinations(everything, size)), key=wanted.slowdown
        )
    return tuple(wanted.rows[i] for i in chosen)


def _fewer(cost: Callable[[Subset], float], chosen: Subset, count: int) -> Subset:
    """Return the cuts that are left when the least useful is removed repeatedly."""
    best = (cost(chosen), chosen)
    while chosen:
        cheapest = min((cost(fewer), fewer) for fewer in combinations(chosen, len(chosen) - 1))
        chosen = cheapest[1]
        if cheapest[0] < best[0] or len(best[1]) > count:
            best = cheapest
    return best[1]


class _Call(NamedTuple):
    """A call of m tokens, all row cuts costed, and one device alone."""

    share: float
    grid: Grid
    cost: Floats
    alone: float


class _Wanted:
    """Costs of one matmul when some of the wanted cuts, `rows`, exist and others do not.

    A cut's cost is that of its best tiling plus what its graphs take longer in several runs.
    """

    def __init__(
        self,
        planner: Planner,
        name: OpName,
        scenarios: Sequence[Scenario],
        objective: Objective,
    ) -> None:
        space = planner.space(name)
        chooser = Chooser(planner.overheads, planner.settings.rules, objective)
        made = [
            _call(chooser, space, m, share)
            for m, share in _shares(planner, name, scenarios).items()
        ]
        calls = [call for call in made if min(call.alone, float(call.cost.min())) < INF]
        columns = sorted({c for call in calls if (c := _column(call)) < len(space.rows) - 1})
        self.rows: list[int] = space.rows[columns].tolist()
        self._shares = np.asarray([call.share for call in calls])
        self._alone = np.asarray([call.alone for call in calls])
        self._weight = objective.seconds or 1.0
        shape = (len(calls), len(columns))
        self._costs = np.full(shape, INF)
        self._graphs = np.zeros((2, *shape), dtype=np.intp)
        for i, call in enumerate(calls):
            for j, column in enumerate(columns):
                self._costs[i, j], self._graphs[:, i, j] = _best(call, column)
        self._least = np.minimum(self._costs.min(axis=1, initial=INF), self._alone)
        self._tables(space)

    def _tables(self, space: MatMulSpace) -> None:
        """Make the seconds of every graph for every run of rows between two wanted cuts."""
        runs = sorted({b - a for a, b in combinations((0, *self.rows), 2)})
        self._places = {run: i for i, run in enumerate(runs)}
        self._runs = space.graph_table(np.asarray(runs, dtype=np.intp)) if space.sizes else None

    def slowdown(self, chosen: Subset) -> float:
        """Return the weighted slowdown with these of `rows` as cuts, over the best cut's."""
        columns = np.asarray(chosen, dtype=np.intp)
        cost = self._costs[:, columns]
        if self._runs is not None and len(chosen):
            more = self._more([self.rows[i] for i in chosen], self._runs)
            first, second = self._graphs[:, :, columns]
            places = np.arange(len(chosen))[None, :]
            cost = cost + self._weight * (more[first, places] + more[second, places])
        cost = np.minimum(cost.min(axis=1, initial=INF), self._alone)
        return float(self._shares @ (cost / self._least))

    def _more(self, rows: list[int], runs: Floats) -> Floats:
        """Return [G + 1, K] seconds that the rows below each cut take longer in several runs."""
        parts = [self._places[b - a] for a, b in zip((0, *rows), rows, strict=False)]
        whole = runs[:, [self._places[row] for row in rows]]
        more = np.zeros_like(whole)  # also of graphs that take for ever: their cost says so
        np.subtract(runs[:, parts].cumsum(axis=1), whole, out=more, where=np.isfinite(whole))
        return np.asarray(np.maximum(more, 0.0))


def _call(chooser: Chooser, space: MatMulSpace, m: int, share: float) -> _Call:
    grid = space.grid(m)
    gpu_s, npu_s = grid.gpu_only_s, float(grid.npu_s[grid.cuts == m, -1].min(initial=INF))
    alone = (
        Option("gpu-only", "gpu", gpu_s, gpu_s=gpu_s),
        Option("npu-only", "npu", npu_s, npu_s=npu_s),
    )
    cost = min(chooser.objective.cost(option, GPU) for option in alone)
    every = chooser.cost(grid, m) + chooser.objective.idle * grid.times.dry_s
    return _Call(share, grid, every, cost)


def _column(call: _Call) -> int:
    """Return the row cut that a call wants; the last where one device alone is as fast."""
    cost = call.cost.min(axis=0)
    return int(cost.argmin()) if cost.min() < call.alone else len(cost) - 1


def _best(call: _Call, column: int) -> tuple[float, Ints]:
    """Return the cost of a row cut's best tiling, and the places of its two graphs."""
    cut = int(call.cost[:, column].argmin())
    choices = call.grid.choices
    group = choices.group(cut)
    place = group.start + int(call.grid.every_npu_s[group, column].argmin())
    graphs = np.asarray((choices.first[place], choices.second[place]))
    return float(call.cost[cut, column]), graphs


def _shares(planner: Planner, name: OpName, scenarios: Sequence[Scenario]) -> dict[int, float]:
    """Return the weights of the token counts that a matmul sees."""
    prefill = sum(s.phase == "prefill" for s in scenarios)
    shares: dict[int, float] = {}
    for scenario in scenarios:
        m = planner.spec.tokens_of(name, scenario.m)
        share = 1.0 if scenario.phase == "decode" else 1.0 / prefill
        shares[m] = shares.get(m, 0.0) + share
    return shares
