"""Plans of every known model on every shipped profile, and of blocks of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.backends.ops import Add, Experts, MatMul, Router
from hetero.models import model_spec
from hetero.models.random_models import KNOWN_MODELS
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import Node
from hetero.profiler.non_matmul_ops import BLOCKS, graph_ops, reference_ops
from hetero.profiler.predict import op_name
from hetero.profiler.profile_files import shipped_names
from hetero.profiler.records import DeviceProfile
from hetero.profiler.substitutes import SUBSTITUTES
from hetero.solver.build import make_plan
from hetero.solver.copies import WORTH
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.options import Objective
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.report.drawings import block_bars
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.strategy_plans import strategy_plan
from hetero.solver.weight_memory import Limits
from tests.profiler.fakes import without_ops
from tests.solver.instances import solve_limited
from tests.support.helpers import Command

PROFILES = shipped_names()
LENGTHS = (64, 135, 256, 1024)
# Seconds of prompts of these lengths and of a decoding step, as they were before blocks were
# graphs: what is derived from nodes is what was written down for a Llama's block. Of the simulated
# chip since it has the formats of the backends, of PCs since measured times are used.
SECONDS = {
    ("host", "llama-3.2-1b"): (0.2187699, 0.4535393, 0.8251192, 3.451864, 0.01772206),
    ("host", "gemma-2-2b"): (0.4543484, 0.9171693, 1.701943, 7.02855, 0.03944881),
    ("host-avx2", "qwen2.5-0.5b"): (0.4241107, 0.8464273, 1.54494, 6.555678, 0.02371816),
    ("snapdragon-8-gen-3", "llama-3.2-1b"): (
        0.05821417, 0.08289308, 0.1326974, 0.5481528, 0.01462429,
    ),
    ("snapdragon-8-gen-3-strong-npu", "mistral-7b"): (
        0.1929769, 0.3995825, 0.7319324, 2.885044, 0.0788945,
    ),
}  # fmt: skip


def plan_of(model: str, profile: str, *lengths: int) -> ExecutionPlan:
    request = PlanRequest(seq_lens=lengths)
    return make_plan(model_spec(model), DeviceProfile.load(profile), request)


def without_shared_heads(found: DeviceProfile) -> DeviceProfile:
    """The profile of devices that compute all heads of an attention or none."""
    devices = {
        kind: x.model_copy(
            update={"capabilities": x.capabilities.model_copy(update={"attention_heads": False})}
        )
        for kind, x in found.devices.items()
    }
    return found.model_copy(update={"devices": devices})


@pytest.mark.few(4)
@pytest.mark.sampled(12)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_known_model_is_planned_on_every_shipped_profile(name: str, profile: str) -> None:
    plan = plan_of(name, profile, 64, 256)
    assert [total.m for total in plan.totals] == [64, 256, 1]
    known = {p.op for p in DeviceProfile.load(profile).other_predictors}
    lacking = {op_name(op) for op in model_spec(name).others} - known
    said = {note.partition(" was not measured: predicted from ")[0] for note in plan.notes}
    assert said >= lacking
    assert bool(lacking) == any("was not measured" in note for note in plan.notes)


@pytest.mark.full
@pytest.mark.parametrize("known", SECONDS)
def test_blocks_of_a_llama_cost_what_they_did(known: tuple[str, str]) -> None:
    name, request = known[1], PlanRequest(seq_lens=LENGTHS)
    profile = without_shared_heads(DeviceProfile.load(known[0]))
    totals = make_plan(model_spec(name), profile, request).totals
    assert [total.predicted_s for total in totals] == pytest.approx(SECONDS[known], rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3-4b", "llama-3.2-1b", "llama-3-8b"])
@pytest.mark.parametrize("profile", [x for x in PROFILES if not x.startswith("host")])
def test_a_cut_that_one_step_wants_makes_no_other_lose_to_one_device(
    profile: str, name: str
) -> None:
    """A call of a fitted chip's NPU takes as long as a small matmul: cuts are not free.

    A plan that bounds the weights held twice may lose what more copies would gain.
    """
    plan = plan_of(name, profile, 64, 256, 512, 1024)
    bounded = any("more copies would gain" in note for note in plan.notes)
    most = 1 + (WORTH if bounded else PlanRequest().margin)
    assert all(total.predicted_s <= most * total.best_single_device_s for total in plan.totals)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_profiles_have_what_graphs_need(name: str) -> None:
    """Of the reference sizes every kind, and of a model its own; what is lacking has a stand-in."""
    graph = model_spec(name)
    priced_as_matmuls = Router, Experts
    wanted = {op_name(op) for op in graph.others if not isinstance(op, priced_as_matmuls)}
    measured = {op_name(op) for op in reference_ops(BLOCKS[0], graph.weight_format)}
    assert measured >= wanted
    assert {op_name(op) for op in graph_ops(graph)} == wanted
    assert wanted <= {"Embed", "RMSNorm", "RMSNorm+add", "Rope", "Attention", "GatedAct"} | set(
        SUBSTITUTES
    )


@pytest.mark.parametrize("m", [1, 256])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-2-2b", "phi-2", "opt-1.3b"])
def test_a_path_has_the_nodes_of_a_layer_and_no_others(name: str, m: int) -> None:
    """Between the matmuls each device is as long at work as the nodes that are launched there."""
    graph = model_spec(name)
    planner = Planner(graph, DeviceProfile.load("host"))
    scenario = Scenario("decode" if m == 1 else "prefill", m)
    solution = planner.single(scenario, "gpu")
    assert solution is not None
    context = planner.settings.context if m == 1 else 0
    nodes = [x for x in graph.nodes if x.plan_op is None]
    wanted = sum(float(planner.cost.other_s("gpu", x.op, m, context).seconds) for x in nodes)
    chain = solution.path
    matmuls = {id(option) for option in solution.options.values()}
    others = [option.gpu_s for option in chain.block if id(option) not in matmuls]
    head = sum(option.gpu_s for option in chain.head)
    assert head + graph.layers * sum(others) == pytest.approx(wanted, rel=1e-9)
    assert len(chain.block) == 4 + len(solution.non_matmul.after)


@pytest.mark.full
def test_a_parallel_block_has_nothing_between_o_and_gate_up() -> None:
    planner = Planner(model_spec("phi-2"), DeviceProfile.load("host"))
    solution = planner.solve(Scenario("prefill", 256))
    assert list(solution.non_matmul.after) == ["qkv", "gate_up", "down"]
    after = {stage.name: [op_name(x.op) for x in stage.after] for stage in planner.spec.block}
    assert after["o"] == []
    assert after["down"] == ["Add", "LayerNorm+add"]
    serial = Planner(model_spec("llama-3.2-1b"), DeviceProfile.load("host"))
    assert list(serial.solve(Scenario("prefill", 256)).non_matmul.after) == [
        "qkv", "o", "gate_up", "down",
    ]  # fmt: skip


@pytest.mark.full
def test_a_matmul_that_is_not_cut_is_priced_where_it_runs() -> None:
    """A second contribution to o's outputs, over other columns: two more nodes behind it."""
    graph, profile = model_spec("llama-3.2-1b"), DeviceProfile.load("host")
    shadow = MatMul(n=2048, k=2048, weight_format=graph.weight_format)
    nodes: list[Node] = []
    for node in graph.nodes:
        last = node.name.rpartition(".")[2] == "post_norm"
        if last:
            ports = {"x": "t", "residual": "shadow", "y": "sum"}
            name = f"layer{node.layer}.shadow"
            slots = {"x": "attended", "y": "shadow"}
            nodes.append(Node(name=name, op=shadow, slots=slots, layer=node.layer))
            nodes.append(Node(name=f"{name}_add", op=Add(d=2048), slots=ports, layer=node.layer))
        nodes.append(replace(node, slots=node.slots | ({"residual": "sum"} if last else {})))
    longer = graph.model_copy(update={"nodes": tuple(nodes)})
    scenario = Scenario("prefill", 256)
    without, with_it = (Planner(x, profile).single(scenario, "gpu") for x in (graph, longer))
    assert without is not None
    assert with_it is not None
    cost = CostModel(profile)
    more_s = float(cost.matmul_s("gpu", graph.weight_format, 256, 2048, 2048).seconds)
    more_s += float(cost.other_s("gpu", Add(d=2048), 256).seconds)
    assert with_it.seconds - without.seconds == pytest.approx(16 * more_s)
    plan = make_plan(longer, profile, PlanRequest(seq_lens=(256,)))
    assert plan.totals[0].non_matmul_s.keys() == {"head", "attention", "o", "activation", "norm"}


