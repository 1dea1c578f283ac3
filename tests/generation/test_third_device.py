"""A CPU as third device of a model that is opened: plans, tokens, memory and errors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetero
from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning, UserError
from hetero.models import open_model
from hetero.placement import device_set
from hetero.placement.choice import Choice
from hetero.placement.choosing import plan_on
from hetero.solver.execution_plan import ExecutionPlan
from tests.runtime.plans import ROWS, plan_for_three

PROMPT = "Once upon a time"
PLAYED = {"gpu": "reference", "npu": "reference"}
ANSWER: dict[str, Any] = {"max_tokens": 12}


def plan_of(weights: str, *, third: bool = True) -> ExecutionPlan:
    return plan_for_three(open_model("demo", weights=weights).spec(), third=third)


def answered(plan: ExecutionPlan, **options: Any) -> tuple[list[int], hetero.LLM]:
    with hetero.LLM("demo", plan=plan, kv="f32", **{**PLAYED, **options}) as llm:
        return list(llm.generate(PROMPT, **ANSWER).tokens), llm


@pytest.mark.parametrize("cpu", ["auto", pytest.param("reference", marks=pytest.mark.full)])
def test_three_devices_answer_what_two_do(cpu: str) -> None:
    two, _ = answered(plan_of("f32", third=False), weights="f32")
    with hetero.LLM("demo", plan=plan_of("f32"), weights="f32", kv="f32", cpu=cpu, **PLAYED) as llm:
        result = llm.generate(PROMPT, **ANSWER)
        assert list(result.tokens) == two
        assert set(llm.devices.devices) == {"gpu", "npu", "cpu"}
        assert llm.devices.name("cpu") == ("ort-cpu" if cpu == "auto" else cpu)
        assert result.stats.placement["cpu"].busy_s > 0
        assert [x.document()["devices"] for x in llm.phases] == [["gpu", "npu", "cpu"]] * 2
        assert str(llm.phases[1]) == "answer: tensor level with the cpu"
        assert llm.choice.third is not None
        needed = llm.engine.placement.kernels.weight_bytes
        rows = sum(
            4 * ROWS * node.op.k  # in f32, as ONNX Runtime packs it
            for node in llm.engine.placement.graph.nodes
            if node.plan_op is not None and "cpu" in llm.engine.placement.devices(node)
        )
        assert needed["cpu"] == rows
        assert llm.engine.memory.weight_bytes == sum(needed.values())


@pytest.mark.full
def test_a_third_device_counts_in_the_memory_budget() -> None:
    """ONNX Runtime's packs of 8-bit weights are larger than the weights as they are stored."""
    options: dict[str, Any] = {"weights": "w8a16", "kv": "f32", **PLAYED}
    three, two = (plan_of("w8a16", third=third) for third in (True, False))
    with hetero.LLM("demo", plan=two, **options) as llm:
        least = llm.engine.memory.total_bytes
    with hetero.LLM("demo", plan=three, **options) as llm:
        most, kernels = llm.engine.memory.total_bytes, llm.engine.placement.kernels
        assert most - least == sum(kernels.weight_bytes.values()) - kernels.stored_bytes > 0
    budget = (least + most) // 2
    hetero.LLM("demo", plan=two, memory_budget=budget, **options).close()
    with pytest.raises(UserError, match="the memory budget is"):
        hetero.LLM("demo", plan=three, memory_budget=budget, **options)


def test_a_plan_for_three_without_a_third_device_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="which --cpu none leaves out"):
        hetero.LLM("demo", plan=plan_of("w4a16"), cpu="none", **PLAYED)
    with pytest.raises(UserError, match="opencl is not a cpu backend: choose ort-cpu"):
        hetero.LLM("demo", plan=plan_of("w4a16"), cpu="opencl", **PLAYED)
    with pytest.raises(UserError, match="runs on hetero, not on npu"):
        hetero.LLM("demo", plan=plan_of("w4a16"), device="npu", **PLAYED)
    without_cpu(monkeypatch)
    with (
        pytest.warns(FallbackWarning, match="without the cpu because"),
        pytest.raises(UserError, match="on a CPU besides both devices, and ort-cpu is not open"),
    ):
        hetero.LLM("demo", plan=plan_of("w4a16"), **PLAYED)


def without_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU can be opened as third device from here on."""

    def missing(name: str, **options: Any) -> Any:
        if options.get("kind") == "cpu":
            raise DeviceUnavailableError(name, "opening", "it is missing", "none: a test")
        return open_device(name, **options)

    monkeypatch.setattr(device_set, "open_device", missing)


def test_what_was_planned_for_three_falls_back_to_the_plan_for_two() -> None:
    spec = open_model("demo").spec()
    two, three = plan_for_three(spec, third=False), plan_for_three(spec)
    choice = Choice("hetero", two, third=three, cpu="ort-cpu")
    gpu, npu, cpu = (open_device("reference", kind=kind) for kind in ("gpu", "npu", "cpu"))
    with gpu, npu, cpu:
        both = plan_on(choice, spec, {"gpu": gpu, "npu": npu})
        assert both.devices() == {"gpu", "npu"}
        assert "cpu" in plan_on(choice, spec, {"gpu": gpu, "npu": npu, "cpu": cpu}).devices()


@pytest.mark.full
def test_a_model_on_the_emulated_hexagon_opencl_and_the_cpu(tmp_path: Path) -> None:
    """As on a Snapdragon: `qnn`, `opencl` and `ort-cpu`, by a plan in a file."""
    if importlib.util.find_spec("onnxruntime_qnn") is None:
        pytest.skip("needs the package onnxruntime-qnn")
    logits = {}
    for third in (False, True):
        path = tmp_path / f"{third}.json"
        path.write_text(json.dumps(plan_of("w4a16", third=third).model_dump(mode="json")))
        with hetero.LLM("demo", npu="qnn", plan=path, kv="f32", max_seq_len=64) as llm:
            assert set(llm.devices.devices) == ({"gpu", "npu", "cpu"} if third else {"gpu", "npu"})
            tokens = llm.encode(PROMPT)
            logits[third] = llm.engine.prefill(llm.context, tokens).copy()
            busy = llm.context.work.devices
            assert set(busy) == set(llm.devices.devices)
    # The rows that the CPU has were computed in fp16 by the Hexagon or the GPU.
    np.testing.assert_allclose(logits[True], logits[False], rtol=0.02, atol=0.05)
    assert logits[True].argmax() == logits[False].argmax()
