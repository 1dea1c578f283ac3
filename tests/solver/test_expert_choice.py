"""Routed experts are placed on the devices that are faster with them, and counted there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Experts
from hetero.models import model_spec
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile, Storage
from hetero.solver.build import make_plan
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.expert_choice import (
    Room,
    expert_bytes,
    knapsack,
    matmul_bytes,
    shared_best,
)
from hetero.solver.expert_shares import Routing
from hetero.solver.expert_times import ExpertTimes, RoutedLayer, chances
from hetero.solver.host_queue import HostQueue
from hetero.solver.options import INF
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan
from tests.profiler.fakes import without_ops
from tests.solver.test_repredict import slower
from tests.support.selection import examples

MODEL, LENGTHS = "qwen3-moe-3b", (64,)
EXPERTS = ("gpu", "npu")


def profile(*able: str, gpu_factor: float = 1.0, limit_bytes: int | None = None) -> DeviceProfile:
    """The host's without times of experts, whose `able` devices say that they compute them."""
    taken = slower(without_ops(DeviceProfile.load("host"), "Experts"), "gpu", gpu_factor)
    return able_at(taken, *able, limit_bytes=limit_bytes)


def able_at(taken: DeviceProfile, *able: str, limit_bytes: int | None = None) -> DeviceProfile:
    """A profile whose `able` devices say that they compute experts."""
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
    assert not {"experts", "npu_experts"} & plan.model_dump(mode="json").keys()
    assert "experts" not in profile().model_dump_json()
    assert note_of(plan) == "routed experts: on the GPU (the profile's NPU has no kernels of them)"


@pytest.mark.full
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


@pytest.mark.full
def test_they_are_counted_where_they_are() -> None:
    graph = model_spec(MODEL)
    on_gpu, on_npu = plan_on(profile()), plan_on(profile(*EXPERTS, gpu_factor=100))
    assert on_gpu.memory is not None
    assert on_npu.memory is not None
    assert on_gpu.memory.gpu_bytes >= graph.expert_weight_bytes
    assert on_npu.memory.npu_bytes >= graph.expert_weight_bytes
    assert on_npu.memory.gpu_bytes < graph.expert_weight_bytes


def test_a_gpu_without_room_leaves_the_rest_to_the_npu() -> None:
    limit = model_spec(MODEL).expert_weight_bytes // 2
    plan = plan_on(profile(*EXPERTS, gpu_factor=0.01, limit_bytes=limit))
    counts = [len(x.npu) for x in plan.npu_experts]
    assert 24 * 32 <= sum(counts) <= 24 * 36
    assert plan.memory is not None
    assert "the rest on the GPU" in note_of(plan)


@pytest.mark.full
def test_both_devices_compute_where_both_are_fast() -> None:
    plan, without = plan_on(profile(*EXPERTS, gpu_factor=4)), plan_on(profile(gpu_factor=4))
    assert plan.experts is None
    assert len(plan.npu_experts) == 24
    assert all(0 < len(x.npu) < 64 for x in plan.npu_experts)
    assert all(a < b for a, b in zip(seconds(plan), seconds(without), strict=True))
    assert ExecutionPlan.parse(plan.model_dump_json(), "plan.json") == plan
    assert plan.plan_id != plan.model_copy(update={"npu_experts": ()}).plan_id
    assert "of 64 in layers 0 to 23, the rest on the GPU" in note_of(plan)
    assert "equal shares" in note_of(plan)


def test_a_gain_within_the_margin_is_none() -> None:
    request = PlanRequest(seq_lens=LENGTHS, margin=0.5)
    plan = make_plan(model_spec(MODEL), profile(*EXPERTS, gpu_factor=4), request)
    assert plan.experts is None
    assert plan.npu_experts == ()


def test_measured_shares_say_which_experts() -> None:
    """Four experts that every token chooses, and sixty that share the rest."""
    counts = [1000] * 4 + [67] * 60  # four always, four of the others
    routing = Routing(model=MODEL, tokens=8, layers=dict.fromkeys(range(24), tuple(counts)))
    request = PlanRequest(seq_lens=LENGTHS, routing=routing)
    graph = model_spec(MODEL)
    plan = make_plan(graph, profile(*EXPERTS, gpu_factor=4), request)
    assert "by their shares of 8 tokens" in note_of(plan)
    assert plan.npu_experts
    busy = {0, 1, 2, 3}
    assert all(busy >= set(x.npu) or not busy & set(x.npu) for x in plan.npu_experts)
    few = routing.model_copy(update={"layers": {0: (1,)}})
    with pytest.raises(PlanError, match=r"none of the 64 experts of layer 0 .*: count them with"):
        few.checked(graph)


