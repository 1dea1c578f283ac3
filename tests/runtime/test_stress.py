"""Late real devices, failing real devices, failing allocations: right or clearly refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from hetero import LLM, UserError
from hetero.backends.memory import HostBuffer
from hetero.backends.opencl.calls import OpenCLCall, OpenCLCompletion
from hetero.backends.protocol import Device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.solver.handmade import layer_level
from tests.runtime.models import tiny_model
from tests.runtime.stress import stress


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("seed", "sync"), [(1, "fast"), (2, "fast"), (3, "event")])
def test_late_launches_and_flags_change_no_bit(folder: Path, seed: int, sync: Any) -> None:
    """The same for thousands of steps: `python -m tests.runtime.stress --steps 5000`."""
    assert stress(folder, 20, seed, sync) >= 20


@pytest.mark.parametrize("launch", [0, 25, 90])
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
        monkeypatch.setattr(llm.engine, "_steps", llm.engine._steps.__class__())  # bound methods
        with pytest.warns(FallbackWarning, match="OUT_OF_RESOURCES") as caught:
            found = llm.generate([1, 2, 3], max_tokens=8)
        assert len(caught) == 1
        assert found.tokens == wanted
        assert set(found.stats.placement) >= {"npu", "fallback"}
    monkeypatch.undo()
    with LLM(str(folder), plan=plan, weights="f32", max_seq_len=80) as again:
        assert again.generate([1, 2, 3], max_tokens=8).tokens == wanted


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_memory_that_the_system_refuses_is_one_sentence_and_devices_are_released(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plan = layer_level(open_model(str(folder), weights="f32").spec())
    original = Device.allocate

    def refuse(self: Device, nbytes: int) -> HostBuffer:
        if nbytes > 60_000:
            raise error
        return original(self, nbytes)

    monkeypatch.setattr(Device, "allocate", refuse)
    with pytest.raises(UserError, match=r"cannot allocate .* MiB for .*smaller max_seq_len"):
        LLM(str(folder), plan=plan, weights="f32")
    monkeypatch.undo()
    with LLM(str(folder), plan=plan, weights="f32", max_seq_len=80) as llm:
        assert np.isfinite(llm.logits([1, 2, 3])).all()
