"""Which NPU graphs to prepare: a mixed-integer program (docs/solver.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hetero.solver.plan import PlanError
from hetero.solver.planner import Planner, Scenario

DEFAULT_COUNT = 6  # as many as the paper's standard sizes


@dataclass(frozen=True)
class GraphChoice:
    """Chosen sizes, the expected prefill time with them, and what preparing them takes."""

    sizes: tuple[int, ...]
    expected_s: float
    preparation_s: float

    def describe(self) -> str:
        """For notes."""
        return (
            f"{', '.join(map(str, self.sizes))} (expected prefill {self.expected_s * 1e3:.1f} ms, "
            f"preparation {self.preparation_s:.2f} s)"
        )


def choose(
    planner: Planner,
    lengths: Mapping[int, float],
    *,
    candidates: Sequence[int] | None = None,
    count: int = DEFAULT_COUNT,
    preparation_budget_s: float | None = None,
    memory_budget_bytes: float | None = None,
    graph_bytes_per_token: float = 0.0,
) -> GraphChoice:
    """The sizes that minimise expected prefill seconds over prompt lengths with these weights.

    A length is served by at most two graphs and the GPU; its cost with a pair of graphs is solved
    exactly. Raises `PlanError` if the budgets allow nothing.
    """
    sizes = list(candidates or _candidates(planner, lengths))
    sets: list[tuple[int, ...]] = [(g,) for g in sizes] + list(combinations(sizes, 2))
    costs = _costs(planner, lengths, sets)
    prepare = np.asarray([planner.preparation_s(g) for g in sizes])
    weights = np.asarray(list(lengths.values())) / sum(lengths.values())
    rows, limits = _budgets(sizes, prepare, count, preparation_budget_s)
    if memory_budget_bytes is not None:
        rows.append(graph_bytes_per_token * np.asarray(sizes, dtype=float))
        limits.append(memory_budget_bytes)
    chosen, expected = _solve(sizes, sets, costs, weights, rows, limits)
    decode = (1,) if 1 in planner.sizes else ()
    spent = float(sum(p for g, p in zip(sizes, prepare, strict=True) if g in chosen))
    return GraphChoice((*decode, *sorted(chosen)), expected, spent)


def _candidates(planner: Planner, lengths: Mapping[int, float]) -> list[int]:
    """Standard sizes, and each length rounded up and down to the token alignment."""
    npu = planner.profile.devices.get("npu")
    if npu is None:
        raise PlanError(f"profile {planner.profile.name} has no NPU, so there are no graphs")
    step = max(npu.capabilities.token_alignment, npu.token_stage)
    around = {step * (m // step) for m in lengths} | {step * -(-m // step) for m in lengths}
    return sorted({g for g in (*planner.sizes, *around) if g > 1})


def _costs(
    planner: Planner, lengths: Mapping[int, float], sets: list[tuple[int, ...]]
) -> np.ndarray:
    """[lengths, sets] seconds; column after the last: the GPU alone."""
    decode = tuple(g for g in planner.sizes if g == 1)
    found = np.full((len(lengths), len(sets) + 1), np.inf)
    for j, graphs in enumerate(sets):
        with_sizes = planner.with_graph_sizes((*graphs, *decode))
        for i, m in enumerate(lengths):
            if m <= 2 * max(graphs):
                found[i, j] = with_sizes.solve(Scenario("prefill", m)).seconds
    for i, m in enumerate(lengths):
        alone = planner.single(Scenario("prefill", m), "gpu")
        found[i, -1] = alone.seconds if alone is not None else np.inf
    return found


def _budgets(
    sizes: list[int], prepare: np.ndarray, count: int, preparation_budget_s: float | None
) -> tuple[list[np.ndarray], list[float]]:
    rows, limits = [np.ones(len(sizes))], [float(count)]
    if preparation_budget_s is not None:
        rows.append(prepare)
        limits.append(preparation_budget_s)
    return rows, limits


def _solve(
    sizes: list[int],
    sets: list[tuple[int, ...]],
    costs: np.ndarray,
    weights: np.ndarray,
    budget_rows: list[np.ndarray],
    limits: list[float],
) -> tuple[set[int], float]:
    """y_g and x_{l,set}: Σ_set x = 1, x ≤ y_g for every g of the set, budgets on y."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # heavy: every command would wait
    from scipy.sparse import lil_matrix

    at = {g: i for i, g in enumerate(sizes)}
    lengths, columns = costs.shape
    pairs = [(i, j) for i in range(lengths) for j in range(columns) if np.isfinite(costs[i, j])]
    count = len(sizes) + len(pairs)
    links = sum(len(sets[j]) for _, j in pairs if j < len(sets))
    matrix = lil_matrix((lengths + links + len(budget_rows), count))
    low, high = np.full(matrix.shape[0], -np.inf), np.zeros(matrix.shape[0])
    row = lengths
    for p, (i, j) in enumerate(pairs, start=len(sizes)):
        matrix[i, p] = 1
        for g in sets[j] if j < len(sets) else ():
            matrix[row, p], matrix[row, at[g]] = 1, -1
            row += 1
    low[:lengths] = high[:lengths] = 1
    for values, limit in zip(budget_rows, limits, strict=True):
        matrix[row, : len(sizes)] = values
        high[row] = limit
        row += 1
    price = np.concatenate(
        (np.full(len(sizes), 1e-9), [weights[i] * costs[i, j] for i, j in pairs])
    )
    whole = np.concatenate((np.ones(len(sizes)), np.zeros(len(pairs))))
    result = milp(
        price,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=whole,
        bounds=Bounds(0, 1),
    )
    if result.x is None:
        raise PlanError("no set of graph sizes fits the budgets: raise them")
    chosen = {g for g, y in zip(sizes, result.x, strict=False) if y > 0.5}
    return chosen, float(price[len(sizes) :] @ result.x[len(sizes) :])
