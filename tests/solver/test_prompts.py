"""Prompts of any length: their calls, in plans of every kind, and what they take in all."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from bench.lab.repredict import repredict
from hetero.backends.ops import Attention
from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.baselines import longest_step
from hetero.solver.build import make_plan
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.names import NamedStrategy
from hetero.solver.plan import check_cover
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.prepared import prepare_solver
from hetero.solver.prompts import call_scenarios, prompt_alone, solve_prompt
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.strategy_plans import strategy_plan

LONG = 3500


@pytest.fixture(scope="module", params=["host", "snapdragon-8-gen-3"])
def profile(request: pytest.FixtureRequest) -> DeviceProfile:
    return DeviceProfile.load(request.param)


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3.2-1b")


def test_each_call_is_behind_the_tokens_of_those_before_it() -> None:
    assert call_scenarios((512, 512, 76)) == [
        Scenario("prefill", 512, 0), Scenario("prefill", 512, 512), Scenario("prefill", 76, 1024)
    ]  # fmt: skip
    assert call_scenarios((8,), context=100) == [Scenario("prefill", 8, 100)]


def test_a_prompt_takes_its_calls_and_one_output_head(
    spec: ModelGraph, profile: DeviceProfile
) -> None:
    planner = Planner(spec, profile)
    prompt = solve_prompt((512, 512, 76), planner.solve)
    calls = [planner.solve(scenario) for scenario in call_scenarios(prompt.steps)]
    heads = [call.seconds - call.without_head().seconds for call in calls]
    assert all(head > 0 for head in heads)
    assert prompt.seconds == pytest.approx(sum(c.seconds for c in calls) - sum(heads[:-1]))
    assert [call.options.get("lm_head") is None for call in prompt.calls] == [True, True, False]
    if profile.power is not None:
        assert prompt.joules == pytest.approx(sum(c.joules or 0.0 for c in prompt.calls))


def test_later_calls_cost_what_the_profile_says_of_attention(
    spec: ModelGraph, profile: DeviceProfile
) -> None:
    """All else of equal calls is equal, so they differ by their layers' attention."""
    planner = Planner(spec, profile)
    prompt = prompt_alone(planner, (512,) * 4, "gpu")
    assert prompt is not None
    op = next(op for op in spec.others if isinstance(op, Attention))
    for i, call in enumerate(prompt.calls[:-1]):
        more = (
            planner.cost.other_s("gpu", op, 512, 512 * i).seconds
            - planner.cost.other_s("gpu", op, 512, 0).seconds
        )
        before = prompt.calls[0].seconds
        assert call.seconds - before == pytest.approx(spec.layers * float(more), rel=1e-6, abs=1e-9)
    assert prompt.calls[2].seconds > prompt.calls[1].seconds > prompt.calls[0].seconds


@pytest.mark.full
@pytest.mark.parametrize("step_tokens", [None, 512])
def test_a_plan_answers_for_prompts_longer_than_a_call(
    spec: ModelGraph, profile: DeviceProfile, step_tokens: int | None
) -> None:
    request = PlanRequest(seq_lens=(LONG, 300), step_tokens=step_tokens, explain=False)
    plan = make_plan(spec, profile, request)
    expected = (2048, 1452) if step_tokens is None else (512,) * 6 + (428,)
    assert {(t.phase, t.m): t.steps for t in plan.totals} == {
        ("prefill", 300): (300,), ("prefill", LONG): expected, ("decode", 1): ()
    }  # fmt: skip
    assert plan.steps(LONG) == expected
    assert plan.step_tokens == max(expected)
    for m in expected:
        for matmul in spec.matmuls:
            check_cover(plan.partition("prefill", m, matmul.name), m=m, n=matmul.n, what="")
    total = next(t for t in plan.totals if t.m == LONG)
    first = next(t for t in plan.totals if t.m == 300)
    assert total.tokens_per_s == pytest.approx(LONG / total.predicted_s)
    assert total.tokens_per_s < 1.2 * first.tokens_per_s  # attention, of which there is more
    assert total.best_single_device_s == min(total.single_devices.values())
    assert total.predicted_s < total.best_single_device_s
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    told = repredict(plan, spec, profile)
    assert told[Scenario("prefill", LONG)] == pytest.approx(total.predicted_s, rel=1e-9)


@pytest.mark.parametrize("name", get_args(NamedStrategy))
def test_every_strategy_plans_a_long_prompt(
    spec: ModelGraph, profile: DeviceProfile, name: NamedStrategy
) -> None:
    plan = strategy_plan(spec, profile, name, (LONG,))
    (total, decode) = plan.totals
    assert (total.m, sum(total.steps), decode.phase) == (LONG, LONG, "decode")
    assert plan.steps(LONG) == total.steps
    assert set(total.steps) == set(plan.listed_tokens)
    longest = longest_step(Planner(spec, profile), name)
    assert plan.step_tokens == longest == max(total.steps)
    if name == "chunked":
        assert total.steps == (256,) * 13 + (172,)
    for m in total.steps:
        for matmul in spec.matmuls:
            check_cover(plan.partition("prefill", m, matmul.name), m=m, n=matmul.n, what=name)
    found = repredict(plan, spec, profile)[Scenario("prefill", LONG)]
    assert found == pytest.approx(total.predicted_s, rel=1e-9)


