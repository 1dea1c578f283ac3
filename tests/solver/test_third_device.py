"""Matmuls cut for GPU, NPU and CPU: against trying everything, memory, and plans without a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.chooser import Chooser, Rules
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.options import GPU, HOST, INF, Objective
from hetero.solver.place import tiles_of
from hetero.solver.plan import OpPlan
from hetero.solver.planner import Planner
from hetero.solver.report import brief, conclusion
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.third_device import crowding
from hetero.solver.weight_memory import weight_memory
from tests.solver.instances import (
    ALIGN,
    NAMES,
    Instance,
    Way,
    allowed_costs,
    every_way,
    idle,
    planner_of,
    random_instance,
    sync_at,
)
from tests.support.selection import examples

CHIP = "snapdragon-x-elite"
MODEL = "qwen3-4b"


def instance_of(seed: int) -> Instance:
    """A random instance with a CPU, mostly a fast one, and one memory."""
    rng = np.random.default_rng(seed + 10**6)
    instance = random_instance(seed, tiny=False)
    instance.sync = replace(instance.sync, copy_s=0.0)
    scale = float(rng.choice([0.1, 0.3, 1.0]))
    instance.tables["cpu"] = {k: scale * x for k, x in instance.tables["gpu"].items()}
    return instance


def ways_of_three(instance: Instance, name: str, m: int) -> list[Way]:
    """Every cut of all tokens for three devices, one after another."""
    n, k = instance.rows[name], instance.ks[name]
    slow = max(*instance.contention, 1.5 if m <= 8 else 1.0)
    sync, _ = sync_at(instance, m)
    tiles = [(g,) for g in instance.sizes if g >= m]
    tiles += [(g, h) for g in instance.sizes if g < m for h in instance.sizes if g >= h >= m - g]
    ways = []
    for graphs in tiles:
        for a in range(ALIGN, n, ALIGN):
            for b in range(a + ALIGN, n, ALIGN):
                npu = slow * sum(instance.seconds("npu", size, a, k) for size in graphs)
                cpu = slow * instance.seconds("cpu", m, b - a, k)
                gpu = slow * instance.seconds("gpu", m, n - b, k)
                host = max(npu + sync.npu_restart_s, cpu + sync.wait_s)
                last = host >= gpu
                more = sync.join_s + (idle(sync, host - gpu) if last else 0.0)
                submit = sync.submit_s if last and not sync.eager else 0.0
                enter = (sync.wait_s + submit + more, sync.submit_s + more)
                leaves, back = (1, sync.submit_s) if last else (0, 0.0)
                ways.append(Way("three", gpu, npu, max(gpu, host), enter, leaves, back, a, b))
    return ways


def expected(instance: Instance, name: str, m: int, state: int) -> float:
    """The least cost: of one or two devices, or of three where that gains by the margin."""
    ways = every_way(instance, name, m)
    costs = allowed_costs(ways, instance.margin)[:, state]
    back = np.asarray([way.back for way in ways])
    limit = (1 - instance.margin) * (costs + back).min()
    three = [way.cost(state) for way in ways_of_three(instance, name, m)
             if way.cost(state) + way.back <= limit]  # fmt: skip
    return min(float(costs.min()), *three, INF)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 40), name=st.sampled_from(NAMES))
def test_every_matmul_is_as_good_as_trying_all_cuts(seed: int, m: int, name: Any) -> None:
    instance = instance_of(seed)
    m = 1 + m % (2 * instance.sizes[-1])
    planner = planner_of(instance, cpu=True, third=True)
    chooser = Chooser(
        planner.overheads, Rules(margin=instance.margin, third=True), planner.objective()
    )
    space = planner.space(name)
    found = chooser.options(space, m)
    for state in (GPU, HOST):
        best = min(Objective().cost(option, state) for option in found)
        assert best == pytest.approx(expected(instance, name, m, state), rel=1e-9)
    for option in found:  # its tiles are the matmul, each output once
        tiles = tiles_of(space, option, m)
        OpPlan(phase="prefill", m=m, op=name, n=space.n, k=space.k, strategy=option.strategy,
               tiles=tiles)  # fmt: skip
        assert {tile.device for tile in tiles} == option.devices


def test_three_devices_are_taken_in_some_instances_and_not_in_others() -> None:
    taken = [
        "cpu" in planner_of(instance_of(seed), cpu=True, third=True)
        .solve(Scenario("prefill", instance_of(seed).sizes[-1])).devices
        for seed in range(examples(60, 200))
    ]  # fmt: skip
    assert len(taken) / 10 < sum(taken) < len(taken)


@pytest.mark.full
@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_third_device_never_makes_a_step_slower(seed: int) -> None:
    instance = instance_of(seed)
    scenario = Scenario("prefill", instance.sizes[-1])
    two, three = (planner_of(instance, cpu=True, third=third) for third in (False, True))
    assert three.solve(scenario).seconds <= two.solve(scenario).seconds * (1 + 1e-9)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_each_row_counts_where_it_is(seed: int) -> None:
    """In f32, as stored: all rows once, and those of a CPU are its bytes."""
    instance = instance_of(seed)
    planner = planner_of(instance, cpu=True, third=True)
    solution = planner.solve(Scenario("prefill", instance.sizes[-1]))
    memory = weight_memory(planner, [solution])
    rows = {x: 4 * planner.spec.counts[x] * planner.shape(x)[1] for x in solution.options}
    assert memory.cpu_bytes == sum(row * solution.options[x].cpu_rows for x, row in rows.items())
    weights = sum(row * planner.shape(x)[0] for x, row in rows.items())
    assert memory.total_bytes == weights + memory.twice_bytes


@pytest.fixture(scope="module")
def chip() -> DeviceProfile:
    return DeviceProfile.load(CHIP)


@pytest.mark.full
def test_a_prompt_of_a_large_model_is_planned_over_three(chip: DeviceProfile) -> None:
    spec = model_spec(MODEL)
    two, three = (
        make_plan(spec, chip, PlanRequest(seq_lens=(512,), third=third)) for third in (False, True)
    )
    assert "cpu" not in two.devices()
    assert three.totals[0].devices == ("cpu", "gpu", "npu")
    assert three.totals[0].predicted_s < 0.985 * two.totals[0].predicted_s
    assert three.totals[1].predicted_s <= two.totals[1].predicted_s * 1.001
    assert three.memory is not None
    assert three.memory.cpu_bytes > 0
    cut = next(op for op in three.ops if op.cpu_s)
    assert {tile.device for tile in cut.tiles} == {"gpu", "npu", "cpu"}
    first, stop = next(tile.rows for tile in cut.tiles if tile.device == "cpu")
    assert three.residency[cut.op].cpu_rows == (first, stop)


@pytest.mark.full
def test_what_it_cannot_hold_is_not_planned_on_a_third_device(chip: DeviceProfile) -> None:
    record = chip.devices["cpu"]
    full = record.capabilities.model_copy(update={"memory_limit_bytes": 1 << 20})
    devices = {**chip.devices, "cpu": record.model_copy(update={"capabilities": full})}
    small = chip.model_copy(update={"devices": devices})
    plan = make_plan(model_spec(MODEL), small, PlanRequest(seq_lens=(512,), third=True))
    assert "cpu" not in plan.devices()
    assert any("the CPU holds 0.00 GiB" in note for note in plan.notes)


@pytest.mark.full
def test_a_memory_budget_counts_the_rows_of_a_third_device(chip: DeviceProfile) -> None:
    spec = model_spec(MODEL)
    free = make_plan(spec, chip, PlanRequest(seq_lens=(512,), third=True))
    assert free.memory is not None
    budget = free.memory.total_bytes - free.memory.cpu_bytes // 2
    request = PlanRequest(seq_lens=(512,), third=True, memory_budget_bytes=budget)
    plan = make_plan(spec, chip, request)
    assert plan.memory is not None
    assert plan.memory.total_bytes <= budget


@pytest.fixture(scope="module")
def plan(chip: DeviceProfile) -> ExecutionPlan:
    return make_plan(model_spec(MODEL), chip, PlanRequest(seq_lens=(512,), third=True))


def test_a_report_names_the_third_device_and_its_share(plan: ExecutionPlan, tmp_path: Path) -> None:
    assert plan.memory is not None
    cut = next(op for op in plan.ops if op.cpu_s)
    first, stop = next(tile.rows for tile in cut.tiles if tile.device == "cpu")
    share = f"CPU {100 * (stop - first) / cut.n:.0f} %"
    for name in ("plan.md", "plan.html", "plan.json"):
        plan.report(tmp_path / name)
        text = (tmp_path / name).read_text("utf-8")
        assert share in text, name
        assert "on the CPU" in text, name
    bar = next(row for row in brief.operators(plan).rows if row[1] == cut.op)[3]
    assert "▒" in bar
    assert bar.split()[-1].count(":") == 2
    assert "CPU" in conclusion.sentences(plan)[0]
    again = ExecutionPlan.parse(plan.model_dump_json(), "here")
    assert again == plan


def test_a_cpu_computes_nothing_but_matmuls(plan: ExecutionPlan) -> None:
    document = plan.model_dump(mode="json")
    document["non_matmul"]["prefill"] = "cpu"
    with pytest.raises(PlanError, match="a CPU takes rows of matmuls"):
        ExecutionPlan.parse(json.dumps(document), "here")


@pytest.mark.full
def test_a_profile_whose_cpu_no_backend_plays_is_planned_for_two(chip: DeviceProfile) -> None:
    """As on a Snapdragon without a profile of its own (`nearest_profile`)."""
    devices = {kind: x for kind, x in chip.devices.items() if kind != "cpu"}
    here = chip.model_copy(update={"devices": devices})
    request = PlanRequest(seq_lens=(512,), third=True)
    assert "cpu" not in make_plan(model_spec(MODEL), here, request).devices()


def test_decoding_is_not_shared_by_three_where_two_take_all_of_the_memory(
    chip: DeviceProfile,
) -> None:
    """All together read as fast as the fastest one alone, by the fit."""
    planner = Planner(model_spec(MODEL), chip)
    assert crowding(planner.cost, "prefill") == 1.0
    speeds = {unit.device: unit.bandwidth_bytes_per_s for unit in reversed(chip.units)}
    slower = sum(speeds.values()) / max(speeds.values())
    assert crowding(planner.cost, "decode") == pytest.approx(slower)
    without = chip.model_copy(update={"units": ()})
    assert crowding(Planner(model_spec(MODEL), without).cost, "decode") == INF


@pytest.mark.parametrize("profile", ["snapdragon-8-gen-3", "host-avx2"])
def test_plans_of_profiles_without_a_cpu_stay_as_they_were(profile: str) -> None:
    spec, known = model_spec("qwen2.5-0.5b"), DeviceProfile.load(profile)
    documents = []
    for third in (False, True):
        plan = make_plan(spec, known, PlanRequest(seq_lens=(64, 300), third=third))
        documents.append(plan.model_copy(update={"solve_s": None}).model_dump_json())
    assert documents[0] == documents[1]
    assert "cpu" not in documents[0]
