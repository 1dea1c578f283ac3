"""The times of a plan by another profile than its own."""

from __future__ import annotations

import pytest

from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile, MatMulPredictor
from hetero.solver.model_spec import ModelSpec
from hetero.solver.plan import ExecutionPlan, NamedStrategy
from hetero.solver.repredict import repredict
from hetero.solver.strategy_plans import strategy_plan

LENGTHS = (64, 135, 300)


@pytest.fixture(scope="module", params=["host", "snapdragon-8-gen-3"])
def profile(request: pytest.FixtureRequest) -> DeviceProfile:
    return DeviceProfile.load(request.param)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return model_spec("llama-3.2-1b")


def made(spec: ModelSpec, profile: DeviceProfile, strategy: NamedStrategy) -> ExecutionPlan:
    return strategy_plan(spec, profile, strategy, LENGTHS)


@pytest.mark.parametrize("strategy", ["auto", "gpu-only", "npu-only", "layer", "padding"])
def test_a_plan_takes_by_its_own_profile_what_it_says(
    spec: ModelSpec, profile: DeviceProfile, strategy: NamedStrategy
) -> None:
    plan = made(spec, profile, strategy)
    found = repredict(plan, spec, profile)
    assert found == pytest.approx({(t.phase, t.m): t.predicted_s for t in plan.totals}, rel=1e-9)


def test_groups_may_be_apart_at_some_lengths(spec: ModelSpec) -> None:
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
    apart = repredict(plan.model_copy(update={"ops": tuple(ops)}), spec, profile)
    assert {s for s in fused if apart[s] != fused[s]} == {("prefill", 300)}
    assert apart["prefill", 300] == pytest.approx(fused["prefill", 300], rel=0.05)


def slower(profile: DeviceProfile, device: str, factor: float) -> DeviceProfile:
    """All matmuls of a device take so many times as long."""

    def slow(predictor: MatMulPredictor) -> MatMulPredictor:
        if predictor.device != device or predictor.knots is None:
            return predictor
        rows = tuple(tuple(factor * c for c in row) for row in predictor.knots.coefficients)
        knots = predictor.knots.model_copy(update={"coefficients": rows})
        return predictor.model_copy(update={"knots": knots})

    return profile.model_copy(update={"predictors": tuple(map(slow, profile.predictors))})


def test_a_slower_device_makes_its_steps_slower_and_no_others(spec: ModelSpec) -> None:
    profile = DeviceProfile.load("host")
    slow = slower(profile, "npu", 2.0)
    for strategy, low, high in (("gpu-only", 1.0, 1.0), ("npu-only", 1.3, 2.0)):
        plan = made(spec, profile, strategy)  # type: ignore[arg-type]
        before, after = repredict(plan, spec, profile), repredict(plan, spec, slow)
        for step, seconds in before.items():
            assert low - 1e-9 <= after[step] / seconds <= high + 1e-9
    plan = made(spec, profile, "auto")
    best = {(t.phase, t.m): t.predicted_s for t in made(spec, slow, "auto").totals}
    for step, seconds in repredict(plan, spec, slow).items():
        assert seconds >= 0.99 * best[step]  # a plan for the slower device is no worse there