def test_a_report_draws_a_parallel_block_as_it_runs() -> None:
    def drawn(name: str) -> list[str]:
        plan = plan_of(name, "snapdragon-8-gen-3", 256)
        return [bar.name for bar in block_bars(plan, plan.totals[0]) if bar.rest]

    assert drawn("llama-3.2-1b") == ["attention", "norm", "activation", "norm"]
    assert drawn("phi-2") == ["attention", "activation", "after down"]


@pytest.mark.parametrize("name", ["phi-2", "opt-1.3b", "llama-3.2-1b"])
def test_a_memory_limit_walks_the_same_stages(name: str) -> None:
    """The integer program's chain, where nothing limits it, is that of the dynamic one."""
    profile, settings = DeviceProfile.load("snapdragon-8-gen-3"), PlannerSettings(unfused=False)
    planner = Planner(model_spec(name), profile, settings)
    scenario, objective = Scenario("prefill", 256), Objective()
    best = planner.solve(scenario, objective)
    assert any(option.is_cut for option in best.options.values())
    used = planner.with_rows({x: (o.rows,) if o.rows else () for x, o in best.options.items()})
    (solution,) = solve_limited(used, [scenario], Limits())
    assert solution.path.cost == pytest.approx(used.solve(scenario, objective).path.cost)


