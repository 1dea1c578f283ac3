"""Late real devices, failing real devices, failing allocations: right or clearly refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyopencl")

import pyopencl as cl

from hetero import LLM, UserError
from hetero.backends.errors import DeviceLostError
from hetero.backends.memory import Arena
from hetero.backends.onnx_common import staging
from hetero.backends.opencl.calls import OpenCLCall, OpenCLCompletion
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.ort_cpu.device import OrtCpuDevice
from hetero.backends.protocol import Device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.runtime.lowering import Lowering
from hetero.solver.handmade import layer_level
from tests.runtime.models import tiny_model
from tests.runtime.stress import stress, stress_contexts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("seed", "sync"), [(1, "fast"), (2, "fast"), (3, "event")])
def test_late_launches_and_flags_change_no_bit(folder: Path, seed: int, sync: Any) -> None:
    """The same for thousands of steps: `python -m tests.runtime.stress --steps 5000`."""
    assert stress(folder, 20, seed, sync) >= 20


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_two_threads_on_two_contexts_of_late_devices_change_no_bit(folder: Path, seed: int) -> None:
    assert stress_contexts(folder, 40, seed) >= 40


@pytest.mark.full
@pytest.mark.parametrize("launch", [0, 5, 14])
def test_an_opencl_failure_in_a_generation_leaves_the_other_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launch: int
) -> None:
    plan = layer_level(open_model(str(folder), weights="f32").spec())
    with LLM(str(folder), plan=plan, weights="f32", max_seq_len=80) as llm:
        wanted = llm.generate([1, 2, 3], max_tokens=8).tokens
        made = [0]
        submit = OpenCLCall.submit

        def fail(call: OpenCLCall) -> OpenCLCompletion:
            made[0] += 1
            if made[0] > launch:
                raise call.device.failed("launching", cl.status_code.OUT_OF_RESOURCES)
            return submit(call)

        monkeypatch.setattr(OpenCLCall, "submit", fail)
        llm.engine.deployment.lower()  # bound methods
        with pytest.warns(FallbackWarning, match="OUT_OF_RESOURCES") as caught:
            found = llm.generate([1, 2, 3], max_tokens=8)
        assert len(caught) == 1
        assert found.tokens == wanted
        assert set(found.stats.placement) >= {"npu", "fallback"}
    monkeypatch.undo()
    with LLM(str(folder), plan=plan, weights="f32", max_seq_len=80) as again:
        assert again.generate([1, 2, 3], max_tokens=8).tokens == wanted


REFUSED = (OSError(12, "Cannot allocate memory"), MemoryError())
# Who asks for memory when a model is opened, and what the sentence says that it was for.
ASKING = {
    "the pool": (Device, "allocate", r"the \d+\.\d MiB of "),
    "packing": (Arena, "take", "the weights of layer 0"),
    "a device's own layout": (staging, "stage", "the weights of layer 1"),
    "a step": (Lowering, "lower", "the prefill step of 8 tokens"),
}


def refuse(monkeypatch: pytest.MonkeyPatch, who: str, error: Exception, after: int) -> str:
    """Let `who` get memory `after` times, then none; what the sentence says."""
    owner, name, sentence = ASKING[who]
    original, left = getattr(owner, name), [after]

    def asked(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, asked)
    why = "out of memory|.*Cannot allocate memory"
    return rf"not enough memory for {sentence}.*\(({why})\): close other programs"


@pytest.mark.full
@pytest.mark.parametrize(
    ("who", "after", "error"),
    [
        ("the pool", 9, REFUSED[0]),
        ("packing", 4, REFUSED[1]),
        ("a device's own layout", 6, REFUSED[0]),
        ("a step", 0, REFUSED[1]),
    ],
)
def test_memory_that_the_system_refuses_is_one_sentence_and_devices_are_released(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, who: str, after: int
) -> None:
    plan = layer_level(open_model(str(folder), weights="w4a16").spec())
    closed: list[Device] = []
    for kind in (OpenCLDevice, OrtCpuDevice):
        monkeypatch.setattr(kind, "close", noting(kind.close, closed))
    sentence = refuse(monkeypatch, who, error, after)
    with pytest.raises(UserError, match=sentence):
        LLM(str(folder), plan=plan)
    assert {device.info.backend for device in closed} == {"opencl", "ort-cpu"}
    monkeypatch.undo()
    with LLM(str(folder), plan=plan, max_seq_len=80) as llm:
        assert np.isfinite(llm.logits([1, 2, 3])).all()


def noting(close: Any, closed: list[Device]) -> Any:
    def noted(device: Device) -> None:
        closed.append(device)
        close(device)

    return noted


@pytest.mark.full
def test_no_memory_to_go_on_without_a_lost_device_closes_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = layer_level(open_model(str(folder), weights="w4a16").spec())
    with LLM(str(folder), plan=plan, max_seq_len=80) as llm:
        monkeypatch.setattr(OpenCLCall, "submit", lost)
        llm.engine.deployment.lower()  # bound methods
        sentence = refuse(monkeypatch, "packing", MemoryError(), 4)
        with pytest.warns(FallbackWarning), pytest.raises(UserError, match=sentence):
            llm.generate([1, 2, 3], max_tokens=2)
        assert all(device.state() != "open" for device in llm.devices.devices.values())
        with pytest.raises(DeviceLostError, match="the model was closed"):
            llm.generate([1, 2, 3], max_tokens=2)
    monkeypatch.undo()
    with LLM(str(folder), plan=plan, max_seq_len=80) as again:
        assert np.isfinite(again.logits([1, 2, 3])).all()


def lost(call: OpenCLCall) -> OpenCLCompletion:
    raise call.device.failed("launching", cl.status_code.OUT_OF_RESOURCES)
