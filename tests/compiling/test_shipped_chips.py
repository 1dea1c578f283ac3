"""Plans of shipped profiles of chips are what `hetero compile` makes graphs of, and run here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.formats import CacheFormat
from hetero.backends.opencl import gpu_capabilities
from hetero.backends.qnn import npu_capabilities
from hetero.backends.snapdragon import find_chip
from hetero.compiling.limits import domains_of
from hetero.compiling.npu_graphs import CompileRequest, compile_model, prepare
from hetero.models import model_spec, open_model
from hetero.models.random_models import KNOWN_MODELS
from hetero.profiler.records import CapabilityRecord, DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.request import PlanRequest
from tests.support.checkpoints import CASES, make_checkpoint
from tests.support.helpers import assert_close

pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("no_graphs")

CLOSE = 0.02  # of the two largest logits, which may change places: the arithmetic is fp16
CHIPS = {
    "snapdragon-8-gen-3": "sm8650",
    "snapdragon-8-gen-3-strong-npu": "sm8650",
}


def plan_of(model: str, profile: str, *lengths: int, graph_sizes: object = None) -> ExecutionPlan:
    request = PlanRequest(seq_lens=lengths, graph_sizes=graph_sizes, explain=False)  # type: ignore[arg-type]
    return make_plan(model_spec(model), DeviceProfile.load(profile), request)


@pytest.mark.parametrize("name", CHIPS)
def test_a_shipped_chip_can_do_what_its_backends_can(name: str) -> None:
    devices, chip = DeviceProfile.load(name).devices, find_chip(CHIPS[name])
    sizes = npu_capabilities.STANDARD_GRAPH_SIZES
    npu = npu_capabilities.capabilities_of(chip, sizes, shared_weights=True)
    assert devices["npu"].capabilities == CapabilityRecord.of(npu)
    assert devices["gpu"].capabilities == CapabilityRecord.of(gpu_capabilities.capabilities_of())


@pytest.mark.parametrize("name", CHIPS)
def test_a_shipped_chip_times_only_what_its_backends_compute(name: str) -> None:
    profile = DeviceProfile.load(name)
    for predictor in profile.predictors:
        able = profile.devices[predictor.device].capabilities
        assert predictor.weight_format in able.weight_formats
        assert predictor.order in able.operand_orders
        assert predictor.model is not None
        stored = predictor.weight_format.storage.bytes_per_weight
        assert predictor.model.bytes_per_weight == stored


@pytest.mark.full
@pytest.mark.sampled(4)
@pytest.mark.parametrize("profile", CHIPS)
@pytest.mark.parametrize("model", KNOWN_MODELS)
def test_every_plan_of_a_shipped_chip_can_be_compiled(model: str, profile: str) -> None:
    plan = plan_of(model, profile, 64, 256, 1024)
    ready = prepare(CompileRequest(f"random:{model}", CHIPS[profile], plan=plan, max_seq_len=1280))
    chip = find_chip(CHIPS[profile])
    assert plan.memory is not None
    assert 0 < plan.memory.npu_bytes <= chip.npu_limit_bytes
    # Rows that other plans may ask for fill what is left of the domains.
    assert 1 <= len(domains_of(ready.jobs, shared=True)) <= chip.domains
    for total in (*plan.totals, *plan_of(model, profile, 64).totals):
        assert total.predicted_s is not None
        assert total.best_single_device_s is not None
        assert total.predicted_s <= total.best_single_device_s * 1.0001


TOKEN_IDS = [3, 100, 7, 42, 250, 9, 11] * 6
LENGTH = 64
FAMILIES = ("llama-tied", "qwen3-qk-norm", "qwen1.5", "internlm2", "gemma", "phi2", "phi3-window",
            "opt", "mistral-window")  # fmt: skip


def with_slow_gpu(profile: DeviceProfile) -> DeviceProfile:
    """The chip with a GPU that is so slow that matmuls of a hundred features are shared."""
    predictors = tuple(
        x.model_copy(update={"scale": {"prefill": 3000.0, "decode": 30000.0}})
        if x.device == "gpu"
        else x
        for x in profile.predictors
    )
    return profile.model_copy(update={"predictors": predictors})


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(x, marks=pytest.mark.full) for x in FAMILIES[1:])]
)
def test_a_plan_of_the_shipped_chip_answers_as_a_pc_does(family: str, tmp_path: Path) -> None:
    """Planned on the simulated chip, compiled, run on the emulated Hexagon and OpenCL."""
    case = next(case for case in CASES if case.name == family)
    model = tmp_path / "model"
    make_checkpoint(replace(case, changes={**case.changes, "num_hidden_layers": 2}), model)
    spec = open_model(model, weights="w4a16").for_context(LENGTH).spec(CacheFormat.F32)
    profile = with_slow_gpu(DeviceProfile.load("snapdragon-8-gen-3"))
    plan = make_plan(spec, profile, PlanRequest(seq_lens=(len(TOKEN_IDS),), graph_sizes=(32,)))
    assert plan.devices() == {"gpu", "npu"}
    assert any(len(op.tiles) > 1 for op in plan.ops)
    request = CompileRequest(str(model), "sm8650", plan=plan, max_seq_len=LENGTH)
    compile_model(prepare(request), tmp_path / "bundle")
    answers = {}
    for where in ("bundle", "model"):
        options: dict[str, Any] = {} if where == "bundle" else {"device": "gpu"}
        with LLM(str(tmp_path / where), weights="w4a16", max_seq_len=LENGTH, **options) as llm:
            logits = [llm.engine.prefill(llm.context, TOKEN_IDS).copy()]
            logits += [llm.engine.decode(llm.context, token).copy() for token in (5, 6)]
            answers[where] = logits
            if where == "bundle":
                assert set(llm.context.work.devices) == {"gpu", "npu"}
                store = llm.devices.devices["npu"].store  # type: ignore[attr-defined]
                assert (store.counts.compiled, store.counts.rebuilt) == (0, [])
    for here, expected in zip(answers["bundle"], answers["model"], strict=True):
        assert_close(here, expected, 1e-2, family)
        second, best = np.sort(expected)[-2:]
        assert here.argmax() == expected.argmax() or best - second < CLOSE
