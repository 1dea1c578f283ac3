"""Rows of weights that both devices hold: few, unless they are worth their memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.models import model_spec
from hetero.placement.planning import spec_on
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.copies import NEGLIGIBLE_BYTES, PROMPTS, SHARE, WORTH, representatives
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.expert_choice import model_bytes
from hetero.solver.planner import Planner
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import PlanRequest, scenarios_of
from hetero.solver.residency import is_small
from hetero.solver.weight_memory import Limits
from tests.support.selection import examples

LENGTHS = (64, 256)
PLENTY = PlanRequest(seq_lens=LENGTHS, memory_budget_bytes=1 << 50)
USUAL = PlanRequest(seq_lens=LENGTHS)


@pytest.mark.full
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-0.6b", "gemma-2-2b"])
@pytest.mark.parametrize(
    "profile", ["host", "host-avx2", "host-amx", "snapdragon-8-gen-3-strong-npu"]
)
@pytest.mark.parametrize("weights", ["w4a16", "w4a8"])
def test_copies_are_few_or_gain_what_they_must(
    weights: str, profile: str, model: str, prepared: bool
) -> None:
    spec, device = spec_on(model, weights, profile)

    def planned(request: PlanRequest) -> ExecutionPlan:
        if prepared:
            return prepare_solver(spec, device, request).plan
        return make_plan(spec, device, request)

    free, usual = planned(PLENTY), planned(USUAL)
    assert free.memory is not None
    assert usual.memory is not None
    most = max(SHARE * model_bytes(spec), NEGLIGIBLE_BYTES)
    notes = [note for note in usual.notes if note.startswith("both devices hold")]
    if free.memory.twice_bytes <= most:
        assert (usual.plan_id, notes) == (free.plan_id, [])
        return
    (note,) = notes
    if "would take" in note:
        assert usual.plan_id == free.plan_id
        return
    assert usual.memory.twice_bytes <= most * (1 + 1e-6)
    for before, after in zip(free.totals, usual.totals, strict=True):
        assert after.predicted_s <= before.predicted_s * (1 + least_gain(device, usual))
        alone_s = after.best_single_device_s * (1 + usual.margin)
        assert after.predicted_s <= max(before.predicted_s, alone_s) * (1 + 1e-6)


def least_gain(device: DeviceProfile, plan: ExecutionPlan) -> float:
    limited = device.devices["npu"].capabilities.memory_limit_bytes is not None
    return WORTH if limited else plan.margin


@pytest.mark.full
def test_a_budget_is_the_users_word() -> None:
    """A budget in which the copies fit keeps them."""
    spec, device = spec_on("llama-3.2-1b", "w4a8", "host")
    plan = make_plan(spec, device, PLENTY)
    assert plan.memory is not None
    assert plan.memory.twice_bytes > SHARE * model_bytes(spec)
    assert not [note for note in plan.notes if note.startswith("both devices hold")]


def test_both_devices_still_share_prompts_that_they_must_share() -> None:
    """`--device hetero` on a PC: the copies go only if no step is left to one device alone."""
    spec, device = spec_on("llama-3.2-1b", "w4a8", "host")
    plan = prepare_solver(spec, device, PlanRequest(seq_lens=LENGTHS, shared=True)).plan
    for m in LENGTHS:
        tiles = [tile for op in plan.ops if op.m == m for tile in op.tiles]
        assert {tile.device for tile in tiles} == {"gpu", "npu"}


def test_copies_of_small_matmuls_are_not_counted() -> None:
    """Those of the layers' own inputs of Gemma 4, and of a model that is nearly all experts."""
    profile = DeviceProfile.load("snapdragon-8-elite")

    def small(name: str) -> set[str]:
        planner = Planner(model_spec(name), profile)
        limits = Limits(copies=SHARE * model_bytes(planner.spec))
        return {x.name for x in planner.spec.matmuls if is_small(planner, x.name, limits)}

    assert {x.partition(".")[0] for x in small("gemma-4-e2b")} == {
        "input_in", "input_gate", "input_out",
    }  # fmt: skip
    assert small("lfm2-8b-a1b")
    for name in ("llama-3-8b", "smollm2-135m", "qwen3.5-0.8b", "gemma-4-12b"):
        assert not small(name)


@pytest.mark.full
def test_experts_are_weights_of_the_model() -> None:
    """Copies of matmuls are few compared with all experts, which take ten times as much."""
    spec, device = spec_on("qwen3.5-35b-a3b", "w4a16", "snapdragon-8-gen-3-strong-npu")
    assert model_bytes(spec) > 10 * spec.matmul_weight_bytes
    plan = make_plan(spec, device, PlanRequest(seq_lens=(64,)))
    assert plan.memory is not None
    assert SHARE * spec.matmul_weight_bytes < plan.memory.twice_bytes < SHARE * model_bytes(spec)
    assert not [note for note in plan.notes if note.startswith("both devices hold")]
    assert all(x.predicted_s <= x.best_single_device_s for x in plan.totals)


@given(st.dictionaries(st.integers(1, 4096), st.floats(0.1, 10), min_size=1, max_size=30))
@settings(max_examples=examples(100), deadline=None)
def test_few_lengths_count_as_much_as_all(weights: dict[int, float]) -> None:
    """Each length counts once, for one of them; so many lengths stand for themselves."""
    request = PlanRequest(seq_lens=tuple(weights), length_weights=tuple(weights.values()))
    scenarios = scenarios_of(request.seq_lens)
    few = representatives(scenarios, request)
    assert set(few) <= set(scenarios)
    assert sum(few.values()) == pytest.approx(sum(map(request.weight, scenarios)))
    prompts = [x for x in few if x.phase == "prefill"]
    assert len(prompts) == min(len(weights), PROMPTS)
    if len(weights) <= PROMPTS:
        assert few == pytest.approx({x: request.weight(x) for x in scenarios})
