"""Row cuts of plans for several lengths: every run of rows between two cuts is a call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from hetero.backends.formats import WeightFormat
from hetero.models import model_spec
from hetero.profiler.model_graph import OpName
from hetero.profiler.records import DeviceProfile
from hetero.solver.chooser import Chooser
from hetero.solver.cuts import EXACT, row_cuts
from hetero.solver.joint_plan import solve_jointly
from hetero.solver.options import GPU, Option
from hetero.solver.planner import Planner
from hetero.solver.request import DECODE, PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.tilings import Grid
from tests.solver.instances import NAMES, planner_of, random_instance


def scenarios_of(planner: Planner) -> list[Scenario]:
    longest = 2 * planner.sizes[-1]
    return [*(Scenario("prefill", m) for m in (2, longest - 1, longest)), DECODE]


def cost(planner: Planner, grid: Grid, m: int) -> float:
    """The best cut, or the better device alone."""
    objective = planner.objective()
    chooser = Chooser(planner.overheads, planner.settings.rules, objective)
    whole_s = min([float(grid.npu_s[i, -1]) for i, t in enumerate(grid.cuts) if t == m])
    alone = Option("npu-only", "npu", whole_s), Option("gpu-only", "gpu", grid.gpu_only_s)
    return min(float(chooser.cost(grid, m).min()), *(objective.cost(o, GPU) for o in alone))


@pytest.mark.parametrize("seed", range(30))
def test_a_limited_space_runs_every_run_of_rows_between_its_cuts(seed: int) -> None:
    planner = planner_of(random_instance(seed, tiny=False), margin=0.0)
    rng = np.random.default_rng(seed)
    for name in NAMES:
        free = planner.space(name)
        some = rng.permutation(free.rows[:-1])[: rng.integers(0, 4)].tolist()
        space = planner.with_rows({name: some}).space(name)
        assert space.rows.tolist() == sorted({*some, free.n})
        runs = np.diff(space.rows, prepend=0)
        for j, row in enumerate(space.rows):
            whole = free.graph_table(np.asarray([row]))[:, 0]
            parts = sum(free.graph_table(np.asarray([run]))[:, 0] for run in runs[: j + 1])
            counts = np.zeros(0, np.intp)
            assert space.npu_table(counts)[:, j] == pytest.approx(np.maximum(whole, parts))


def loss(
    planner: Planner,
    name: OpName,
    rows: tuple[int, ...],
    scenarios: Sequence[Scenario] | None = None,
) -> float:
    """Mean slowdown with these cuts, costed exactly, over each length's best cut alone."""
    limited, total = planner.with_rows({name: rows}).space(name), 0.0
    scenarios = scenarios or scenarios_of(planner)
    for scenario in scenarios:
        m = scenario.m
        least = cost(planner, planner.space(name).grid(m), m)
        share = 1.0 if scenario.phase == "decode" else 1 / (len(scenarios) - 1)
        total += share * cost(planner, limited.grid(m), m) / least
    return total


@pytest.mark.full
def test_row_cuts_cost_about_what_the_best_subset_costs() -> None:
    """Exactly costed, over all subsets of the rows that some length wants."""
    found, best, all_of_them = [], [], []
    for seed in range(25):
        planner = planner_of(random_instance(seed, tiny=False), margin=0.0)
        scenarios = scenarios_of(planner)
        for name in NAMES:
            grids = [(planner.space(name).grid(s.m), s.m) for s in scenarios]
            if not np.isfinite([cost(planner, *x) for x in grids]).all():
                continue
            wanted = sorted({best_row(planner, *x) for x in grids} - {planner.space(name).n})
            sizes = range(min(len(wanted), 2) + 1)
            subsets = [x for size in sizes for x in itertools.combinations(wanted, size)]
            chosen = row_cuts(planner, name, scenarios, planner.objective(), 2)
            assert len(chosen) <= 2
            assert set(chosen) <= set(wanted)
            found.append(loss(planner, name, chosen))
            best.append(min(loss(planner, name, x) for x in subsets))
            all_of_them.append(loss(planner, name, tuple(wanted)))
    assert np.mean(found) < 1.08 * np.mean(best)  # times are random: no graph is like another
    assert np.mean(found) <= np.mean(all_of_them)


@pytest.mark.parametrize("weights", [WeightFormat.W4A16, WeightFormat.W4A8])
def test_row_cuts_on_a_measured_profile_are_the_best_subset(weights: WeightFormat) -> None:
    planner = Planner(model_spec("llama-3.2-1b", weights), DeviceProfile.load("host"))
    scenarios = [*(Scenario("prefill", m) for m in (64, 135, 256)), DECODE]
    for name in ("qkv", "o", "gate_up", "down"):
        grids = [(planner.space(name).grid(s.m), s.m) for s in scenarios]
        wanted = sorted({best_row(planner, *x) for x in grids} - {planner.space(name).n})
        sizes = range(len(wanted) + 1)
        subsets = [x for size in sizes for x in itertools.combinations(wanted, size)]
        chosen = row_cuts(planner, name, scenarios, planner.objective(), len(scenarios))
        best = min(loss(planner, name, x, scenarios) for x in subsets)
        assert loss(planner, name, chosen, scenarios) < 1.01 * best


def best_row(planner: Planner, grid: Grid, m: int) -> int:
    """The row cut that is fastest for one length; all rows where one device alone is faster."""
    chooser = Chooser(planner.overheads, planner.settings.rules, planner.objective())
    costs = chooser.cost(grid, m).min(axis=0)
    alone = cost(planner, grid, m) < costs.min()
    return int(grid.rows[-1 if alone else int(costs.argmin())])


@pytest.mark.parametrize("count", [1, 3, EXACT + 3])
def test_never_more_cuts_than_asked_for(count: int) -> None:
    for seed in range(8):
        planner = planner_of(random_instance(seed, tiny=False), margin=0.0)
        lengths = range(2, 2 * planner.sizes[-1], 3)
        scenarios = [*(Scenario("prefill", m) for m in lengths), DECODE]
        for name in NAMES:
            found = row_cuts(planner, name, scenarios, planner.objective(), count)
            assert len(found) <= count
            assert set(found) <= set(planner.space(name).rows[:-1].tolist())


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_of_several_lengths_costs_what_its_own_cuts_cost(seed: int) -> None:
    planner = planner_of(random_instance(seed, tiny=False), margin=-99.0)  # no cut is barred
    objective, scenarios = planner.objective(), scenarios_of(planner)
    request = PlanRequest(tuple(x.m for x in scenarios if x.phase == "prefill"))
    limited, solutions = solve_jointly(planner, scenarios, objective, request, [])
    used: dict[OpName, set[int]] = {name: set() for name in NAMES}
    for solution in solutions:
        for name, option in solution.options.items():
            used[name].add(option.rows)
        assert solution.seconds >= planner.solve(solution.scenario).seconds * (1 - 1e-12)
    for name in NAMES:
        assert set(limited.space(name).rows[:-1].tolist()) == {
            r for r in used[name] if 0 < r < limited.space(name).n
        }
