"""Plans of lengths never seen, within prepared row cuts and rows."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.chooser import Chooser
from hetero.solver.errors import PlanError
from hetero.solver.options import Objective
from hetero.solver.plan import check_cover
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.request import PlanRequest
from hetero.solver.residency import mask_of
from hetero.solver.solution import Scenario
from tests.solver.instances import NAMES, TableCost, planner_of, random_instance
from tests.support.selection import examples


def small(seed: int) -> tuple[Planner, PreparedSolver]:
    instance = random_instance(seed, tiny=False)
    planner = planner_of(instance, margin=-99.0)  # every cut may be chosen
    lengths = tuple({1 + (seed * i) % (2 * instance.sizes[-1]) for i in (1, 3, 7)})
    return planner, PreparedSolver(planner, PlanRequest(seq_lens=lengths), cuts=1 + seed % 3)


@pytest.mark.parametrize("seed", range(examples(20, 60)))
def test_every_length_is_solved_as_the_planner_does_with_what_is_prepared(seed: int) -> None:
    """The joint tables against one matmul after another with the planner's own tables."""
    planner, prepared = small(seed)
    plan = prepared.plan
    rows = {name: found.cuts for name, found in plan.residency.items()}
    twin = planner.with_rows(prepared.rows)
    chooser = Chooser(twin.overheads, twin.settings.rules, Objective(power=twin.power))
    for m in range(1, 2 * planner.sizes[-1] + 1, 1 + seed % 3):
        options = {}
        for name in NAMES:
            resident, space = prepared.resident[name], twin.space(name)
            assert set(rows[name]) <= set(space.rows.tolist())
            grid = space.grid(m)
            mask = mask_of(grid, resident, m, space.n)
            options[name] = chooser.options(
                space, m, grid=grid, mask=mask, gpu_alone=resident.gpu == 0
            )
        scenario = Scenario("prefill", m)
        expected = twin.solve(scenario, options=options, non_matmul_device=plan.non_matmul.prefill)
        found = prepared.solution_for(scenario)
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-12)
        assert found.seconds >= planner.solve(scenario).seconds * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(examples(20, 60)))
def test_plans_need_no_row_that_is_not_there(seed: int) -> None:
    planner, prepared = small(seed)
    for m in range(1, 2 * planner.sizes[-1] + 1):
        plan = prepared.plan_for(m)
        for op in plan.ops:
            check_cover(op.tiles, m=m, n=op.n, what=op.op)
            home = plan.residency[op.op]
            for tile in op.tiles:
                low, high = tile.rows
                assert tile.device == "gpu" or high <= home.npu_rows
                assert tile.device == "npu" or low >= home.gpu_from


@pytest.mark.full
@pytest.mark.parametrize("profile", ["snapdragon-8-gen-3", "snapdragon-8-gen-3-strong-npu"])
def test_lengths_never_seen_cost_little_more_than_the_best_of_all_cuts(profile: str) -> None:
    spec, chip = model_spec("llama-3-8b"), DeviceProfile.load(profile)
    planner = Planner(spec, chip)
    lengths = spread_lengths(planner.sizes, 1024)
    prepared = prepare_solver(spec, chip, PlanRequest(seq_lens=lengths))
    scenarios = [Scenario("prefill", m) for m in range(33, 1025, 62)]
    loss = [prepared.solution_for(s).seconds / planner.solve(s).seconds for s in scenarios]
    assert np.mean(loss) < 1.08
    assert all(found.cuts for found in prepared.plan.residency.values())
    assert prepared.plan_for(300) is prepared.plan_for(300)
    assert {op.m for op in prepared.plan_for(300).ops} == {300, None}


@pytest.mark.parametrize(
    ("sizes", "longest", "expected"),
    [
        ((1, 32, 64), 80, (32, 34, 40, 48, 64, 68, 80)),
        ((), 40, (32, 34, 40)),
        ((1, 512), 100, (100,)),
    ],
)
def test_lengths_that_stand_for_all(
    sizes: tuple[int, ...], longest: int, expected: tuple[int, ...]
) -> None:
    assert spread_lengths(sizes, longest) == expected


