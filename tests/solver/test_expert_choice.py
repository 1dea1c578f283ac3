"""Routed experts are placed on the device that is faster with them, and counted there."""

from __future__ import annotations

import pytest

from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan
from tests.solver.test_repredict import slower

MODEL, LENGTHS = "qwen3-moe-3b", (64,)
EXPERTS = ("gpu", "npu")


def profile(*able: str, gpu_factor: float = 1.0, limit_bytes: int | None = None) -> DeviceProfile:
    """The host's, whose `able` devices say that they compute experts."""
    taken = slower(DeviceProfile.load("host"), "gpu", gpu_factor)
    devices = {}
    for kind, record in taken.devices.items():
        changes: dict[str, object] = {"experts": kind in able}
        if kind == "gpu":
            changes["memory_limit_bytes"] = limit_bytes
        known = record.capabilities.model_copy(update=changes)
        devices[kind] = record.model_copy(update={"capabilities": known})
    return taken.model_copy(update={"devices": devices})


def plan_on(taken: DeviceProfile) -> ExecutionPlan:
    return make_plan(model_spec(MODEL), taken, PlanRequest(seq_lens=LENGTHS))


def seconds(plan: ExecutionPlan) -> list[float]:
    return [x.predicted_s for x in plan.totals]


def note_of(plan: ExecutionPlan) -> str:
    (note,) = [x for x in plan.notes if x.startswith("routed experts")]
    return note


def test_profiles_of_before_have_them_on_the_gpu() -> None:
    plan = plan_on(profile())
    assert plan.experts is None
    assert "experts" not in plan.model_dump_json().replace("routed experts", "")
    assert "experts" not in profile().model_dump_json()
    assert note_of(plan) == "routed experts: on the GPU (the profile's NPU has no kernels of them)"


def test_the_faster_device_has_them() -> None:
    fast_gpu = plan_on(profile(*EXPERTS, gpu_factor=0.01))
    assert fast_gpu.experts is None
    assert note_of(fast_gpu).startswith("routed experts: on the GPU (")
    slow_gpu = profile(*EXPERTS, gpu_factor=100)
    plan, without = plan_on(slow_gpu), plan_on(profile(gpu_factor=100))
    assert plan.experts == "npu"
    assert note_of(plan).startswith("routed experts: on the NPU (")
    assert all(a < b for a, b in zip(seconds(plan), seconds(without), strict=True))
    assert "npu" in plan.devices()


def test_they_are_counted_where_they_are() -> None:
    graph = model_spec(MODEL)
    on_gpu, on_npu = plan_on(profile()), plan_on(profile(*EXPERTS, gpu_factor=100))
    assert on_gpu.memory is not None
    assert on_npu.memory is not None
    assert on_gpu.memory.gpu_bytes >= graph.expert_weight_bytes
    assert on_npu.memory.npu_bytes >= graph.expert_weight_bytes
    assert on_npu.memory.gpu_bytes < graph.expert_weight_bytes


def test_a_gpu_without_room_leaves_them_to_the_npu() -> None:
    limit = model_spec(MODEL).expert_weight_bytes // 2
    plan = plan_on(profile(*EXPERTS, gpu_factor=0.01, limit_bytes=limit))
    assert plan.experts == "npu"
    assert "the GPU holds" in note_of(plan)


@pytest.mark.parametrize("strategy", ["gpu-only", "layer"])
def test_named_strategies_choose_no_device_of_experts(strategy: str) -> None:
    taken = profile(*EXPERTS, gpu_factor=100)
    plan = strategy_plan(model_spec(MODEL), taken, strategy, LENGTHS)  # type: ignore[arg-type]
    assert plan.experts is None


def test_plans_for_other_lengths_have_them_on_the_same_device() -> None:
    taken = profile(*EXPERTS, gpu_factor=100)
    solver = prepare_solver(model_spec(MODEL), taken, PlanRequest(seq_lens=LENGTHS))
    assert {solver.plan.experts, solver.plan_for(17).experts} == {"npu"}


def test_a_written_plan_is_read_again() -> None:
    plan = plan_on(profile(*EXPERTS, gpu_factor=100))
    again = ExecutionPlan.parse(plan.model_dump_json(), "plan.json")
    assert again == plan
    assert again.plan_id != plan.model_copy(update={"experts": None}).plan_id
