"""Layers with states where the NPU's graphs keep none: the GPU has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime_qnn")

from hetero import LLM
from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.solver.plan import device_of_other
from tests.support.checkpoints import CASES, make_checkpoint, reference_logits, relative_error

HALF_TOLERANCE = 1e-2  # the NPU computes its rows in fp16
CONV = ops.ShortConv(d=8, taps=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp("qwen3.5")
    case = next(x for x in CASES if x.name == "qwen3.5")
    return folder, make_checkpoint(case, folder, spread=0.05)


def test_the_gpu_has_what_keeps_a_state() -> None:
    assert device_of_other(CONV, "npu", ("gpu", "npu")) == "gpu"
    assert device_of_other(CONV, "npu", ("npu",)) == "npu"
    assert device_of_other(ops.Add(d=8), "npu", ("gpu", "npu")) == "npu"


def test_a_gpu_and_an_npu_share_a_model_of_delta_nets(checkpoint: tuple[Path, object]) -> None:
    folder, model = checkpoint
    tokens = np.random.default_rng(0).integers(3, 263, 24).tolist()
    expected = reference_logits(model, tokens)
    with LLM(str(folder), device="hetero", npu="qnn", weights=WeightFormat.F16, kv="f32") as llm:
        assert llm.devices.devices["npu"].info.backend == "qnn"
        got = [llm.engine.prefill(llm.context, tokens[:20]).copy()]
        got += [llm.engine.decode(llm.context, token).copy() for token in tokens[20:]]
    assert relative_error(np.stack(got), expected[19:]) <= HALF_TOLERANCE


def test_an_npu_alone_says_what_it_lacks(checkpoint: tuple[Path, object]) -> None:
    folder, _ = checkpoint
    with pytest.raises(DeviceError, match="keep no states from call to call; use --device h"):
        LLM(str(folder), device="npu", npu="qnn", weights=WeightFormat.F16, kv="f32")
