"""Prompts and decoding on weights of two storages, within one memory budget."""

from __future__ import annotations

import pytest

from hetero.backends.formats import WeightFormat
from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.errors import PlanError
from hetero.solver.plan import PHASES
from hetero.solver.prepared import PreparedSolver, prepare_solver
from hetero.solver.request import PlanRequest

W8, W4 = WeightFormat.W8A8, WeightFormat.W4A16
GIB = 2.0**30


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return DeviceProfile.load("host-avx2")


PLENTY = 1000.0  # GiB: every copy of a row fits


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3.2-1b", "w8a8").model_copy(update={"also": (W4,)})


def solved(
    spec: ModelGraph, profile: DeviceProfile, budget_gib: float | None = None
) -> PreparedSolver:
    budget = None if budget_gib is None else int(budget_gib * GIB)
    lengths = {"seq_lens": (64, 256), "explain": False}
    return prepare_solver(spec, profile, PlanRequest(**lengths, memory_budget_bytes=budget))  # type: ignore[arg-type]


def seconds(solver: PreparedSolver, phase: str) -> list[float]:
    return [x.predicted_s for x in solver.plan.totals if x.phase == phase]


@pytest.mark.full
def test_each_phase_has_the_faster_format(spec: ModelGraph, profile: DeviceProfile) -> None:
    both = solved(spec, profile, PLENTY)
    assert both.formats == (W8, W4)
    alone = {
        x: solved(spec.in_format(x).model_copy(update={"also": ()}), profile, PLENTY)
        for x in (W8, W4)
    }
    assert seconds(both, "decode") == seconds(alone[W4], "decode")
    for mine, other in zip(seconds(both, "prefill"), seconds(alone[W8], "prefill"), strict=True):
        assert mine <= other
    for plan in (both.plan, both.plan_for(300)):
        for op in plan.ops:
            decodes = op.phase == "decode" or op.op == "lm_head"
            assert {x.precision for x in op.tiles} == {W4 if decodes else None}
    both.plan.check_fits(spec)


@pytest.mark.full
def test_one_budget_holds_both(spec: ModelGraph, profile: DeviceProfile) -> None:
    """Ever less memory: fewer rows twice, then one storage, and never faster."""
    found = {gib: solved(spec, profile, gib) for gib in (3.0, 2.25, 1.5, 1.0)}
    assert [x.formats for x in found.values()][:2] == [(W8, W4)] * 2
    assert found[1.0].formats == (W4, W4)
    for gib, solver in found.items():
        assert solver.plan.memory is not None
        assert solver.plan.memory.total_bytes <= gib * GIB
    asked = PlanRequest(seq_lens=(64, 256))
    costs = [sum(x.expected_s(asked, phase) for phase in PHASES) for x in found.values()]
    assert costs == sorted(costs)
    with pytest.raises(PlanError, match="raise --memory-budget"):
        solved(spec, profile, 0.2)


def test_a_format_without_times_is_left_out(spec: ModelGraph, profile: DeviceProfile) -> None:
    known = tuple(x for x in profile.predictors if x.weight_format is not W8)
    without = profile.model_copy(update={"predictors": known})
    assert solved(spec, without).formats == (W4, W4)
    nothing = profile.model_copy(update={"predictors": known[:0]})
    with pytest.raises(PlanError, match="has no times of w8a8"):
        solved(spec, nothing)


@pytest.mark.full
def test_adapting_leaves_decoding_in_its_format(spec: ModelGraph, profile: DeviceProfile) -> None:
    drifted = solved(spec, profile).drifted({("npu", "prefill"): 2.0})  # type: ignore[dict-item]
    decoding = [op for op in drifted.plan.ops if op.phase == "decode"]
    assert decoding
    assert {x.precision for op in decoding for x in op.tiles} == {W4}