def test_prompts_beyond_two_graphs_run_in_steps() -> None:
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    prepared = prepare_solver(model_spec("llama-3-8b"), chip, PlanRequest(seq_lens=(256,)))
    assert prepared.plan.steps(5000) == (2048, 2048, 904)
    with pytest.raises(PlanError, match=r"one call takes at most 2048 tokens .* got 5000"):
        prepared.plan_for(5000)


@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_a_memory_budget_holds_for_lengths_never_seen(objective: str) -> None:
    spec, chip = model_spec("llama-3-8b"), DeviceProfile.load("snapdragon-8-gen-3")
    request = PlanRequest(
        seq_lens=(64, 256, 600),
        memory_budget_bytes=4800 << 20,
        objective=objective,  # type: ignore[arg-type]
    )
    prepared = prepare_solver(spec, chip, request)
    assert (prepared.plan.memory_bytes or 0) <= 4800 << 20
    for m in (33, 100, 700):
        for op in prepared.plan_for(m).ops:
            home = prepared.plan.residency[op.op]
            assert all(t.rows[1] <= home.npu_rows for t in op.tiles if t.device == "npu")


def test_a_device_without_graphs_and_one_without_npu() -> None:
    spec, chip = model_spec("llama-3.2-1b"), DeviceProfile.load("snapdragon-8-gen-3")
    alone = chip.model_copy(update={"devices": {"gpu": chip.devices["gpu"]},
        "predictors": tuple(p for p in chip.predictors if p.device == "gpu")})  # fmt: skip
    only = prepare_solver(spec, alone, PlanRequest(seq_lens=(256,)))
    assert {t.device for op in only.plan_for(77).ops for t in op.tiles} == {"gpu"}
    npu = chip.devices["npu"]
    capabilities = npu.capabilities.model_copy(update={"static_shapes": False, "graph_sizes": ()})
    free = chip.model_copy(
        update={
            "devices": {
                **chip.devices,
                "npu": npu.model_copy(update={"capabilities": capabilities}),
            }
        }
    )
    prepared = prepare_solver(spec, free, PlanRequest(seq_lens=(64, 256)))
    assert prepared.plan.step_tokens is None
    for m in (77, 300):
        for op in prepared.plan_for(m).ops:
            check_cover(tuple(t.resolved(m) for t in op.tiles), m=op.m or m, n=op.n, what=op.op)


@pytest.mark.parametrize("seed", range(examples(8, 20)))
def test_drifted_devices_get_the_plan_of_a_profile_that_says_so(seed: int) -> None:
    """Within what is prepared; the GPU may have any row of a matmul that it has rows of."""
    planner, prepared = small(seed)
    slow = prepared.drifted({("npu", "prefill"): 3.0, ("npu", "decode"): 3.0})
    cost = planner.cost
    assert isinstance(cost, TableCost)
    same = prepared.drifted({})
    for m in range(1, 2 * planner.sizes[-1] + 1, 2):
        scenario = Scenario("prefill", m)
        assert same.solution_for(scenario).seconds <= prepared.solution_for(scenario).seconds
        found = slow.solution_for(scenario)
        cost.instance.npu_scale = 3.0
        twin = Planner(
            planner.spec, planner.profile, planner.settings, cost=cost, overheads=planner.overheads,
            rows=prepared.rows,
        )  # fmt: skip
        options = {}
        for name in NAMES:
            resident, space = slow.resident[name], twin.space(name)
            grid = space.grid(m)
            options[name] = Chooser(
                twin.overheads, twin.settings.rules, Objective(power=twin.power)
            ).options(
                space,
                m,
                grid=grid,
                mask=mask_of(grid, resident, m, space.n),
                gpu_alone=resident.gpu == 0,
            )
        expected = twin.solve(
            scenario, options=options, non_matmul_device=prepared.plan.non_matmul.prefill
        )
        cost.instance.npu_scale = 1.0
        assert found.seconds == pytest.approx(expected.seconds, rel=1e-12)
        for op in slow.plan_for(m).ops:
            home = slow.resident[op.op]
            assert all(t.device == "gpu" or t.rows[1] <= home.npu for t in op.tiles)
