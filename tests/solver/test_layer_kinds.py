"""Models whose layers are of several kinds: their graph, what they cost, their plans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from hetero.backends.ops import GatedAct, MatMul
from hetero.models import model_spec
from hetero.models.config import ModelConfig
from hetero.models.graph import model_graph
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.layer_dp import walk
from hetero.solver.options import Objective
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.prepared import prepare_solver
from hetero.solver.report.conclusion import sentences
from hetero.solver.report.markdown import to_markdown
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.weight_memory import Limits, weight_memory
from tests.solver.instances import solve_limited

WIDE = (1, 4, 5)  # layers of the second kind
SHARED = {  # the last two of four layers read the caches of the first two
    "model_type": "gemma4_text", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip


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


@pytest.mark.full
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
    assert solution.path.cost >= steps * (1 - 1e-12)  # the same additions in another order


def test_a_memory_limit_walks_the_same_stages() -> None:
    profile, settings = DeviceProfile.load("snapdragon-8-gen-3"), PlannerSettings(unfused=False)
    planner = Planner(mixed(), profile, settings)
    scenario, objective = Scenario("prefill", 256), Objective()
    best = planner.solve(scenario, objective)
    assert any(option.is_cut for option in best.options.values())
    used = planner.with_rows({x: (o.rows,) if o.rows else () for x, o in best.options.items()})
    (solution,) = solve_limited(used, [scenario], Limits())
    assert solution.path.cost == pytest.approx(used.solve(scenario, objective).path.cost)


@pytest.mark.full
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


@pytest.mark.full
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
        ("host", "llama-3.2-1b", "44ac71835512"),
        ("host-avx2", "gemma-2-2b", "dfb4386ec3cc"),
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


def shared() -> ModelGraph:
    return model_graph(ModelConfig.from_dict(SHARED), "w4a16", "shared")


@pytest.mark.parametrize(
    ("name", "layers", "of_prompts"),
    [("gemma-4-e2b", 35, 15), ("gemma-4-e4b", 42, 24), ("gemma-4-12b", 48, 48), ("phi-2", 32, 32)],
)
def test_prompts_pass_through_the_layers_that_later_tokens_read(
    name: str, layers: int, of_prompts: int
) -> None:
    graph = model_spec(name)
    assert (graph.layers, graph.prompt_layers) == (layers, of_prompts)
    sampled = {x.layer for x in graph.nodes if x.name in graph.sampled_nodes}
    assert sampled == {*range(of_prompts, layers), None}
    assert graph.sampled_in("decode") == {"lm_head"}
    if layers == of_prompts:
        assert graph.sampled_nodes == graph.sampled == {"lm_head"}


def test_a_kind_with_a_layer_that_prompts_pass_through_is_not_sampled() -> None:
    """A plan says one thing of all layers of a kind."""
    alike = SHARED | {"layer_types": ["full_attention"] * 4, "use_double_wide_mlp": False}
    config = replace(ModelConfig.from_dict(alike), kv_source=(0, 0, 2, 2))
    graph = model_graph(config, "w4a16")
    assert graph.counts["q_only"] == 2
    assert graph.sampled_nodes == {"lm_head"}
    assert graph.prompt_layers == 4
    wider = config.layer_sizes[3]._replace(intermediate_size=1024)
    config = replace(config, layer_sizes=(*config.layer_sizes[:3], wider))
    assert model_graph(config, "w4a16").prompt_layers == 3


@pytest.mark.parametrize("m", [1, 256])
def test_a_prompt_costs_its_sampled_rows(m: int) -> None:
    graph = shared()
    planner = Planner(graph, DeviceProfile.load("host"))
    scenario = Scenario("decode" if m == 1 else "prefill", m, 64)
    solution = planner.single(scenario, "gpu")
    assert solution is not None
    wanted = {True: 0.0, False: 0.0}
    for node in graph.nodes:
        sampled = node.name in graph.sampled_nodes
        rows = 1 if sampled else m
        if node.plan_op is None:
            after = 64 + m - rows
            seconds = float(planner.cost.other_s("gpu", node.op, rows, after).seconds)
        else:
            assert isinstance(node.op, MatMul)
            own = planner.cost.matmul_s("gpu", graph.weight_format, rows, node.op.n, node.op.k)
            seconds = float(own.seconds)
        wanted[sampled] += seconds
    steps = sum(count * option.elapsed_s for option, _, count in walk(solution.path).steps)
    assert steps == pytest.approx(sum(wanted.values()), rel=1e-9)
    if m == 1:
        return
    first = solution.without_head()
    assert set(first.options) == {x.name for x in graph.matmuls} - graph.sampled
    steps = sum(count * option.elapsed_s for option, _, count in walk(first.path).steps)
    norm = float(planner.cost.other_s("gpu", graph.nodes[0].op, 1).seconds)
    assert wanted[False] <= steps <= wanted[False] + 4 * norm  # of the next layer, not sampled


@pytest.mark.full
@pytest.mark.parametrize("profile", ["host", "snapdragon-8-gen-3"])
def test_plans_say_which_layers_prompts_pass_through(profile: str) -> None:
    graph, request = shared(), PlanRequest(seq_lens=(64, 600))
    plan = make_plan(graph, DeviceProfile.load(profile), request)
    assert (plan.layers, plan.prompt_layers) == (4, 2)
    document = json.loads(plan.model_dump_json())
    assert document["prompt_layers"] == 2
    assert ExecutionPlan.parse(json.dumps(document), "plan.json") == plan
    once = {x.op for x in plan.ops if x.phase == "prefill" and x.m is None}
    assert {"q_only", "down.3", "lm_head"} <= once
    assert not {"qkv", "down", "qkv.2"} & once
    assert {x.m for x in plan.ops if x.phase == "decode" and x.op == "q_only"} == {1}
    assert "2 of 4 layers (all 4 for the last token" in to_markdown(plan)
    assert len(sentences(plan)) >= 3
    solver = prepare_solver(graph, DeviceProfile.load(profile), request)
    for m in (1, 40, 512):
        ops = {x.op for x in solver.plan_for(m).ops if x.phase == "prefill"}
        assert ops == {x.name for x in graph.matmuls}
    slower = solver.drifted({("gpu", "decode"): 2.0, ("gpu", "prefill"): 2.0})
    assert {x.op for x in slower.plan.ops} == {x.name for x in graph.matmuls}


def test_plans_of_models_whose_layers_all_see_prompts_say_nothing_of_it() -> None:
    plan = make_plan(model_spec("phi-2"), DeviceProfile.load("host"), PlanRequest(seq_lens=(64,)))
    assert "prompt_layers" not in plan.model_dump_json()
