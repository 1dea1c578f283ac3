"""Chains in an engine: the same logits, and a step call by call where a driver makes others."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyopencl")

from hetero import LLM
from hetero.backends.errors import KernelBuildError
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.placement.device_set import DeviceSet
from hetero.runtime.engine import Engine
from hetero.runtime.program import SUBMIT
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level, single_device
from tests.runtime.models import tiny_model
from tests.support.checkpoints import relative_error

PROMPT = [1, 2, 3, 5, 8]


@pytest.fixture(scope="module", autouse=True)
def has_chains() -> None:
    with open_device("opencl") as device:
        assert isinstance(device, OpenCLDevice)
        if device.tuning.lanes > 1:  # a processor's without AVX2, or a graphics card's
            pytest.skip(f"{device.tuning.family} has no chains")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def submissions(llm: LLM) -> int:
    return sum(action.code == SUBMIT for action in llm.engine.runner.last_step.program)


def logits(llm: LLM) -> tuple[list[bytes], int]:
    """Of steps that decode one token, several, and one again; submissions of the first."""
    engine, context = llm.engine, llm.context
    context.truncate(0)
    engine.prefill(context, PROMPT)
    found = [engine.decode(context, 7).tobytes()]
    made = submissions(llm)
    found.append(engine.verify(context, [9, 11, 13]).tobytes())
    return [*found, engine.decode(context, 4).tobytes()], made


@pytest.mark.full
@pytest.mark.parametrize("kv", ["f32", pytest.param("q8", marks=pytest.mark.full)])
def test_a_step_in_chains_has_the_logits_of_its_calls(folder: Path, kv: str) -> None:
    with LLM(str(folder), device="gpu", gpu="opencl", max_seq_len=64, kv=kv) as llm:
        fused, few = logits(llm)
        llm.engine.runner.start_trace()  # each call for itself
        plain, many = logits(llm)
        llm.engine.runner.stop_trace()
        assert fused == plain
        assert few < 3 < many
        assert logits(llm)[0] == plain


@pytest.mark.full
def test_a_driver_that_makes_other_values_of_a_chain_runs_call_by_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, answers = tiny_model(tmp_path), []
    with monkeypatch.context() as patch:
        patch.setattr(OpenCLDevice, "fuse", lambda _self, runs, **_: [x[0][0] for x in runs])
        for length in (61, 61, 64):  # it is not taken for known at the next start
            with pytest.warns(FallbackWarning, match="steps run call by call") as caught:
                llm = LLM(str(folder), device="gpu", gpu="opencl", max_seq_len=length)
            with llm:
                found, made = logits(llm)
            assert (len(caught), made > 3) == (1, True)
            answers.append(found)
    with LLM(str(folder), device="gpu", gpu="opencl", max_seq_len=64) as llm:
        wanted, made = logits(llm)
    assert answers == [wanted] * 3
    assert made < 3


@pytest.mark.full
def test_what_is_not_tried_again_is_the_same_to_the_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def prewarm(_self: DeviceSet, what: str) -> Any:
        asked.append(what)
        return nullcontext(False)

    monkeypatch.setattr(DeviceSet, "prewarm", prewarm)
    usual: dict[str, Any] = {"device": "gpu", "gpu": "reference", "max_seq_len": 64}
    every = [{}, {"weights": "w4a16"}, {"weights": "w4a8"}, {"whole_caches": True}, {"kv": "q8"}]
    for changes in [*every, {"max_seq_len": 63}]:
        for _ in range(2):
            LLM(str(folder), **usual | changes).close()
    assert asked[::2] == asked[1::2]
    assert asked[0] == asked[2] == asked[-1]  # of one format, and for any length of context
    assert len(set(asked)) == len(every) - 1


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_compiler_that_fails_on_a_chain_costs_no_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Which it has compiled the chain's kernels for: decoding goes on call by call."""

    def crash(*_: Any, **__: Any) -> None:
        raise KernelBuildError(
            "opencl", "building fused_launch.cl", "the driver's compiler crashed"
        )

    early = when == "at the start"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if early:
            monkeypatch.setattr(OpenCLDevice, "fuse", crash)
        with LLM(str(folder), device="gpu", gpu="opencl", max_seq_len=60 + early) as llm:
            monkeypatch.setattr(OpenCLDevice, "fuse", crash)
            for context in (llm.context, llm.new_context()):
                llm.engine.prefill(context, PROMPT)
                llm.engine.decode(context, 7)
                llm.engine.verify(context, [9, 11, 13])
            assert llm.devices.name("gpu") == "opencl"
            assert not llm.devices.fallback
    assert [x.category for x in caught] == [FallbackWarning]
    assert "steps run call by call" in str(caught[0].message)
    assert "compiler crashed" in str(caught[0].message)


@pytest.mark.full
def test_rows_of_several_contexts_in_a_chain(folder: Path) -> None:
    """Whose attention waits for no other row's."""
    with LLM(str(folder), device="gpu", gpu="opencl", max_seq_len=64) as llm:
        engine = llm.engine
        contexts = [engine.new_context() for _ in range(3)]

        def rows() -> list[bytes]:
            for i, context in enumerate(contexts):
                context.truncate(0)
                engine.prefill(context, PROMPT[: 2 + i])
            found = engine.decode_rows([(context, 7 + i) for i, context in enumerate(contexts)])
            return [x.tobytes() for x in found if x is not None]

        engine.runner.start_trace()
        plain, many = rows(), submissions(llm)
        engine.runner.stop_trace()
        engine.deployment.warm_rows(contexts)
        device = engine.devices["gpu"]
        assert isinstance(device, OpenCLDevice)
        prepared = len(device.programs._programs)
        fused, few = rows(), submissions(llm)
        assert len(device.programs._programs) == prepared, "no answer waits for a compiler"
        assert (fused, len(fused)) == (plain, 3)
        assert few < 3 < many


@pytest.mark.full
def test_a_context_with_a_text_keeps_it_when_the_other_device_fails(folder: Path) -> None:
    """Chains of the device that is left are tried where nothing of the text is."""
    loaded = open_model(str(folder), weights="f32")
    text = [*PROMPT, *PROMPT]

    def behind(plan: ExecutionPlan, **npu: Any) -> np.ndarray[Any, Any]:
        devices: dict[DeviceKind, Device] = {"gpu": open_device("opencl")}
        if len(plan.devices()) > 1:
            devices["npu"] = open_device("reference", kind="npu", **npu)
        with Engine(loaded.weights, plan, devices, max_seq_len=64) as engine:
            context = engine.new_context()
            engine.prefill(context, text)
            found = [engine.prefill(context, PROMPT).copy(), engine.decode(context, 7).copy()]
            assert ("npu" in engine.devices) == ("npu" in devices and not npu)
            return np.concatenate(found)

    both = layer_level(loaded.spec())
    wanted = behind(single_device(loaded.spec(), "gpu"))
    assert relative_error(behind(both), wanted) < 2e-5
    launches = 1 + 4 * loaded.config.num_layers  # the first prompt's are fewer
    with pytest.warns(FallbackWarning, match="the npu failed"):
        assert relative_error(behind(both, fail_launch=launches), wanted) < 2e-5
