"""No cut for a gain that is within what the NPU's times may be off by."""

from __future__ import annotations

import pytest

from hetero.models import model_spec
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan, numbers_of
from hetero.solver.chooser import Rules
from hetero.solver.drift import DriftedCost
from hetero.solver.planner import Planner, PlannerSettings
from hetero.solver.report.markdown import to_markdown
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario

DECODE = Scenario("decode", 1)
PROMPT = Scenario("prefill", 200)


def uncertain(spread: float) -> DeviceProfile:
    """A PC whose NPU's trees say that their leaves spread so much; nothing was measured."""
    host = DeviceProfile.load("host")
    predictors = tuple(
        p.model_copy(
            update={
                "trees": tuple(
                    tree.model_copy(
                        update={
                            "spread": (spread,) * len(tree.value), "value": (0.0,) * len(tree.value)
                        }
                    )
                    for tree in p.trees
                )
            }
        )
        for p in host.predictors
    )  # fmt: skip
    return host.model_copy(update={"predictors": predictors, "matmuls": ()})


def cuts(spread: float, scenario: Scenario, margin: float = 0.03) -> int:
    settings = PlannerSettings(rules=Rules(margin=margin))
    planner = Planner(model_spec("qwen2.5-0.5b"), uncertain(spread), settings)
    return sum(option.is_cut for option in planner.solve(scenario).options.values())


@pytest.mark.full
@pytest.mark.parametrize("scenario", [DECODE, PROMPT])
def test_a_gain_within_the_spread_is_no_reason_to_cut(scenario: Scenario) -> None:
    counts = [cuts(spread, scenario) for spread in (0.0, 0.1, 0.3, 0.9)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    assert counts[-1] == 0
    assert cuts(0.9, scenario, margin=0.0) > 0  # who wants any gain


def test_the_report_says_what_was_too_uncertain() -> None:
    plan = make_plan(model_spec("qwen2.5-0.5b"), uncertain(0.6), PlanRequest(seq_lens=(200,)))
    reasons = {candidate.reason for op in plan.ops for candidate in op.candidates}
    assert "gains less than the 60 % that its NPU time may be off" in reasons


def test_what_was_measured_is_certain_and_its_neighbours_more_than_others() -> None:
    rows = DeviceProfile.load("host").matmuls
    cost = CostModel(uncertain(0.2).model_copy(update={"matmuls": rows}))
    spec = model_spec("qwen2.5-0.5b")
    kernels = Planner(spec, cost.profile, cost=cost).kernels
    fractions = kernels.uncertainty("npu", [256], [2048, 2304, 4096, 8192], 2048)[0]
    assert fractions[0] == fractions[3] == 0.0
    assert 0.0 < fractions[1] < fractions[2] < 0.2
    assert kernels.uncertainty("npu", [256], [2048], 2304)[0, 0] == pytest.approx(0.2)
    assert kernels.uncertainty("gpu", [256], [2304], 2048)[0, 0] == 0.0
    drifted = DriftedCost(cost, {("npu", "prefill"): 2.0})
    size = kernels.table("npu", [256], [2304], 2048).seconds
    slower = Planner(spec, cost.profile, cost=drifted).kernels
    assert slower.table("npu", [256], [2304], 2048).seconds == pytest.approx(2 * size)
    assert slower.uncertainty("npu", [256], [2304], 2048)[0, 0] == pytest.approx(fractions[1])


@pytest.mark.parametrize("numbers", ["emulated", "simulated", "measured"])
def test_a_plan_says_what_its_times_are(numbers: str) -> None:
    host = DeviceProfile.load("host")
    npu = host.devices["npu"].model_copy(update={"numbers": numbers})
    profile = host.model_copy(update={"devices": {**host.devices, "npu": npu}})
    assert profile.numbers == numbers
    assert numbers_of(profile) == ("predicted" if numbers == "measured" else numbers)
    plan = make_plan(model_spec("demo"), profile, PlanRequest(seq_lens=(64,)))
    assert plan.numbers == numbers_of(profile)
    assert f"numbers are {plan.numbers}." in to_markdown(plan)
