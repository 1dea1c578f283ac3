"""Layers with states on QNN, whose graphs keep none: the GPU has them if there is one.

Alone the NPU computes them in graphs of a chunk, between which the host keeps the state.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime_qnn")

from hetero import LLM
from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import WeightValue
from hetero.backends.registry import open_device
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.non_matmul_devices import device_of_other, what_npus_lack
from hetero.solver.request import PlanRequest
from tests.backends.cases import make_tensors
from tests.support.checkpoints import CASES, make_checkpoint, reference_logits, relative_error
from tests.support.helpers import Command

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


@pytest.mark.full
def test_a_gpu_and_an_npu_share_a_model_of_delta_nets(checkpoint: tuple[Path, object]) -> None:
    folder, model = checkpoint
    tokens = np.random.default_rng(0).integers(3, 263, 24).tolist()
    expected = reference_logits(model, tokens)
    with LLM(str(folder), device="hetero", npu="qnn", weights=WeightFormat.F16, kv="f32") as llm:
        assert llm.devices.devices["npu"].info.backend == "qnn"
        got = [llm.engine.prefill(llm.context, tokens[:20]).copy()]
        got += [llm.engine.decode(llm.context, token).copy() for token in tokens[20:]]
    assert relative_error(np.stack(got), expected[19:]) <= HALF_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("pieces", [(20,), (1, 2, 17)])
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_an_npu_alone_computes_what_keeps_a_state(
    tmp_path: Path, name: str, pieces: tuple[int, ...]
) -> None:
    """Compare it with `transformers`, in calls of token counts that no graph has."""
    model = make_checkpoint(next(x for x in CASES if x.name == name), tmp_path, spread=0.05)
    tokens = np.random.default_rng(0).integers(3, 263, 23).tolist()
    expected = reference_logits(model, tokens)
    with LLM(str(tmp_path), device="npu", npu="qnn", weights=WeightFormat.F16, kv="f32") as llm:
        got, start = [], 0
        for count in pieces:
            got = [llm.engine.prefill(llm.context, tokens[start : start + count]).copy()]
            start += count
        got += [llm.engine.decode(llm.context, token).copy() for token in tokens[20:]]
    assert relative_error(np.stack(got), expected[19:]) <= HALF_TOLERANCE


@pytest.mark.parametrize(
    ("op", "sentence"),
    [
        (ops.Attention(heads=2, kv_heads=1, head_dim=8, capacity=8, reads=True),
         "its attention reads the caches that it appends to"),
        (ops.Attention(heads=2, kv_heads=1, head_dim=8, capacity=8, sinks=True),
         "its graphs have no sinks of attention"),
    ],
)  # fmt: skip
def test_what_the_graphs_lack_is_planned_on_the_gpu_and_said(op: ops.Op, sentence: str) -> None:
    assert device_of_other(op, "npu", ("gpu", "npu")) == "gpu"
    with open_device("qnn", graph_sizes=(1,), cache=None) as device:
        refused = device.accepts(op)
    assert not refused
    assert refused.reason == sentence


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "qwen3.5-0.8b",
            "the states of convolutions (18 layers), the states of gated delta rules (18 layers)",
        ),
        ("gemma-4-e2b", "attention to another layer's keys and values (20 layers)"),
        ("gpt-oss-20b", "attention with sinks (24 layers), routing to experts (24 layers)"),
        (
            "qwen3.5-35b-a3b",
            "the states of convolutions (30 layers), the states of gated delta rules (30 layers), "
            "routing to experts (40 layers), gates of shared experts (40 layers)",
        ),
        ("qwen3-4b", ""),
    ],
)
def test_a_plan_says_what_npus_lack(model: str, said: str) -> None:
    sentence = f"on the GPU, because graphs of NPUs do not have them: {said}"
    assert what_npus_lack(model_spec(model)) == (sentence if said else "")
    plan = make_plan(
        model_spec(model), DeviceProfile.load("snapdragon-8-gen-3"), PlanRequest(seq_lens=(64,))
    )
    assert [x for x in plan.notes if "do not have them" in x] == ([sentence] if said else [])


def test_the_commands_say_what_npus_lack(command: Command, checkpoint: tuple[Path, object]) -> None:
    folder, _ = checkpoint
    for arguments in (
        ("plan", str(folder), "--profile", "snapdragon-8-gen-3", "--seq-lens", "64"),
        ("compile", str(folder), "--soc", "sm8650", "--strategy", "layer", "--dry-run"),
    ):
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        said = " ".join((done.stdout + done.stderr).split())
        assert "on the GPU, because graphs of NPUs do not have them: the states" in said


@pytest.mark.parametrize(
    ("op", "weights"),
    [
        (ops.ShortConv(d=2, taps=3, gated=True), {"taps": np.full(6, 1e-6, np.float32)}),
        (
            ops.GatedDelta(k_heads=1, v_heads=1, k_dim=8, v_dim=8, eps=1e-6),
            {"decay": np.zeros(1, np.float32), "dt_bias": np.zeros(1, np.float32),
             "norm": np.full(8, 1e-6, np.float32)},
        ),
    ],
)  # fmt: skip
def test_sums_beyond_half_precision_are_an_error(
    op: ops.ShortConv | ops.GatedDelta, weights: dict[str, WeightValue]
) -> None:
    """A sum inside the graph could saturate without a word: it is refused."""
    with open_device("qnn", graph_sizes=(1,), cache=None) as device:
        kernel = device.prepare(op, weights)
        tensors = make_tensors(op, 1, np.random.default_rng(0), position=1, device=device)
        tensors["x"].array[:] = 300.0
        for port in {"delta_state"} & set(tensors):
            tensors[port].array[:] = 2000.0  # fits, times √8 does not
        with pytest.raises(DeviceError, match="FP16_OVERFLOW"):
            kernel.bind(tensors, 1).run()