@pytest.mark.full
def test_graph_sizes_are_chosen_for_the_calls_of_long_prompts(spec: ModelGraph) -> None:
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    request = PlanRequest(seq_lens=(5000,), graph_sizes="auto", explain=False)
    plan = make_plan(spec, chip, request)
    assert plan.steps(5000) == (2048, 2048, 904)  # as what two graphs of the profile hold
    standard = make_plan(spec, chip, PlanRequest(seq_lens=(5000,), explain=False))
    assert plan.totals[0].predicted_s <= standard.totals[0].predicted_s


def test_calls_come_as_often_as_their_prompts() -> None:
    request = PlanRequest(seq_lens=(100, 1100), length_weights=(3.0, 1.0))
    found = request.in_calls(512)
    assert dict(zip(found.seq_lens, found.length_weights, strict=True)) == {
        76: 1.0, 100: 3.0, 512: 2.0
    }  # fmt: skip
    assert request.in_calls(None) is request.in_calls(2048) is request
    with pytest.raises(PlanError, match="a call has at least one token, got step_tokens=0"):
        PlanRequest(step_tokens=0).check()


@pytest.mark.parametrize("tokens", [1, 512, 513, 1000, LONG, 8192])
def test_a_prepared_solver_plans_every_call_of_any_prompt(
    spec: ModelGraph, profile: DeviceProfile, tokens: int
) -> None:
    solver = prepare_solver(spec, profile, PlanRequest(seq_lens=(64, 512), step_tokens=512))
    steps = solver.plan.steps(tokens)
    assert steps == (512,) * (tokens // 512) + ((tokens % 512,) if tokens % 512 else ())
    prompt = solver.prompt(tokens)
    assert prompt.steps == steps
    for m in set(steps):
        for op in solver.plan_for(m).ops:
            rows = op.m or 1
            check_cover(tuple(t.resolved(rows) for t in op.tiles), m=rows, n=op.n, what=op.op)


def test_other_operators_run_on_an_npu_in_one_graph(spec: ModelGraph) -> None:
    """So calls of more tokens than one holds have them on the GPU, and all calls of a plan too."""
    host = DeviceProfile.load("host")
    planner = Planner(spec, host)
    largest = planner.sizes[-1]
    assert planner.non_matmul_devices(largest) == ("gpu", "npu")
    assert planner.non_matmul_devices(largest + 1) == ("gpu",)
    assert planner.step_tokens == 2 * largest
    assert Planner(spec, host, PlannerSettings(step_tokens=512)).step_tokens == 512
    assert longest_step(planner, "npu-only") == largest
    alone = strategy_plan(spec, host, "npu-only", (64, 1800))
    assert alone.non_matmul.prefill == "npu"
    assert alone.steps(1800) == (1024, 776)
    no_gpu = tuple(p for p in host.other_predictors if p.device == "npu")
    blind = Planner(spec, host.model_copy(update={"other_predictors": no_gpu}))
    assert blind.step_tokens == largest
    with pytest.raises(PlanError, match="one call takes at most 1024 tokens"):
        blind.solve(Scenario("prefill", 1025))


NPU = (1, 8, 64, 256)


@pytest.mark.parametrize(
    ("made", "graphs", "step_tokens", "sizes", "steps"),
    [
        (single_device, {"gpu": ()}, 512, (), (512, 512, 176)),
        (single_device, {"npu": NPU}, 256, NPU, (256,) * 4 + (64, 64, 48)),
        (layer_level, {"gpu": (), "npu": NPU}, 256, NPU, (256,) * 4 + (64, 64, 48)),
        (layer_level, {"gpu": (), "npu": ()}, 512, (), (512, 512, 176)),
    ],
)
def test_calls_of_plans_by_rule_fit_the_devices_graphs(
    spec: ModelGraph, made: Any, graphs: Any, step_tokens: int, sizes: Any, steps: Any
) -> None:
    plan = made(spec, next(iter(graphs))) if made is single_device else made(spec)
    found = plan.for_graphs(graphs)
    assert (found.step_tokens, found.step_sizes) == (step_tokens, sizes)
    assert found.steps(1200) == steps
    assert found.steps(20, longest=16) == ((8, 8, 4) if sizes else (16, 4))
    assert found.plan_id == plan.plan_id
    assert found.for_graphs(graphs) is found


@pytest.mark.full
def test_a_document_is_for_the_lengths_that_it_lists(spec: ModelGraph) -> None:
    host = DeviceProfile.load("host")
    graphs: Any = {"gpu": (), "npu": (1, 64, 256, 1024)}
    plan = make_plan(spec, host, PlanRequest(seq_lens=(64, 256, LONG), explain=False))
    found = plan.for_graphs(graphs)
    assert found.steps(LONG) == plan.steps(LONG) == (2048, 1452)
    assert found.steps(300) == (256, 44)  # rather than a longer call, clipped
    short = plan.model_copy(update={"step_tokens": 512})
    assert short.steps(LONG)[0] <= 512  # what is named must fit
    prepared = prepare_solver(spec, host, PlanRequest(seq_lens=(64, 100), step_tokens=512)).plan
    assert prepared.for_graphs(graphs, solved=True).steps(300) == (300,)
    assert prepared.for_graphs(graphs).steps(300) == (100, 100, 100)  # without its solver
