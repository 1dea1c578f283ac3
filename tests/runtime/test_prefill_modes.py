"""Prefill modes of a prompt's calls: cut in order, whole out of order, or both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest

from hetero.backends.protocol import KINDS
from hetero.models import model_spec, open_model
from hetero.placement.planning import planned
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.runtime import prefill_mode as forms_module
from hetero.runtime.engine import Engine
from hetero.runtime.launch_costs import LaunchCosts
from hetero.runtime.launch_graph import LaunchGraph
from hetero.runtime.prefill_mode import SAME, PrefillModes, with_modes
from hetero.runtime.schedule import in_order, seconds_of
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.in_flight import in_flight
from hetero.solver.placement import Placement
from hetero.solver.plan import InFlight, OpPlan, PrefillMode, Tile
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver, prepare_solver
from hetero.solver.request import PlanRequest
from hetero.solver.weight_memory import Limits, ResidentRows
from tests.runtime.models import context_of, emptied
from tests.runtime.plans import random_plan

LENGTHS = (300, 1024)


@pytest.fixture(scope="module", params=["host", "snapdragon-8-gen-3"])
def solved(request: pytest.FixtureRequest) -> tuple[ModelGraph, CostModel, PreparedSolver]:
    profile, spec = DeviceProfile.load(request.param), model_spec("llama-3.2-1b", "w4a8")
    asked = PlanRequest(seq_lens=(256, 1024), step_tokens=512, explain=False, shared=True)
    return spec, CostModel(profile), prepare_solver(spec, profile, asked)


def modes_of(spec: ModelGraph, cost: CostModel, solver: PreparedSolver, order: Any) -> PrefillModes:
    devices = cost.profile.devices
    able = {kind: device.capabilities.on(kind) for kind, device in devices.items()}
    placement = Placement(solver.plan, spec, able, source=solver)
    return PrefillModes(placement, LaunchCosts(cost, placement), order, able, window=4)


def test_never_slower_than_the_better_of_cuts_and_of_whole_matmuls_out_of_order(
    solved: tuple[ModelGraph, CostModel, PreparedSolver],
) -> None:
    """Cut in order is priced here by itself: all layers, launch after launch as the graph lists."""
    spec, cost, solver = solved
    modes = modes_of(spec, cost, solver, "best")
    for tokens in (*LENGTHS, random.randrange(257, 2000)):
        found, rounded = modes.of(tokens), -(-tokens // SAME) * SAME
        assert sum(found.calls) == tokens
        cut_s, start = 0.0, 0
        steps = solver.plan.steps(rounded)
        for m in steps:
            last = int(start + m == rounded)
            graph = LaunchGraph.of(modes._launches("cut", (m,), last, spec.layers))
            price = LaunchCosts(cost, modes._placement).at(start, (m,))
            costs_s = [price(launch) for launch in graph.launches]
            cut_s += seconds_of(graph.launches, in_order(graph), costs_s, modes.submit_s)
            start += m
        assert found.seconds[found.mode] <= min(cut_s, found.seconds["whole"]) * (1 + 1e-9)
        assert found.seconds["cut"] <= cut_s * (1 + 1e-9)


@pytest.mark.full
def test_two_and_three_layers_stand_for_all(
    solved: tuple[ModelGraph, CostModel, PreparedSolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = modes_of(*solved, "best")
    quick = modes.of(1024).seconds
    monkeypatch.setattr(forms_module, "SAMPLED", (15, 16))
    whole = modes_of(*solved, "best").of(1024).seconds
    for mode, seconds in quick.items():
        assert seconds == pytest.approx(whole[mode], rel=0.05)


def test_fifo_has_one_form(solved: tuple[ModelGraph, CostModel, PreparedSolver]) -> None:
    spec, cost, solver = solved
    found = modes_of(spec, cost, solver, "fifo").of(1024)
    assert (found.mode, found.calls, found.seconds) == ("cut", solver.plan.steps(1024), {})
    assert str(found) == "cut in order, in 2 calls of up to 512 tokens"


@pytest.mark.full
def test_a_form_balances_both_devices_over_all_operations() -> None:
    """Σ gpu with attention and Σ npu of the chosen ways: no other choice has a smaller maximum."""
    spec, profile = model_spec("llama-3.2-1b", "w4a8"), DeviceProfile.load("host")
    solver = prepare_solver(spec, profile, PlanRequest(seq_lens=(256, 512), explain=False))
    planner = solver._planner
    found = {x.mode: x.ops for x in in_flight(planner, "gpu", 256, 512, solver.resident, Limits())}
    names = [op.op for op in found["whole"]]
    times = {}
    for name in names:
        space = planner.space(name)
        for rows in (0, space.n):
            gpu_s = space.gpu_table(np.asarray([256]), np.asarray([space.n - rows]))[0, 0]
            column = int(np.searchsorted(space.rows, rows))
            npu_s = space.graph_table(space.rows)[space.sizes.index(256), column] if rows else 0.0
            times[name, bool(rows)] = (gpu_s, npu_s)
    taken = {op.op: op.tiles[0].device == "npu" for op in found["whole"]}
    assert all(len(op.tiles) == 1 for op in found["whole"])
    assert any(len(op.tiles) == 2 for op in found["both"])

    def longest(npu: dict[Any, bool]) -> float:
        sums = np.sum([times[name, npu[name]] for name in names], axis=0)
        return float(max(sums[0] + 1e-3, sums[1]))

    for flipped in names:
        other = {**taken, flipped: not taken[flipped]}
        assert longest(taken) <= longest(other) * 1.15  # attention, contention, calls are not here
    assert max(sum(op.gpu_s or 0 for op in found["both"]), 1e-9) > 0


@pytest.mark.full
def test_rows_that_do_not_fit_are_not_used() -> None:
    spec, profile = model_spec("llama-3.2-1b", "w4a8"), DeviceProfile.load("host")
    planner = Planner(spec, profile).with_rows({x.name: (x.n // 2,) for x in spec.matmuls})
    resident = {x.name: ResidentRows(x.n // 2, x.n // 2) for x in spec.matmuls}
    found = in_flight(planner, "gpu", 256, 512, resident, Limits(both=1.0))
    assert found == ()  # whole matmuls need rows that neither device holds
    assert in_flight(planner, "gpu", 256, 512, resident, Limits())
    assert in_flight(planner, "npu", 256, 512, resident, Limits()) == ()


@pytest.mark.full
def test_a_plan_keeps_the_forms_that_its_prompts_take(
    solved: tuple[ModelGraph, CostModel, PreparedSolver],
) -> None:
    spec, cost, solver = solved
    plan = with_modes(solver.plan, spec, cost, solver, lengths=LENGTHS)
    modes = modes_of(spec, cost, solver, "best")
    taken = {modes.of(m).mode for m in LENGTHS}
    assert {x.mode for x in plan.in_flight} == taken - {"cut"}
    short = with_modes(solver.plan, spec, cost, solver, lengths=(100,))
    assert short.in_flight == ()
    again = ExecutionPlan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert (again.plan_id == short.plan_id) == (not plan.in_flight)


@pytest.mark.full
def test_a_plan_tells_the_forms_of_its_prompts() -> None:
    spec, profile = model_spec("llama-3.2-1b", "w4a8"), DeviceProfile.load("host")
    plan = planned(spec, profile, PlanRequest(seq_lens=(64, 1024), step_tokens=512, explain=False))
    short, long, _ = plan.totals
    assert short.modes == {}
    assert set(long.modes) == set(get_args(PrefillMode))
    assert long.mode == min(long.modes, key=lambda mode: long.modes[mode])
    assert all(x.mode == long.mode for x in plan.in_flight)


# --- on devices ------------------------------------------------------------------------------


def flights(spec: ModelGraph, rng: random.Random) -> tuple[InFlight, ...]:
    """Matmuls on either device, or cut anywhere."""

    def entry(name: Any, n: int, k: int, cut: int) -> OpPlan:
        edges = sorted({0, cut, n})
        tiles = tuple(
            Tile(device="npu" if b <= cut else "gpu", tokens=(0, None), rows=(a, b))
            for a, b in itertools.pairwise(edges)
        )
        strategy: Any = "row-cut" if len(tiles) == 2 else f"{tiles[0].device}-only"
        return OpPlan(phase="prefill", m=None, op=name, n=n, k=k, strategy=strategy, tiles=tiles)

    block = [x for x in spec.matmuls if x.name != "lm_head"]
    whole = [entry(x.name, x.n, x.k, rng.choice([0, x.n])) for x in block]
    both = [entry(x.name, x.n, x.k, 32 * rng.randrange(1, x.n // 32)) for x in block]
    return InFlight(mode="whole", ops=tuple(whole)), InFlight(mode="both", ops=tuple(both))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    pytest.importorskip("pyopencl")
    from hetero.backends.registry import open_device

    loaded = open_model("demo", weights="w4a16")
    rng = random.Random()
    plan = random_plan(loaded.spec(), 512, (256,), rng, strategies=["row-cut"])
    plan = plan.model_copy(update={"in_flight": flights(loaded.spec(), rng)})
    devices: Any = {"gpu": open_device("opencl"), "npu": open_device("ort-cpu")}
    cost = CostModel(DeviceProfile.load("host"))
    with Engine(
        loaded.weights, plan, devices, max_seq_len=1024, order="best", cost=cost
    ) as found:  # fmt: skip
        yield found


@pytest.mark.full
def test_every_form_gives_the_same_answer(engine: Engine) -> None:
    assert set(engine.devices) == set(KINDS)
    assert engine.deployment.window == 4
    prompt = np.random.default_rng().integers(3, 1000, 700).tolist()
    found: dict[str, np.ndarray] = {}
    for mode in get_args(PrefillMode):
        context = emptied(engine)
        engine.deployment.pool["logits"].array[:] = np.nan
        engine._run(context, "prefill", prompt[:600], 0, (256, 256, 88), mode)
        step = engine._run(context, "prefill", prompt[600:], 1, (60, 40), mode)
        found[mode] = engine.deployment.logits.last(context, step).copy()
        devices = {launch.kind for launch in step.launches if launch.rows is not None}
        assert devices == set(KINDS) if mode != "whole" else devices
    scale = np.abs(found["cut"]).max()
    for mode in ("whole", "both"):
        assert np.abs(found[mode] - found["cut"]).max() <= 3e-3 * scale


@pytest.mark.full
def test_a_prompt_runs_in_the_form_that_is_decided(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = np.random.default_rng().integers(3, 1000, 600).tolist()
    for mode in get_args(PrefillMode):
        decided = forms_module.PrefillChoice(
            mode, engine.deployment.prefill_modes.calls(mode, 600), {mode: 1.0}
        )
        monkeypatch.setattr(engine.deployment.prefill_modes, "of", lambda *_, x=decided: x)
        context = emptied(engine)
        engine.prefill(context, prompt)
        calls = forms_module.padded_chunks(decided.calls, engine.max_seq_len)
        assert engine.runner.last_step.chunks == calls
        assert context.work.mode == str(decided)
        node = next(node for node in engine.placement.graph.nodes if node.name.endswith(".down"))
        found = {(x.kind, x.rows) for x in engine.runner.last_step.launches if x.node == node.name}
        parts = engine.placement.parts(node, "prefill", decided.calls[0], mode)
        assert found == {(part.kind, part.rows) for part in parts}
    assert context_of(engine).cached == 600