@pytest.mark.full
def test_a_budget_without_room_leaves_them_in_the_file() -> None:
    """Where the GPU computes in place; the note says what a token reads."""
    graph = model_spec(MODEL)
    budget = graph.matmul_weight_bytes + graph.expert_weight_bytes // 2
    request = PlanRequest(seq_lens=LENGTHS, memory_budget_bytes=budget)
    plan = make_plan(graph, profile(*EXPERTS, gpu_factor=100), request)
    assert plan.expert_devices == frozenset()
    assert "in the model's mapped file" in note_of(plan)
    assert plan.memory is not None
    assert plan.memory.total_bytes <= budget
    busy = dict.fromkeys(range(24), (1000,) * 8 + (1,) * 56)
    counted = Routing(model=MODEL, tokens=8, layers=busy)
    assert "reads 0.00 GiB" in note_of(
        make_plan(graph, profile(), replace(request, routing=counted))
    )


@settings(max_examples=examples(8), deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_no_other_placement_is_faster(data: st.DataObject) -> None:
    """All subsets of experts of two layers are tried, within the devices' room.

    With equal shares none is better, with others hardly.
    """
    count, equal = data.draw(st.integers(3, 4)), data.draw(st.booleans())
    shares = (
        st.just([1] * count)
        if equal
        else st.lists(st.integers(1, 50), min_size=count, max_size=count)
    )
    layers = {i: tuple(data.draw(shares)) for i in range(2)}
    taken = profile(*EXPERTS, gpu_factor=data.draw(st.sampled_from([0.5, 2, 4, 8])))
    op = Experts(experts=count, chosen=2, d=1024, f=512, weight_format=WeightFormat.W4A16)
    times = small_times(taken, op, Routing(model="small", tokens=1, layers=layers))
    each, least = expert_bytes(op, taken, "npu"), data.draw(st.integers(0, count))
    room = Room(least * each, data.draw(st.integers(least, 2 * count)) * each)
    phases = (((1, 1.0),), ((64, 1.0),))
    found = shared_best(times, taken, room, phases)

    @cache
    def cost(layer: int, ids: tuple[int, ...]) -> float:
        total, routed = 0.0, times.layers[layer]
        for steps in phases:
            alone_s, own_s = (times.steps_s(routed, x, steps) for x in ((), ids))
            total += INF if own_s > alone_s and not least else own_s / alone_s
        return total

    subsets = [x for size in range(count + 1) for x in combinations(range(count), size)]
    pairs = [x for x in product(subsets, subsets) if fits(room, each, x)]
    best = min(cost(0, first) + cost(1, second) for first, second in pairs)
    assert found is not None
    assert fits(room, each, found)
    assert cost(0, found[0]) + cost(1, found[1]) <= best * (1 + (1e-9 if equal else 0.05))


def fits(room: Room, each: float, parts: Sequence[tuple[int, ...]]) -> bool:
    return room.least <= each * sum(map(len, parts)) <= room.most


def small_times(taken: DeviceProfile, op: Experts, routing: Routing) -> ExpertTimes:
    """Times of a graph of two layers with these experts alone."""
    cost = CostModel(taken)
    times = ExpertTimes(cost, model_spec(MODEL), HostQueue.of(cost), routing)
    times.layers = tuple(  # type: ignore[misc]
        RoutedLayer(i, op, times._shares(i, op)) for i in range(2)
    )
    return times


def test_how_many_experts_of_a_token_a_device_has() -> None:
    held, others = np.full(6, 0.25), np.full(10, 0.25)
    expected = [comb(6, x) * comb(10, 4 - x) / comb(16, 4) for x in range(5)]
    np.testing.assert_allclose(chances(held, others, 4), expected)
    always = chances(np.ones(2), np.full(8, 0.25), 4)
    np.testing.assert_allclose(always, [0, 0, 1, 0, 0], atol=1e-4)


def test_a_knapsack_takes_the_cheapest_that_fits() -> None:
    options = [[(2.0, 0.0), (1.0, 10.0)], [(5.0, 0.0), (1.0, 20.0), (3.0, 10.0)]]
    assert knapsack(options, 0, INF) == [1, 1]
    assert knapsack(options, 0, 20) == [0, 1]
    assert knapsack(options, 0, 19) == [0, 2]
    assert knapsack(options, 15, 29) == [0, 1]
    assert knapsack(options, 40, 50) is None
    assert knapsack(options, 0, 0) == [0, 0]


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


@pytest.mark.parametrize(
    ("model", "chip"), [("gpt-oss-20b", "snapdragon-x2-elite"), ("lfm2-8b-a1b", "iq-9075")]
)
def test_fitted_chips_share_them_where_that_gains(model: str, chip: str) -> None:
    request = PlanRequest(seq_lens=(256,))
    plan = make_plan(model_spec(model), DeviceProfile.load(chip), request)
    without = able_at(DeviceProfile.load(chip), "gpu")
    alone = make_plan(model_spec(model), without, request)
    assert plan.npu_experts
    assert all(a < b for a, b in zip(seconds(plan), seconds(alone), strict=True))
    assert "fitted, with a graph for each expert" in note_of(plan)
    assert alone.npu_experts == ()


def test_fitted_chips_keep_them_on_one_device_where_that_is_faster() -> None:
    request = PlanRequest(seq_lens=(256,))
    plan = make_plan(model_spec(MODEL), DeviceProfile.load("snapdragon-x2-elite"), request)
    assert plan.npu_experts == ()
    assert note_of(plan).startswith("routed experts: on the GPU (a token ")


def test_both_devices_at_once_are_slowed_down_by_the_memory() -> None:
    graph, taken = model_spec(MODEL), profile(*EXPERTS, gpu_factor=4)
    crowded = taken.model_copy(
        update={"contention": tuple(x.model_copy(update={"gpu": 3.0, "npu": 3.0})
                                    for x in taken.contention)}
    )  # fmt: skip
    spent = []
    for own in (taken, crowded):
        cost = CostModel(own)
        times = ExpertTimes(cost, graph, HostQueue.of(cost), None)
        layer = times.layers[0]
        ids = tuple(range(32))
        spent.append([times.seconds(layer, npu, m) for m in (1, 64) for npu in ((), ids)])
    alone, shared = spent[0][::2], spent[0][1::2]
    assert spent[1][::2] == alone  # the GPU alone waits for nobody
    assert all(a < b for a, b in zip(shared, spent[1][1::2], strict=True))


@pytest.mark.full
def test_experts_in_a_file_are_predicted_at_the_disks_speed() -> None:
    """The more of them the memory holds, the faster; without a rate a plan says so."""
    graph, taken = model_spec(MODEL), profile()
    disk = taken.model_copy(update={"storage": Storage(read_bytes_per_s=1e9, piece_bytes=1 << 20)})
    speeds, rooms = [], (0.25, 0.5, 0.75)
    for room in rooms:
        budget = round(matmul_bytes(graph) + room * graph.expert_weight_bytes)
        request = PlanRequest(seq_lens=LENGTHS, memory_budget_bytes=budget)
        plan = make_plan(graph, disk, request)
        unknown = make_plan(graph, taken, request)
        read_s = (1 - room) * graph.expert_weight_bytes * 8 / 64 / 1e9
        assert seconds(plan)[-1] - seconds(unknown)[-1] == pytest.approx(read_s, rel=0.02)
        said = float(note_of(plan).partition("at most ")[2].removesuffix(" tokens/s"))
        assert said == pytest.approx(1 / seconds(plan)[-1], rel=0.15)
        assert "this profile does not have" in note_of(unknown)
        speeds.append(said)
    assert speeds == sorted(set(speeds))
    busy = dict.fromkeys(range(24), (1000,) * 8 + (1,) * 56)
    counted = replace(request, routing=Routing(model=MODEL, tokens=8, layers=busy))
    known = make_plan(graph, disk, counted)
    assert seconds(known)[-1] < seconds(plan)[-1]  # the busiest are in memory


@pytest.mark.full
def test_matmuls_get_what_experts_leave_of_every_limit() -> None:
    """They share a chip's NPU, and a budget for both devices."""
    device = DeviceProfile.load("snapdragon-8-gen-3-strong-npu")
    limit = device.devices["npu"].capabilities.memory_limit_bytes
    plan = make_plan(model_spec("gpt-oss-120b"), device, PlanRequest(seq_lens=(64, 256)))
    assert plan.npu_experts
    assert plan.memory is not None
    assert limit is not None
    assert 0.95 * limit < plan.memory.npu_bytes <= limit
    spec = model_spec("qwen3-30b-a3b")
    free = make_plan(spec, device, PlanRequest(seq_lens=(64, 256))).memory
    assert free is not None
    budget = free.total_bytes - free.twice_bytes // 2
    plan = make_plan(spec, device, PlanRequest(seq_lens=(64, 256), memory_budget_bytes=budget))
    assert plan.memory is not None
    assert free.twice_bytes > 0
    assert plan.memory.total_bytes <= budget
