"""Plans take on the simulated chip what the solver predicts, step after step of every kind."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from hetero.measuring.executed import LEARNED, execute, opened
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.baselines import latency_s
from hetero.solver.build import make_plan
from hetero.solver.chooser import Rules
from hetero.solver.joint_plan import edges_of_mixed
from hetero.solver.planner import Planner, PlannerSettings, for_two
from hetero.solver.request import DECODE, PlanRequest
from hetero.solver.solution import Scenario


@cache
def planner_of(model: str) -> Planner:
    return Planner(model_spec(model), DeviceProfile.load("snapdragon-8-gen-3"))


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3.2-1b", "internlm2-1.8b", "phi-2"])
@pytest.mark.parametrize("m", [0, 32, 300])
def test_the_best_plan_is_executed_in_the_time_that_is_predicted(model: str, m: int) -> None:
    planner, scenario = planner_of(model), Scenario("prefill", m) if m else DECODE
    executed = execute(planner, model, scenario)
    assert executed.seconds == pytest.approx(planner.solve(scenario).seconds, rel=0.05)


@pytest.mark.parametrize("model", ["qwen3-4b", "llama-3.2-1b"])
@pytest.mark.parametrize("m", [512, 900])
def test_a_prompt_over_three_devices_is_executed_in_the_time_that_is_predicted(
    model: str, m: int
) -> None:
    rules = Rules(third=True)
    chip, scenario = DeviceProfile.load("snapdragon-x2-elite"), Scenario("prefill", m)
    planner = Planner(model_spec(model), chip, PlannerSettings(rules=rules))
    three, two = planner.solve(scenario), for_two(planner).solve(scenario)
    assert three.devices == {"gpu", "npu", "cpu"}
    executed = execute(planner, model, scenario)
    assert executed.seconds == pytest.approx(three.seconds, rel=0.05)
    assert executed.seconds < two.seconds
    assert execute(for_two(planner), model, scenario).seconds > executed.seconds


STRATEGIES = ("gpu-only", "layer", "row-cut", "hybrid-cut", "sequence-cut", "multi-sequence-cut",
              "padding", "pipe", "online-prepare")  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_executed_in_the_time_that_is_predicted(strategy: Any) -> None:
    planner, scenario = planner_of("llama-3.2-1b"), Scenario("prefill", 135)
    executed = execute(planner, "llama-3.2-1b", scenario, strategy)
    wanted_s = latency_s(planner, scenario, strategy)
    assert executed.seconds == pytest.approx(wanted_s, rel=0.05)
    assert executed.joules is not None
    assert executed.joules > 0


def test_a_layer_level_plan_is_predicted_without_fast_synchronisation_too() -> None:
    """No matmul is cut, so each hand-over is a wait for the whole queue and a copy."""
    planner, scenario = planner_of("llama-3-8b"), Scenario("prefill", 64)
    fast, copied = (
        execute(planner, "llama-3-8b", scenario, "layer", sync) for sync in ("fast", "copy")
    )
    matmuls = 4 * planner.spec.layers
    # Each matmul of the NPU: the queue is finished, and its input and output are copied.
    more_s = matmuls * (3 * 400e-6 - 5e-6)
    assert copied.seconds - fast.seconds == pytest.approx(more_s, rel=0.02)


@pytest.mark.parametrize(
    "chip",
    ["snapdragon-x2-elite", pytest.param("snapdragon-x-elite", marks=pytest.mark.full)],
)
def test_a_plan_of_prompts_and_answers_decodes_in_the_time_that_is_predicted(
    chip: str,
) -> None:
    """Also where a prompt would cut gate and up, at whose cuts a decode step's kernels end, too."""
    model, profile = "qwen3-4b", DeviceProfile.load(chip)
    plan = make_plan(model_spec(model), profile, PlanRequest(seq_lens=(512,), third=True))
    (planned,) = [x.predicted_s for x in plan.totals if x.phase == "decode"]
    with opened(profile, model, plan, max_seq_len=1024) as (simulated, engine, context):
        engine.prefill(context, [1] * 256)
        for _ in range(LEARNED + 1):
            start_s = simulated.clock.now()
            engine.decode(context, 1)
            executed_s = simulated.clock.now() - start_s
            context.truncate(256)
    assert executed_s == pytest.approx(planned, rel=0.03)


def test_kernels_end_at_the_edges_of_a_fused_matmul_and_of_its_members() -> None:
    planner = Planner(model_spec("qwen3-4b"), DeviceProfile.load("snapdragon-x2-elite"))
    limited = planner.with_rows(dict.fromkeys(planner.names(), (4096,)))
    decoding = limited.single(DECODE, "npu")
    prompt = limited.solve(Scenario("prefill", 512))
    assert decoding is not None
    assert "gate_up" in decoding.options
    assert edges_of_mixed(planner, [decoding, decoding]) == {}
    gate, up = (
        decoding.options["gate_up"]._replace(rows=rows, cpu_rows=0) for rows in (4096, 8192)
    )
    options = {name: x for name, x in prompt.options.items() if name not in ("gate_up",)}
    apart = prompt._replace(options=options | {"gate": gate, "up": up})
    n, _ = planner.shape("gate")
    edges = edges_of_mixed(planner, [decoding, apart])
    assert edges["gate_up"] == (0, 4096, n, n + 8192, 2 * n)
    assert edges["up"] == (8192, n)
