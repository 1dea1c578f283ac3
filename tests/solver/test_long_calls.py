"""Prompts that are longer than a graph of the NPU, on chips whose NPU does nearly everything."""

from __future__ import annotations

import pytest

import hetero


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3-4b", "qwen2.5-0.5b"])
@pytest.mark.parametrize("profile", ["snapdragon-x2-elite", "ventuno-q", "snapdragon-8-elite"])
def test_a_plan_does_not_lose_to_the_npu_alone(profile: str, model: str) -> None:
    """Calls of two graphs need the GPU between the matmuls, which costs more than it gains here."""
    plan = hetero.plan(model, profile, seq_lens=(512, 4096), curves=False)
    assert plan.step_tokens == plan.graph_sizes[-1]
    prompts = [total for total in plan.totals if total.phase == "prefill"]
    assert all(x.predicted_s <= x.single_devices["npu"] * (1 + 1e-9) for x in prompts)


@pytest.mark.full
def test_where_both_devices_gain_calls_stay_long() -> None:
    plan = hetero.plan("qwen3-4b", "snapdragon-8-gen-3", seq_lens=(512, 4096), curves=False)
    assert plan.step_tokens == 2 * plan.graph_sizes[-1]
