"""The times of a plan by another profile than its own."""

from __future__ import annotations

from typing import get_args

import pytest

from bench.lab.repredict import repredict
from hetero.backends.formats import WeightFormat
from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile, MatMulPredictor
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy
from hetero.solver.plan import Phase
from hetero.solver.planner import Planner
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.strategy_plans import strategy_plan

LENGTHS = (64, 135, 300)


@pytest.fixture(scope="module", params=["host", "snapdragon-8-gen-3", "host with restarts"])
def profile(request: pytest.FixtureRequest) -> DeviceProfile:
    name, _, restarts = request.param.partition(" ")
    found = DeviceProfile.load(name)
    if not restarts:
        return found
    npu = found.sync["npu"].model_copy(update={"restart_s": 30e-6})
    return found.model_copy(update={"sync": {**found.sync, "npu": npu}})


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3.2-1b")


def made(spec: ModelGraph, profile: DeviceProfile, strategy: NamedStrategy) -> ExecutionPlan:
    return strategy_plan(spec, profile, strategy, LENGTHS)


@pytest.mark.parametrize("strategy", get_args(NamedStrategy))
def test_a_plan_takes_by_its_own_profile_what_it_says(
    spec: ModelGraph, profile: DeviceProfile, strategy: NamedStrategy
) -> None:
    plan = made(spec, profile, strategy)
    expected = {Scenario(t.phase, t.m): t.predicted_s for t in plan.totals}
    assert repredict(plan, spec, profile) == pytest.approx(expected, rel=1e-9)


def test_tokens_behind_others_take_longer(spec: ModelGraph, profile: DeviceProfile) -> None:
    plan = made(spec, profile, "chunked")
    steps = [Scenario("prefill", 64, context) for context in (0, 256, 2048)]
    found = repredict(plan, spec, profile, steps)
    assert found[steps[0]] < found[steps[1]] < found[steps[2]]


def test_a_device_whose_layers_share_no_graphs_prepares_one_for_each(spec: ModelGraph) -> None:
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    assert all(p.layers_share for p in chip.preparation_predictors)
    alone = tuple(p.model_copy(update={"layers_share": False}) for p in chip.preparation_predictors)
    shared, each = (
        {t.m: t.predicted_s for t in made(spec, profile, "online-prepare").totals}
        for profile in (chip, chip.model_copy(update={"preparation_predictors": alone}))
    )
    assert each[64] == shared[64]  # a graph that is ready
    assert each[135] - shared[135] == pytest.approx((spec.layers - 1) * 0.4084, rel=0.01)


def test_groups_may_be_unfused_at_some_lengths(spec: ModelGraph) -> None:
    profile = DeviceProfile.load("host")
    plan = made(spec, profile, "gpu-only")
    fused = repredict(plan, spec, profile)
    heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    ops = []
    for entry in plan.ops:
        if (entry.op, entry.m) != ("qkv", 300):
            ops.append(entry)
            continue
        for name, count in heads.items():
            n = count * spec.head_dim
            tiles = tuple(t.model_copy(update={"rows": (0, n)}) for t in entry.tiles)
            ops.append(entry.model_copy(update={"op": name, "n": n, "tiles": tiles}))
    unfused = repredict(plan.model_copy(update={"ops": tuple(ops)}), spec, profile)
    step = Scenario("prefill", 300)
    assert {s for s in fused if unfused[s] != fused[s]} == {step}
    assert unfused[step] == pytest.approx(fused[step], rel=0.05)


def slower(profile: DeviceProfile, device: str, factor: float) -> DeviceProfile:
    """All matmuls of a device take so many times as long."""

    def slow(predictor: MatMulPredictor) -> MatMulPredictor:
        if predictor.device != device or predictor.knots is None:
            return predictor
        rows = tuple(tuple(factor * c for c in row) for row in predictor.knots.coefficients)
        knots = predictor.knots.model_copy(update={"coefficients": rows})
        return predictor.model_copy(update={"knots": knots})

    rows = tuple(
        row.model_copy(update={"seconds": factor * row.seconds}) if row.device == device else row
        for row in profile.matmuls
    )
    predictors = tuple(map(slow, profile.predictors))
    return profile.model_copy(update={"predictors": predictors, "matmuls": rows})


@pytest.mark.full
def test_a_slower_device_makes_its_steps_slower_and_no_others(spec: ModelGraph) -> None:
    profile = DeviceProfile.load("host")
    slow = slower(profile, "npu", 2.0)
    for strategy, low, high in (("gpu-only", 1.0, 1.0), ("npu-only", 1.3, 2.0)):
        plan = made(spec, profile, strategy)  # type: ignore[arg-type]
        before, after = repredict(plan, spec, profile), repredict(plan, spec, slow)
        for step, seconds in before.items():
            assert low - 1e-9 <= after[step] / seconds <= high + 1e-9
    plan = made(spec, profile, "auto")
    best = {(t.phase, t.m): t.predicted_s for t in made(spec, slow, "auto").totals}
    for (phase, m, _), seconds in repredict(plan, spec, slow).items():
        assert seconds >= 0.99 * best[phase, m]  # a plan for the slower device is no worse there


def npu_share(plan: ExecutionPlan, phase: str) -> float:
    """The NPU's part of all multiplications of a phase."""
    npu = whole = 0
    for op in plan.ops:
        if op.phase == phase and op.m is not None:
            whole += op.m * op.n * op.k
            npu += sum(
                op.k * (t.tokens[1] - t.tokens[0]) * (t.rows[1] - t.rows[0])  # type: ignore[operator]
                for t in op.tiles
                if t.device == "npu"
            )
    return npu / whole


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen2.5-0.5b"])
def test_a_profile_with_a_faster_npu_gives_it_more_and_a_slower_one_less(model: str) -> None:
    spec, base = model_spec(model, WeightFormat.W4A8), DeviceProfile.load("host")
    plans = [
        make_plan(spec, slower(base, "npu", factor), PlanRequest(seq_lens=(256,), margin=0.0))
        for factor in (0.5, 1.0, 2.0)
    ]
    shares = [npu_share(plan, "prefill") for plan in plans]
    assert shares[0] > shares[1] > shares[2]
    decode = [npu_share(plan, "decode") for plan in plans]
    assert decode[0] >= decode[1] >= decode[2]
    assert decode[0] > decode[2]
    for i in (0, 1):  # prefill, decode
        times = [plan.totals[i].predicted_s or 0.0 for plan in plans]
        assert times[0] < times[1] <= times[2] < 2 * times[1]
    for t in zip(*(plan.totals for plan in plans), strict=True):
        assert len({x.single_devices["gpu"] for x in t}) == 1, "the GPU is as it was"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_simulated_chip_with_another_npu(phase: Phase) -> None:
    planner = Planner(model_spec("llama-3-8b"), DeviceProfile.load("snapdragon-8-gen-3"))
    scenario = Scenario(phase, 256 if phase == "prefill" else 1)
    rows, times = [], []
    for factor in (0.5, 1.0, 2.0):
        factors = dict.fromkeys([("npu", "prefill"), ("npu", "decode")], factor)
        found = planner.drifted(factors).solve(scenario)  # type: ignore[arg-type]
        rows.append(sum(planner.shape(x)[1] * option.rows for x, option in found.options.items()))
        times.append(found.seconds)
    assert rows[0] > rows[1] > rows[2]
    assert times[0] < times[1] < times[2] < 2 * times[1]
