"""Prefill and decode under one memory budget: which rows live where (docs: solver.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.protocol import KINDS
from hetero.profiler.model_graph import OpName, Stage
from hetero.solver.chooser import Chooser
from hetero.solver.errors import PlanError
from hetero.solver.layer_dp import Costs, PricedOptions, priced
from hetero.solver.non_matmul import NonMatmulTimes
from hetero.solver.options import GPU, HOST, INF, Objective, Option
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario, Solution
from hetero.solver.tilings import Grid
from hetero.solver.weight_memory import (
    Limits,
    ResidentRows,
    copy_bytes,
    expert_bytes,
    resident_bytes,
    without_experts,
)

GRID_ROWS = 12  # places for each of the two row limits on large matmuls
# Of the limit of copies: what a matmul may have at most so that its copies are not counted, and no
# device has some of its rows. Which of many such ones fill the limit takes longest to find out.
SMALL = 1 / 80
EXACT: Final = 1e-7  # gap of the integer program
STATES = (GPU, HOST)
Part: TypeAlias = tuple[Planner, Sequence[Scenario]]
Residents: TypeAlias = dict[OpName, ResidentRows]


def solve_with(
    parts: Sequence[Part], objective: Objective, rows: Sequence[Residents]
) -> list[list[Solution]]:
    """Return the best plan of each scenario when these rows of every matmul live on each device."""
    solved = []
    for (planner, scenarios), resident in zip(parts, rows, strict=True):
        program = _Program(planner, scenarios, (), objective, list(resident), 0)
        solutions = []
        for scenario in scenarios:
            options = {x: program.options(scenario, x, own) for x, own in resident.items()}
            solutions.append(planner.solve(scenario, objective, options=options))
        solved.append(solutions)
    return solved


def choose_rows(
    parts: Sequence[Part],
    objective: Objective,
    limits: Limits,
    weight: Callable[[Scenario], float],
    *,
    places: int = GRID_ROWS,
    gap: float = EXACT,
) -> list[Residents]:
    """Return the rows on each device with which the scenarios are fastest together, by planner.

    The planners' weights are stored separately in one memory. Matmuls that see sampled rows alone
    are the last planner's; `weight` is how much a step counts. Other rows may be better by `gap`,
    a part of the time. Raises `PlanError` if none fit.
    """
    programs = []
    for planner, scenarios in parts:
        left_out = frozenset() if planner is parts[-1][0] else planner.spec.sampled
        wanted: list[OpName] = [x.name for x in planner.spec.matmuls if x.name not in left_out]
        weights = [weight(scenario) for scenario in scenarios]
        small = frozenset(x for x in wanted if is_small(planner, x, limits))
        programs.append(_Program(planner, scenarios, weights, objective, wanted, places, small))
    return _minimise(programs, limits, gap)


def _minimise(programs: Sequence[_Program], limits: Limits, gap: float) -> list[Residents]:
    """Solve the programs as one; the rows of every matmul."""
    builder = _Builder(programs)
    builder.add_all()
    planner = programs[-1].planner
    result = builder.solve(without_experts(planner, limits), gap)
    if result is not None:
        return result
    name = planner.spec.name
    least = sum(program.min_bytes() for program in programs)
    least += sum(expert_bytes(planner, kind) for kind in KINDS)
    if least > limits.both:
        raise PlanError(
            f"no plan of {name} fits {limits.both / 2**30:.2f} GiB of weights: they take "
            f"{least / 2**30:.2f} GiB at least; raise --memory-budget or choose a smaller "
            "format with --weights"
        )
    devices = " and ".join(
        f"the {kind.upper()} {limit / 2**30:.2f} GiB"
        for kind, limit in (("gpu", limits.gpu), ("npu", limits.npu))
        if limit < np.inf
    )
    raise PlanError(
        f"no plan of {name} fits its devices: its weights take {least / 2**30:.2f} GiB, and "
        f"{devices} fit at most; choose fewer --graph-sizes or a smaller format with "
        "--weights"
    )


def is_small(planner: Planner, name: OpName, limits: Limits) -> bool:
    """Return whether a matmul is too small for a limit of copies to be about it."""
    every = ResidentRows(planner.shape(name)[0], 0)
    return limits.copies < INF and copy_bytes(planner, name, every) < SMALL * limits.copies


class _Program:
    """Variables: y[op, residency] (integer) and flows z[scenario, wrap, op, residency, in, out]."""

    def __init__(
        self,
        planner: Planner,
        scenarios: Sequence[Scenario],
        weights: Sequence[float],
        objective: Objective,
        names: Sequence[OpName],
        places: int,
        small: frozenset[OpName] = frozenset(),
    ) -> None:
        self.small = small
        self.planner, self.scenarios, self.weights = planner, scenarios, weights
        self.objective, self.names, self.places = objective, names, places
        self.chooser = Chooser(planner.overheads, planner.settings.rules, objective)
        self._grids: dict[tuple[OpName, int], Grid] = {}
        self._options: dict[tuple[int, OpName, ResidentRows], list[Option]] = {}
        self._priced: dict[tuple[int, OpName, ResidentRows], PricedOptions] = {}

    @cached_property
    def choices(self) -> dict[OpName, list[ResidentRows]]:
        """Return the residencies of each matmul that are tried."""
        return {name: self._residencies(name) for name in self.names}

    def options(self, scenario: Scenario, name: OpName, resident: ResidentRows) -> list[Option]:
        """Return what a matmul may choose from when these rows live on each device."""
        m = self.planner.spec.tokens_of(name, scenario.m)
        key = (m, name, resident)
        if key not in self._options:
            grid = self._grid(name, m)
            mask = mask_of(grid, resident, m, self.planner.shape(name)[0])
            self._options[key] = self.chooser.options(
                self.planner.space(name), m, grid=grid, mask=mask, gpu_alone=resident.gpu == 0
            )
        return self._options[key]

    def priced(self, scenario: Scenario, name: OpName, resident: ResidentRows) -> PricedOptions:
        """Return those of `options` that can be on a best path, with their costs."""
        key = (self.planner.spec.tokens_of(name, scenario.m), name, resident)
        if key not in self._priced:
            self._priced[key] = priced(self.options(scenario, name, resident), self.objective)
        return self._priced[key]

    def min_bytes(self) -> float:
        """Return the bytes of all weights, each row where it takes least."""
        return sum(
            min(
                sum(resident_bytes(self.planner, name, resident)) for resident in self.choices[name]
            )
            for name in self.names
        )

    def _grid(self, name: OpName, m: int) -> Grid:
        if (name, m) not in self._grids:
            self._grids[name, m] = self.planner.space(name).grid(m)
        return self._grids[name, m]

    def _residencies(self, name: OpName) -> list[ResidentRows]:
        """Return all [0, npu) and [gpu, n) that have every row.

        A row limit is one of the row cuts.
        """
        rows = [int(r) for r in self.planner.space(name).rows]
        n = rows[-1]
        if name in self.small:
            return [ResidentRows(0, 0), ResidentRows(n, n), ResidentRows(n, 0)]
        if len(rows) > self.places:
            wanted = {self._best_rows(name, s) for s in self.scenarios}
            spread = [rows[i] for i in np.linspace(0, len(rows) - 1, self.places).astype(int)]
            rows = sorted({*spread, *wanted})
        return [ResidentRows(r, s) for r in (0, *rows) for s in (0, *rows) if s <= r or r == n == s]

    def _best_rows(self, name: OpName, scenario: Scenario) -> int:
        """Return the row cut that this scenario alone would like."""
        m = self.planner.spec.tokens_of(name, scenario.m)
        grid = self._grid(name, m)
        j = int(np.argmin(np.min(grid.elapsed_s, axis=0)))
        return int(grid.rows[j])


def mask_of(grid: Grid, resident: ResidentRows, m: int, n: int) -> npt.NDArray[np.bool_]:
    """Return [T, R] tilings that these rows allow."""
    rows = np.asarray(grid.rows)[None, :]
    whole = grid.cuts[:, None] == m
    gpu_from = np.where(whole, np.where(rows < n, rows, n), 0)
    return np.asarray((rows <= resident.npu) & (gpu_from >= resident.gpu))


class _Builder:
    """Collects columns and rows of programs that share their limits."""

    def __init__(self, programs: Sequence[_Program]) -> None:
        self.programs = programs
        self.program = programs[0]  # whose columns are being added
        self.cost: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.y: dict[tuple[OpName, ResidentRows], int] = {}
        self.each: list[dict[tuple[OpName, ResidentRows], int]] = []

    def add_all(self) -> None:
        """Add for each program y with one residency for each matmul, then each scenario's flow."""
        for program in self.programs:
            self.program, self.y = program, {}
            self.each.append(self.y)
            self._add_program()

    def _add_program(self) -> None:
        for name in self.program.names:
            row = self._row(1, 1)
            for resident in self.program.choices[name]:
                self.y[name, resident] = self._column(0.0)
                self.entries.append((row, self.y[name, resident], 1.0))
        for scenario, weight in zip(self.program.scenarios, self.program.weights, strict=True):
            self._add_scenario(scenario, weight)

    def solve(self, limits: Limits, gap: float) -> list[Residents] | None:
        """Run `milp`; None if infeasible."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # heavy: every command would wait
        from scipy.sparse import coo_matrix

        self._add_limits(limits)
        i, j, v = zip(*self.entries, strict=True)
        matrix = coo_matrix((v, (i, j)), shape=(len(self.low), len(self.cost))).tocsr()
        cost = np.asarray(self.cost)
        whole = np.zeros(len(cost))
        whole[[column for y in self.each for column in y.values()]] = 1
        result = milp(
            cost / max(cost.max(initial=0.0), 1e-30),
            constraints=LinearConstraint(matrix, self.low, self.high),
            integrality=whole,
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": gap},
        )
        if result.x is None:
            return None
        return [
            {name: resident for (name, resident), c in y.items() if result.x[c] > 0.5}
            for y in self.each
        ]

    def _add_limits(self, limits: Limits) -> None:
        """Add a row for each limit, in parts of it; copies of small matmuls do not count."""
        rows = [self._row(-np.inf, min(limit, 1.0)) if limit < np.inf else None for limit in limits]
        for program, y in zip(self.programs, self.each, strict=True):
            for (name, resident), column in y.items():
                gpu, npu = resident_bytes(program.planner, name, resident)
                small = name in program.small
                copied = 0.0 if small else copy_bytes(program.planner, name, resident)
                sizes = (gpu + npu, gpu, npu, copied, 0.0)  # none of these rows is a CPU's
                for row, nbytes, limit in zip(rows, sizes, limits, strict=True):
                    if row is not None:
                        self.entries.append((row, column, nbytes / max(limit, 1.0)))

    def _row(self, low: float, high: float) -> int:
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def _column(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _add_scenario(self, scenario: Scenario, weight: float) -> None:
        """Add one unit of flow through (device, wrap-around state) and the operators."""
        start = self._row(1, 1)
        used: dict[tuple[OpName, ResidentRows], list[int]] = {}
        for non_matmul in self.program.planner.non_matmul_times(scenario).values():
            for wrap in STATES:
                self._add_flow(scenario, weight, non_matmul, wrap, start, used)
        for key, columns in used.items():
            row = self._row(-np.inf, 0.0)
            self.entries += [(row, c, 1.0) for c in columns] + [(row, self.y[key], -1.0)]

    def _add_flow(
        self,
        scenario: Scenario,
        weight: float,
        non_matmul: NonMatmulTimes,
        wrap: int,
        start: int,
        used: dict[tuple[OpName, ResidentRows], list[int]],
    ) -> None:
        program, graph = self.program, self.program.planner.spec
        named = [stage for stage in graph.tail if stage.name in program.names]
        chain: list[_Link] = []
        kinds = [block for block in graph.kinds if block.stages[0].name in program.names]
        for i, block in enumerate(kinds):
            chain += _links(block.stages, non_matmul, block.layers, first=i == 0)
        chain += _links(named, non_matmul, 1, first=False)
        head = non_matmul.head
        entered = {state: self._row(0, 0) for state in STATES}
        begin = self._column(weight * program.objective.cost(head, GPU))
        self.entries += [(start, begin, 1.0), (entered[head.leaves], begin, -1.0)]
        for i, link in enumerate(chain):
            last = bool(named) and i == len(chain) - 1
            leaving = {state: self._row(0, 0) for state in STATES} if not last else None
            if link.joins:
                self._forbid_other(entered, wrap)
            for name, resident, option, costs in self._stage_options(scenario, link.stage):
                for state in STATES:
                    cost = _cost(costs, state, wrap, link)
                    if cost >= INF:
                        continue
                    column = self._column(weight * cost)
                    self.entries.append((entered[state], column, 1.0))
                    if leaving is not None:
                        self.entries.append((leaving[option.leaves], column, -1.0))
                    if name is not None and resident is not None:
                        used.setdefault((name, resident), []).append(column)
            if leaving is not None:
                entered = leaving
        if not named:
            self._drain(entered, wrap)

    def _stage_options(
        self, scenario: Scenario, stage: OpName | Option
    ) -> list[tuple[OpName | None, ResidentRows | None, Option, Costs]]:
        if isinstance(stage, Option):
            cost = self.program.objective.cost
            return [(None, None, stage, (cost(stage, GPU), cost(stage, HOST)))]
        return [
            (stage, resident, option, costs)
            for resident in self.program.choices[stage]
            for option, costs in self.program.priced(scenario, stage, resident)
        ]

    def _forbid_other(self, entered: dict[int, int], wrap: int) -> None:
        """Require the block to end in the wrap-around state: nothing may flow into the other."""
        other = entered[HOST if wrap == GPU else GPU]
        # An empty equality row: inflow - outflow = 0 with no outflow allowed from it.
        entered[HOST if wrap == GPU else GPU] = self._row(0, 0)
        self.low[other] = self.high[other] = 0.0

    def _drain(self, entered: dict[int, int], wrap: int) -> None:
        column = self._column(0.0)
        self.entries.append((entered[wrap], column, 1.0))


class _Link(NamedTuple):
    """A matmul's name, or the option of the operators after one, `times` times in a step.

    `first`: the first of all, which only the first of its layers enters from the head; `joins`:
    what precedes it leaves in the wrap-around state.
    """

    stage: OpName | Option
    times: int
    first: bool
    joins: bool


def _cost(costs: Costs, state: int, wrap: int, link: _Link) -> float:
    """Return the cost of an option in all its layers, entered from a state."""
    if not link.first:
        return link.times * costs[state]
    more = link.times - 1
    return costs[state] + more * costs[wrap] if more else costs[state]


def _links(
    stages: Iterable[Stage], non_matmul: NonMatmulTimes, times: int, *, first: bool
) -> list[_Link]:
    """Return the matmuls of a block (or of the tail) and the operators after them, in order."""
    ordered: list[OpName | Option] = []
    for stage in stages:
        ordered.append(stage.name)
        if stage.name in non_matmul.after:
            ordered.append(non_matmul.after[stage.name])
    return [
        _Link(stage, times, first=first and i == 0, joins=not first and i == 0)
        for i, stage in enumerate(ordered)
    ]
