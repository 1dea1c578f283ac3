"""Chooses the NPU graphs to prepare: a mixed-integer program (docs/explanation/solver.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from hetero.solver.errors import PlanError
from hetero.solver.options import INF
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario
from hetero.solver.weight_memory import graph_bytes, limits_of

DEFAULT_COUNT = 6  # as many as the paper's standard sizes


class Budgets(NamedTuple):
    """Budgets of the chosen sizes together.

    They bound their number without decoding's graph, the seconds that preparing them takes, and the
    bytes that they have for themselves if the NPU computes all rows.

    They bound their number without decoding's graph, the seconds that preparing them takes, and the
    bytes that they have for themselves if the NPU computes all rows.
    """

    graphs: int = DEFAULT_COUNT
    preparation_s: float = INF
    memory_bytes: float = INF


@dataclass(frozen=True)
class GraphChoice:
    """Chosen sizes, the expected prefill time with them, and what preparing them takes.

    `own_bytes` is what they have for themselves at most.
    """

    sizes: tuple[int, ...]
    expected_s: float
    preparation_s: float
    memory_bytes: float

    def describe(self) -> str:
        """Return the choice in words, for notes."""
        said = f"preparation {self.preparation_s:.2f} s" if self.preparation_s else ""
        if self.memory_bytes:
            said += f", at most {self.memory_bytes / 2**30:.2f} GiB of graphs"
        known = ", ".join(filter(None, (f"expected prefill {self.expected_s * 1e3:.1f} ms", said)))
        return f"{', '.join(map(str, self.sizes))} ({known})"


def choose(
    planner: Planner,
    lengths: Mapping[int, float],
    budgets: Budgets,
    *,
    budget_bytes: float | None,
    cost: Callable[[Planner], float],
) -> GraphChoice:
    """Return the best sizes for prompts of these lengths and weights.

    Raises `PlanError` if nothing fits.

    Where each size has weights of its own and memory is limited (`budget_bytes` for weights on
    both devices, or the NPU's own limit), fewer sizes leave the NPU more rows: then every number
    of sizes is tried, and `cost` says what a whole plan with them costs.
    """
    program = SizeProgram(planner, lengths)
    limits = limits_of(planner.profile, budget_bytes)
    if graph_bytes(planner) == 0 or min(limits) == INF:
        return program.best(budgets)
    choices: dict[tuple[int, ...], GraphChoice] = {}
    for count in range(1, budgets.graphs + 1):
        choice = program.best(budgets._replace(graphs=count))
        choices.setdefault(choice.sizes, choice)
    return min(choices.values(), key=lambda choice: cost(program.with_sizes(choice.sizes)))


class SizeProgram:
    """The choice of graph sizes for prompts of `lengths` (by weight); costs are worked out once.

    Each length is served by the GPU and at most two graphs, the same for all its matmuls; what that
    takes is solved exactly for every pair of `candidates` (without: the profile's sizes, and each
    length rounded up and down to what the NPU's token counts are multiples of).
    """

    def __init__(
        self,
        planner: Planner,
        lengths: Mapping[int, float],
        *,
        candidates: Sequence[int] | None = None,
    ) -> None:
        self.planner = planner
        self.sizes = list(candidates or _candidates(planner, lengths))
        self.sets: list[tuple[int, ...]] = [
            *((g,) for g in self.sizes),
            *combinations(self.sizes, 2),
        ]
        self.lengths = list(lengths)
        self.weights = np.asarray(list(lengths.values())) / sum(lengths.values())
        self._decode = tuple(g for g in planner.sizes if g == 1)
        self._costs = self._solved()
        npu = planner.profile.devices["npu"].capabilities
        self._one_graph = npu.per_graph_size == "nothing"
        self._prepare = np.asarray([planner.preparation_s(g) for g in self.sizes])

    def with_sizes(self, sizes: Sequence[int]) -> Planner:
        """Return the planner with these graphs and decoding's."""
        return self.planner.with_graph_sizes({*sizes, *self._decode})

    def best(self, budgets: Budgets) -> GraphChoice:
        """Return the sizes that minimise expected prefill seconds within the budgets."""
        rows = [(np.ones(len(self.sizes)), float(budgets.graphs))]
        allowed = np.ones(len(self.sizes))
        if self._one_graph:  # it is prepared once, whatever its sizes
            allowed = (self._prepare <= budgets.preparation_s).astype(float)
        elif budgets.preparation_s < INF:
            rows.append((self._prepare, budgets.preparation_s))
        own_bytes = graph_bytes(self.planner)
        if budgets.memory_bytes < INF:
            rows.append((np.full(len(self.sizes), own_bytes), budgets.memory_bytes))
        chosen = self._minimise(rows, allowed)
        spent = [p for g, p in zip(self.sizes, self._prepare, strict=True) if g in chosen]
        return GraphChoice(
            (*self._decode, *sorted(chosen)),
            self._expected_s(chosen),
            float((max if self._one_graph else sum)(spent or [0.0])),
            own_bytes * len(chosen),
        )

    def _expected_s(self, chosen: set[int]) -> float:
        """Return the expected seconds where each matmul may use all of the chosen sizes.

        The program's time or less (but for the rule that a cut must beat the best single device,
        which more graphs can make faster).
        """
        planner = self.with_sizes(sorted(chosen))
        solved = [planner.solve(Scenario("prefill", m)).seconds for m in self.lengths]
        return float(self.weights @ np.asarray(solved))

    def _solved(self) -> np.ndarray:
        """Return [lengths, sets] seconds; column after the last: the GPU alone."""
        seconds = np.full((len(self.lengths), len(self.sets) + 1), INF)
        for j, graphs in enumerate(self.sets):
            with_sizes = self.with_sizes(graphs)
            for i, m in enumerate(self.lengths):
                if m <= 2 * max(graphs):
                    seconds[i, j] = with_sizes.solve(Scenario("prefill", m)).seconds
        for i, m in enumerate(self.lengths):
            alone = self.planner.single(Scenario("prefill", m), "gpu")
            seconds[i, -1] = alone.seconds if alone is not None else INF
        return seconds

    def _minimise(
        self, budget_rows: Sequence[tuple[np.ndarray, float]], allowed: np.ndarray
    ) -> set[int]:
        """Solve the integer program y_g and x_{l,set}.

        Σ_set x = 1, x ≤ y_g for every g of the set, budgets on y, and two of the largest graph hold
        the longest prompt (beyond them it would run in several calls).
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # heavy: every command would wait
        from scipy.sparse import lil_matrix

        sets = [*self.sets, ()]  # the last: the GPU alone
        at = {g: i for i, g in enumerate(self.sizes)}
        pairs = [(i, j) for i, j in np.argwhere(np.isfinite(self._costs))]
        links = sum(len(sets[j]) for _, j in pairs)
        lengths = len(self.lengths)
        columns = len(self.sizes) + len(pairs)
        holding = np.asarray([2 * g >= max(self.lengths) for g in self.sizes], dtype=float)
        budget_rows = [*budget_rows, (-holding, -1.0)]
        matrix = lil_matrix((lengths + links + len(budget_rows), columns))
        low, high = np.full(matrix.shape[0], -np.inf), np.zeros(matrix.shape[0])
        low[:lengths] = high[:lengths] = 1
        row = lengths
        for p, (i, j) in enumerate(pairs, start=len(self.sizes)):
            matrix[i, p] = 1
            for g in sets[j]:
                matrix[row, p], matrix[row, at[g]] = 1, -1
                row += 1
        for values, limit in budget_rows:
            scale = max(abs(limit), float(abs(values).max()), 1e-30)  # seconds and bytes near 1
            matrix[row, : len(self.sizes)], high[row] = values / scale, limit / scale
            row += 1
        cost = np.asarray([self.weights[i] * self._costs[i, j] for i, j in pairs])
        result = milp(
            np.concatenate((np.zeros(len(self.sizes)), cost / cost.max(initial=1e-30))),
            constraints=LinearConstraint(matrix.tocsr(), low, high),
            integrality=np.concatenate((np.ones(len(self.sizes)), np.zeros(len(pairs)))),
            bounds=Bounds(0, np.concatenate((allowed, np.ones(len(pairs))))),
            options={"mip_rel_gap": 1e-7},
        )
        if result.x is None:
            raise PlanError(
                f"no set of graphs for prompts of up to {max(self.lengths)} tokens fits the "
                "budgets: raise them"
            )
        chosen = [g for g, y in zip(self.sizes, result.x, strict=False) if y > 0.5]
        served = result.x[len(self.sizes) :]
        used = {g for (_, j), x in zip(pairs, served, strict=True) if x > 1e-6 for g in sets[j]}
        if 2 * max(used, default=0) < max(self.lengths):
            used.add(min(g for g in chosen if 2 * g >= max(self.lengths)))
        return used


def _candidates(planner: Planner, lengths: Mapping[int, float]) -> list[int]:
    """Return standard sizes, and each length rounded up and down to the token alignment."""
    npu = planner.profile.devices.get("npu")
    if npu is None:
        raise PlanError(f"profile {planner.profile.name} has no NPU, so there are no graphs")
    if not npu.capabilities.static_shapes:
        raise PlanError(
            f"the NPU of profile {planner.profile.name} takes any token count, so there are no "
            "graphs to choose: leave --graph-sizes out"
        )
    step = max(npu.capabilities.token_alignment, npu.token_stage)
    around = {step * (m // step) for m in lengths} | {step * -(-m // step) for m in lengths}
    return sorted({g for g in (*planner.sizes, *around) if g > 1})
