"""Attention whose heads both devices share: what is chosen, what a plan may say of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.lab.repredict import repredict
from hetero.backends.ops import Attention, Rope
from hetero.backends.protocol import Capabilities
from hetero.models import model_spec
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.chooser import Rules
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.overheads import Overheads
from hetero.solver.placement import Placement
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.strategy_plans import strategy_plan

MODEL = "llama-3.2-1b"
SIZES = (32, 128, 512)
ABLE = {
    "gpu": Capabilities(kind="gpu", attention_heads=True),
    "npu": Capabilities(kind="npu", static_shapes=True, graph_sizes=SIZES, attention_heads=True),
}


def profile(name: str = "host") -> DeviceProfile:
    return DeviceProfile.load(name)


def without_heads(found: DeviceProfile, kind: str) -> DeviceProfile:
    """The profile where one device computes all heads or none."""
    record = found.devices[kind]  # type: ignore[index]
    able = record.capabilities.model_copy(update={"attention_heads": False})
    devices = {**found.devices, kind: record.model_copy(update={"capabilities": able})}
    return found.model_copy(update={"devices": devices})


def planner(found: DeviceProfile, **rules: Any) -> Planner:
    """By the paper's costs, which are sums and maxima."""
    cost = CostModel(found)
    settings = PlannerSettings(rules=Rules(**rules))
    return Planner(model_spec(MODEL), found, settings, cost=cost, overheads=Overheads.of(cost))


@pytest.mark.full
@pytest.mark.parametrize("speed", [0.1, 0.6, 1.0, 3.0])
def test_the_number_of_heads_is_the_best_one(speed: float) -> None:
    """Of an NPU that takes other times for attention than the profile says: as good as the best of
    all numbers, none included, each solved by itself.
    """
    found = profile()
    predictors = tuple(
        p.model_copy(update={"coefficients": {k: v * speed for k, v in p.coefficients.items()}})
        if (p.device, p.op) == ("npu", "Attention")
        else p
        for p in found.other_predictors
    )
    found = found.model_copy(update={"other_predictors": predictors})
    free = planner(found, margin=0.0)
    for m, context in ((64, 0), (300, 0), (512, 512)):
        scenario = Scenario("prefill", m, context)
        every = [
            planner(found, margin=0.0).with_heads(heads).solve(scenario)
            for heads in [(), *((k,) for k in range(1, 8))]
        ]
        assert free.solve(scenario).seconds == pytest.approx(min(s.seconds for s in every))


def test_a_planner_with_other_heads_keeps_no_derived_planner_of_the_old_ones() -> None:
    first = planner(profile())
    assert (first.whole_rows.heads, first.whole.heads) == (None, None)
    for heads in ((3,), ()):
        other = first.with_heads(heads)
        assert (other.heads, other.whole_rows.heads, other.whole.heads) == (heads, heads, heads)
        limited = other.with_rows({}).with_heads((5,))
        assert (limited.whole_rows.heads, limited.whole.heads) == ((5,), (5,))
    assert first.whole_rows.heads is None


def test_what_shared_attention_takes_is_what_the_longer_part_does() -> None:
    found, cost = profile(), CostModel(profile())
    solver, m, context = planner(found), 512, 512
    shared = solver.non_matmul_times(Scenario("prefill", m, context))["gpu"].shared["qkv"]
    of = [share.op for share in model_spec(MODEL).block[0].after]
    rope = next(op for op in of if isinstance(op, Rope))
    whole = next(op for op in of if isinstance(op, Attention))
    key = ("prefill", model_spec(MODEL).weight_format)
    for option in shared:
        npu_heads = option.rows
        parts = {
            "gpu": replace(whole, heads=4 * (8 - npu_heads), kv_heads=8 - npu_heads),
            "npu": replace(whole, heads=4 * npu_heads, kv_heads=npu_heads),
        }
        gpu_s, npu_s = (
            cost.contention(kind, *key)  # type: ignore[arg-type]
            * float(cost.other_s(kind, op, m, context).seconds)  # type: ignore[arg-type]
            for kind, op in parts.items()
        )
        elapsed_s = max(gpu_s, npu_s + solver.overheads.wait_s)
        before_s = float(cost.other_s("gpu", rope, m).seconds)
        assert option.elapsed_s == pytest.approx(before_s + elapsed_s)
        assert option.is_cut


@pytest.mark.full
def test_decoding_and_named_strategies_cut_no_attention() -> None:
    found = profile()
    solver = planner(found)
    assert not solver.solve(Scenario("decode", 1, 4096)).heads
    assert solver.solve(Scenario("prefill", 512)).heads
    assert not strategy_plan(model_spec(MODEL), found, "row-cut", [512]).attention
    assert strategy_plan(model_spec(MODEL), found, "auto", [512]).shares_attention


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpu", "npu"])
def test_a_device_that_computes_all_heads_or_none_shares_none(kind: str) -> None:
    able = without_heads(profile(), kind)
    assert not make_plan(model_spec(MODEL), able, PlanRequest(seq_lens=(512,))).attention
    plan = make_plan(model_spec(MODEL), profile(), PlanRequest(seq_lens=(512,)))
    devices = {**ABLE, kind: replace(ABLE[kind], attention_heads=False, graph_sizes=())}
    devices["npu"] = replace(devices["npu"], graph_sizes=profile_sizes())
    with pytest.raises(PlanError, match=f"and the {kind} computes all of them or none"):
        Placement(plan, model_spec(MODEL), devices)  # type: ignore[arg-type]