@pytest.mark.full
def test_the_command_line_says_what_was_not_measured(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    path.write_text(without_ops(DeviceProfile.load("host"), "LayerNorm").to_json())
    done: Any = command("plan", "opt-1.3b", "--profile", str(path), "--seq-lens", "64")
    assert done.returncode == 0, done.stderr
    text = " ".join((done.stdout + done.stderr).split())
    assert "LayerNorm was not measured: predicted from RMSNorm by its bytes" in text


def test_integers_of_the_simulated_chip_are_those_of_the_paper() -> None:
    """mllm-NPU, section 3.4: the NPU works for 315 ms on 256 tokens of Qwen1.5-1.8B."""
    graph = model_spec("qwen1.5-1.8b").with_weight_format("w8a8")
    cost = CostModel(DeviceProfile.load("snapdragon-8-gen-3"))
    block = [x for x in graph.matmuls if x.name != "lm_head"]
    npu_s = sum(float(cost.matmul_s("npu", "w8a8", 256, x.n, x.k).seconds) for x in block)
    assert graph.layers * npu_s == pytest.approx(0.315, rel=1e-3)
    plan = strategy_plan(graph, cost.profile, "auto", [256])
    assert plan.devices() == {"gpu", "npu"}


def test_routed_experts_cost_the_matmuls_of_those_that_tokens_choose() -> None:
    """One token reads 8 of 128 experts, 64 tokens nearly all; the plan has all in its memory."""
    name, profile = "qwen3-30b-a3b", "snapdragon-8-gen-3"
    plan, graph = plan_of(name, profile, 64), model_spec(name)
    assert graph.expert_weight_bytes == pytest.approx(48 * 128 * 3 * 2048 * 768 * 0.5625)
    assert plan.memory is not None
    assert plan.memory.gpu_bytes > graph.expert_weight_bytes
    op = next(x for x in graph.others if isinstance(x, Experts))
    assert op.distinct(1) == pytest.approx(8)
    assert 120 < op.distinct(64) < 128
    cost = CostModel(DeviceProfile.load(profile))
    one = sum(
        float(cost.matmul_s("gpu", op.weight_format, 1, 8 * x.n, x.k).seconds)
        for x in op.matmuls.values()
    )
    assert float(cost.other_s("gpu", op, 1).seconds) == pytest.approx(one)
