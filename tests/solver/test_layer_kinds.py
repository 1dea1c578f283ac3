"""Models whose layers are of several kinds: their graph, what they cost, their plans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from hetero.backends.ops import GatedAct, MatMul
from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.profiler.records import DeviceProfile
from hetero.solver import residency
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.layer_dp import walk
from hetero.solver.options import Objective
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.prepared import prepare_solver
from hetero.solver.report.conclusion import sentences
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.weight_memory import Limits, weight_memory

WIDE = (1, 4, 5)  # layers of the second kind


def numbered(name: str | None) -> str | None:
    return name and f"{name}.2"


def as_second_kind(node: Node) -> Node:
    """The node in a layer whose feed-forward is twice as wide."""
    op, role = node.op, node.name.rpartition(".")[2]
    members = tuple((f"{name}.2", start) for name, start in node.members)
    if isinstance(op, MatMul) and role == "gate_up":
        op, members = replace(op, n=2 * op.n), (("gate.2", 0), ("up.2", op.n))
    elif isinstance(op, MatMul) and role == "down":
        op = replace(op, k=2 * op.k)
    elif isinstance(op, GatedAct):
        op = replace(op, f=2 * op.f)
    slots = {
        port: f"{slot}.wide" if slot in ("gate_up", "activated") else slot
        for port, slot in node.slots.items()
    }
    return replace(node, op=op, slots=slots, plan_op=numbered(node.plan_op), members=members)


def mixed(name: str = "qwen2.5-0.5b", layers: int = 8) -> ModelGraph:
    """A known model of `layers` layers, some of which are of a second kind."""
    graph = model_spec(name)
    nodes = [x for x in graph.nodes if x.layer is None or x.layer < layers]
    nodes = [as_second_kind(x) if x.layer in WIDE else x for x in nodes]
    return graph.model_copy(update={"nodes": tuple(nodes)})


def test_kinds_differ_in_the_names_of_their_matmuls() -> None:
    graph = mixed()
    assert [(block.stages[0].name, block.layers) for block in graph.kinds] == [
        ("qkv", 5), ("qkv.2", 3),
    ]  # fmt: skip
    assert graph.counts["up"] == 5
    assert graph.counts["down.2"] == 3
    assert graph.counts["lm_head"] == 1
    assert graph.shapes["down.2"] == (896, 2 * 4864)
    assert ModelGraph.model_validate_json(graph.model_dump_json()) == graph


def test_layers_with_one_matmul_in_common_have_all_of_them() -> None:
    graph = mixed()
    nodes = [
        replace(x, plan_op="o") if x.name == "layer1.o" else x
        for x in graph.nodes
    ]  # fmt: skip
    with pytest.raises(ValidationError, match="have all of them in the same order"):
        graph.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize("name", ["o.1", "o.02", "o.", "x", "down.3.4", "o.٣", "o.99999", ""])
def test_names_of_matmuls_are_known(name: str) -> None:
    graph = mixed()
    nodes = json.loads(graph.model_dump_json())["nodes"]
    nodes[5]["plan_op"] = name
    with pytest.raises(ValidationError, match="a matmul is one of qkv"):
        ModelGraph.model_validate({**json.loads(graph.model_dump_json()), "nodes": nodes})


@pytest.mark.parametrize("m", [1, 256])
def test_a_step_costs_what_each_layer_costs(m: int) -> None:
    graph = mixed()
    planner = Planner(graph, DeviceProfile.load("host"))
    scenario = Scenario("decode" if m == 1 else "prefill", m)
    solution = planner.single(scenario, "gpu")
    assert solution is not None
    context = planner.settings.context if m == 1 else 0
    wanted = 0.0
    for node in graph.nodes:
        if node.plan_op is None:
            wanted += float(planner.cost.other_s("gpu", node.op, m, context).seconds)
        else:
            wanted += solution.options[node.plan_op].elapsed_s
    steps = sum(count * option.elapsed_s for option, _, count in walk(solution.path).steps)
    assert steps == pytest.approx(wanted, rel=1e-9)
    assert solution.path.cost >= steps


def test_a_memory_limit_walks_the_same_stages() -> None:
    profile, settings = DeviceProfile.load("snapdragon-8-gen-3"), PlannerSettings(unfused=False)
    planner = Planner(mixed(), profile, settings)
    scenario, objective = Scenario("prefill", 256), Objective()
    best = planner.solve(scenario, objective)
    assert any(option.is_cut for option in best.options.values())
    used = planner.with_rows({x: (o.rows,) if o.rows else () for x, o in best.options.items()})
    (found,) = residency.solve(used, [scenario], objective, Limits(), lambda _: 1.0)
    assert found.path.cost == pytest.approx(used.solve(scenario, objective).path.cost)


def test_a_plan_under_a_budget_keeps_to_it() -> None:
    graph, profile = mixed(), DeviceProfile.load("snapdragon-8-gen-3")
    free = make_plan(graph, profile, PlanRequest(seq_lens=(256,)))
    assert free.memory is not None
    budget = int(0.6 * graph.matmul_weight_bytes + 0.4 * free.memory.total_bytes)
    plan = make_plan(graph, profile, PlanRequest(seq_lens=(256,), memory_budget_bytes=budget))
    assert plan.memory is not None
    assert plan.memory.total_bytes <= budget
    assert plan.totals[0].predicted_s >= free.totals[0].predicted_s * (1 - 1e-9)


def test_every_row_of_every_layer_takes_memory() -> None:
    planner = Planner(mixed(), DeviceProfile.load("host"))
    solution = planner.single(Scenario("prefill", 64), "gpu")
    assert solution is not None
    memory = weight_memory(planner, [solution])
    assert memory.gpu_bytes == pytest.approx(planner.spec.matmul_weight_bytes, rel=0.01)


def test_a_plan_has_every_matmul_and_says_how_often() -> None:
    profile, request = DeviceProfile.load("snapdragon-8-gen-3"), PlanRequest(seq_lens=(64, 256))
    plan = make_plan(mixed(), profile, request)
    assert plan.counts == dict.fromkeys(("qkv", "o", "gate_up", "down"), 5) | dict.fromkeys(
        ("qkv.2", "o.2", "gate_up.2", "down.2"), 3
    )
    assert {op.op.partition(".")[0] for op in plan.ops} <= {
        "qkv", "o", "gate_up", "down", "lm_head", "q", "k", "v", "gate", "up",
    }  # fmt: skip
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    assert sentences(plan)
    uniform = make_plan(model_spec("qwen2.5-0.5b"), profile, request)
    assert uniform.counts == {}
    assert "counts" not in json.loads(uniform.model_dump_json())


def test_lengths_never_seen_are_planned_within_what_is_prepared() -> None:
    profile = DeviceProfile.load("snapdragon-8-gen-3")
    solver = prepare_solver(mixed(), profile, PlanRequest(seq_lens=(64, 300)))
    plan = solver.plan_for(200)
    assert {op.op for op in plan.ops if op.m == 200} == {
        x.name for x in mixed().matmuls if x.name != "lm_head"
    }
    for flight in solver.plan.in_flight:
        assert len(flight.ops) == 8


@pytest.mark.parametrize(
    ("profile", "model", "plan_id"),
    [
        ("host", "llama-3.2-1b", "537566e6704e"),
        ("host-avx2", "gemma-2-2b", "41e1d480c2c9"),
        ("snapdragon-8-gen-3", "phi-2", "263f004e4e0d"),
        ("snapdragon-8-gen-3-strong-npu", "qwen2.5-0.5b", "d7a8da028749"),
    ],
)
def test_plans_of_models_of_one_kind_are_what_they_were(
    profile: str, model: str, plan_id: str
) -> None:
    """Their placements, as they were before layers had kinds."""
    request = PlanRequest(seq_lens=(64, 256))
    assert make_plan(model_spec(model), DeviceProfile.load(profile), request).plan_id == plan_id