def profile_sizes() -> tuple[int, ...]:
    return profile().devices["npu"].capabilities.graph_sizes


@pytest.mark.full
def test_a_plan_says_who_has_which_heads_and_is_read_back() -> None:
    request = PlanRequest(seq_lens=(64, 512))
    plan = make_plan(model_spec(MODEL), profile(), request)
    said = {x.m: x.heads for x in plan.attention}
    assert set(said) == {64, 512}
    assert {heads.gpu + heads.npu for heads in said.values()} == {8}
    assert plan.devices() == {"gpu", "npu"}
    again = ExecutionPlan.parse(plan.model_dump_json(), "plan.json")
    assert again.plan_id == plan.plan_id
    assert plan.model_copy(update={"attention": ()}).plan_id != plan.plan_id
    scenario = Scenario("prefill", 512)
    total = next(t for t in plan.totals if t.m == 512)
    assert repredict(plan, model_spec(MODEL), profile())[scenario] == pytest.approx(
        total.predicted_s
    )


@pytest.mark.full
def test_lengths_that_no_one_listed_have_prepared_numbers_of_heads() -> None:
    solver = prepare_solver(model_spec(MODEL), profile(), PlanRequest(seq_lens=(256, 512)))
    assert solver.npu_head_counts
    devices = {**ABLE, "npu": replace(ABLE["npu"], graph_sizes=profile_sizes())}
    placement = Placement(solver.plan, model_spec(MODEL), devices, source=solver)  # type: ignore[arg-type]
    assert placement.kernels.head_cuts == solver.npu_head_counts
    shared = {m: placement.heads("prefill", m) for m in (100, 300, 511)}
    assert shared[511]
    for heads in filter(None, shared.values()):
        runs = {x.kind: x for x in heads}
        assert runs["npu"].stop in solver.npu_head_counts
        assert (runs["npu"].first, runs["gpu"].stop) == (0, 8)
        assert runs["npu"].stop == runs["gpu"].first


def document(**changes: Any) -> dict[str, Any]:
    plan = strategy_plan(model_spec(MODEL), profile(), "gpu-only", [64])
    share = {"phase": "prefill", "m": None, "heads": {"gpu": 5, "npu": 3}}
    return {**plan.model_dump(mode="json"), "attention": [share], **changes}


@pytest.mark.full
def test_random_shares_cover_all_heads_once() -> None:
    rng, spec = random.Random(3), model_spec(MODEL)
    for _ in range(20):
        npu, m = rng.randint(0, 8), rng.randint(1, 600)
        share = {"phase": "prefill", "m": None, "heads": {"gpu": 8 - npu, "npu": npu}}
        plan = ExecutionPlan.model_validate(document(attention=[share]))
        heads = Placement(plan, spec, ABLE).heads("prefill", m)  # type: ignore[arg-type]
        if npu in (0, 8) or m > SIZES[-1]:
            assert not heads
            continue
        assert sorted(h for x in heads for h in range(x.first, x.stop)) == list(range(8))
        graphs = {x.kind: x.graph for x in heads}
        assert graphs == {"gpu": m, "npu": min(s for s in SIZES if s >= m)}
        assert not Placement(plan, spec, ABLE).heads("decode", m)  # type: ignore[arg-type]


@pytest.mark.full
def test_what_a_plan_may_not_say_of_attention() -> None:
    share = document()["attention"][0]
    for changes, message in (
        ({"attention": [{**share, "phase": "decode"}]}, "'prefill'"),
        ({"attention": [share, share]}, "in one way at each token count"),
        ({"non_matmul": {"prefill": "npu", "decode": "gpu"}}, "the GPU has the other operators"),
    ):
        with pytest.raises(ValueError, match=message):
            ExecutionPlan.model_validate(document(**changes))
    plan = ExecutionPlan.model_validate(
        document(attention=[{**share, "heads": {"gpu": 3, "npu": 3}}])
    )
    for check in (plan.check_fits, lambda spec: Placement(plan, spec, ABLE)):  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=r"shares 6 key/value heads of attention; .* has 8"):
            check(model_spec(MODEL))


def test_the_entry_of_a_longer_call_holds_for_one_that_is_not_listed() -> None:
    plan = ExecutionPlan.model_validate(
        document(
            attention=[
                {"phase": "prefill", "m": m, "heads": {"gpu": 8 - npu, "npu": npu}}
                for m, npu in ((64, 0), (256, 3))
            ]
        )
    )
    found = [plan.heads(m) for m in (32, 64, 65, 256, 257)]
    assert [x and x.npu for x in found] == [0, 0, 3, 3, None]
    assert np.all([x is None or x.gpu + x.npu == 8 for x in found])
