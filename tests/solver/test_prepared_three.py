"""A plan for three devices, solved again at other speeds: against trying all that it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hetero.solver.build import assemble
from hetero.solver.joint_plan import solve_jointly
from hetero.solver.options import GPU, HOST, INF, Objective
from hetero.solver.prepared_three import PreparedThree
from hetero.solver.request import DECODE, PlanRequest, scenarios_of
from hetero.solver.solution import Scenario
from tests.solver.instances import NAMES, Instance, allowed_costs, every_way, planner_of
from tests.solver.test_third_device import instance_of, ways_of_three
from tests.support.selection import examples

FACTORS = st.sampled_from([0.4, 1.0, 1.3, 4.0])


def prepared(instance: Instance) -> PreparedThree:
    """The plan of two lengths, and its solver."""
    lengths = (max(instance.sizes[-1] // 2, 1), instance.sizes[-1])
    request = PlanRequest(seq_lens=lengths, margin=instance.margin, third=True, explain=False)
    free = planner_of(instance, cpu=True, third=True)
    planner, solved = solve_jointly(free, scenarios_of(lengths), free.objective(), request, [])
    return PreparedThree(planner, assemble(planner, solved, request))


def slowed(instance: Instance, factors: dict[str, float]) -> Instance:
    tables = {
        kind: {k: factors[kind] * x for k, x in of_kind.items()}
        for kind, of_kind in instance.tables.items()
    }
    return replace(instance, tables=tables)


@dataclass
class InRuns(Instance):
    """An instance whose NPU computes each run of rows between prepared cuts by its own call.

    Together they take at least as long as one call of all rows (`MatMulSpace.npu_table`).
    """

    cuts: tuple[int, ...] = ()

    def seconds(self, device: str, m: int, n: int, k: int) -> float:
        if device != "npu":
            return super().seconds(device, m, n, k)
        edges = [0, *(row for row in self.cuts if row < n), n]
        runs = sum(super(InRuns, self).seconds("npu", m, b - a, k) for a, b in pairwise(edges))
        return max(runs, super().seconds("npu", m, n, k))


def expected(instance: Instance, solver: PreparedThree, name: Any, m: int, state: int) -> float:
    """The least cost of all cuts whose rows the plan holds."""
    held, n = solver.plan.residency.get(name), instance.rows[name]
    cuts = (*held.cuts, n) if held is not None else ()
    instance = InRuns(**vars(instance), cuts=cuts)
    npu_rows = held.npu_rows if held is not None else 0
    on_gpu = held is None or held.gpu_from < n
    spans = {
        tile.rows
        for op in solver.plan.ops
        for tile in op.tiles
        if op.op == name and tile.device == "cpu"
    }
    ways = [
        way
        for way in every_way(instance, name, m)
        if (way.kind == "gpu" and on_gpu)
        or (way.kind == "npu" and npu_rows == n)
        or (way.kind == "cut" and way.npu_rows in cuts and way.npu_rows <= npu_rows and on_gpu)
    ]
    costs = allowed_costs(ways, instance.margin)[:, state]
    limit = (1 - instance.margin) * min(
        cost + way.back for cost, way in zip(costs, ways, strict=True)
    )
    three = [
        way.cost(state)
        for way in ways_of_three(instance, name, m)
        if (way.npu_rows, way.gpu_from) in spans and way.cost(state) + way.back <= limit
    ]
    return min(float(costs.min()), *three, INF)


@pytest.mark.full
@settings(deadline=None, max_examples=examples(20, 100))
@example(seed=1184, factors={"gpu": 0.4, "npu": 0.4, "cpu": 0.4}, m=1)
@given(
    seed=st.integers(0, 10**6), factors=st.fixed_dictionaries(
        {"gpu": FACTORS, "npu": FACTORS, "cpu": FACTORS}
    ), m=st.integers(1, 9),
)  # fmt: skip
def test_at_other_speeds_each_matmul_is_as_good_as_trying_all_that_is_held(
    seed: int, factors: Any, m: int
) -> None:
    instance = instance_of(seed)
    solver = prepared(instance)
    assume("cpu" in solver.plan.devices())
    m = min(m, instance.sizes[-1])
    both = {(kind, x): f for kind, f in factors.items() for x in ("prefill", "decode")}
    drifted = solver.drifted(both)  # type: ignore[arg-type]
    for name in NAMES:
        found = drifted.options(name, m)
        for state in (GPU, HOST):
            best = min(Objective().cost(option, state) for option in found)
            wanted = expected(slowed(instance, factors), solver, name, m, state)
            assert best == pytest.approx(wanted, rel=1e-9)


def seeds_of_three(count: int) -> list[int]:
    found = []
    for seed in range(200):
        if "cpu" in prepared(instance_of(seed)).plan.devices():
            found.append(seed)
        if len(found) == count:
            break
    return found


def test_as_fast_as_the_plan_at_its_own_speeds_and_without_the_cpu_where_that_is_slow() -> None:
    seeds = seeds_of_three(3)
    assert len(seeds) == 3
    left = 0
    for seed in seeds:
        solver = prepared(instance_of(seed))
        for total in solver.plan.totals:
            step = DECODE if total.phase == "decode" else Scenario("prefill", total.m)
            assert solver.solution_for(step).seconds <= total.predicted_s * (1 + 1e-9)
        slow = solver.drifted({("cpu", "prefill"): 1e3, ("cpu", "decode"): 1e3})
        assert "cpu" not in slow.plan.devices()
        m = max(solver.plan.listed_tokens)
        assert slow.plan_for(m).entry("prefill", m, "down").cpu_s is None
        left += "cpu" in solver.plan_for(m).devices()  # which the slow one does not change
    assert left
