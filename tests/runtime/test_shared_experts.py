"""Routed experts shared between the devices: logits of `transformers`, bytes, and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.ops import Experts
from hetero.errors import UserError
from hetero.models import model_spec, open_model
from hetero.models.quantized import save
from hetero.placement import by_profile
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile, Storage
from hetero.runtime.memory_estimate import MemoryEstimate, file_note
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.expert_shares import Routing
from hetero.solver.handmade import single_device
from hetero.solver.plan import LayerExperts
from hetero.solver.prepared import PreparedSolver
from hetero.solver.request import PlanRequest
from tests.runtime.test_routed_logits import GEMMA4_GGUF, GPT_OSS_GGUF, QWEN3_GGUF, check, drawn
from tests.solver.test_expert_choice import able_at

SHARED = (LayerExperts(layer=0, npu=(1, 4, 7)), LayerExperts(layer=1, npu=(0, 2)))


def shared_plan(folder: Path, npu: tuple[LayerExperts, ...] = SHARED) -> ExecutionPlan:
    graph = open_model(folder, weights="f32").spec()
    return single_device(graph, "gpu").model_copy(update={"npu_experts": npu})


@pytest.mark.full
def test_both_devices_compute_experts_of_a_layer() -> None:
    folder, model = drawn("Qwen3Moe", QWEN3_GGUF)
    plan = shared_plan(folder)
    check(folder, model, "hetero", "f32", (1, 33), plan=plan)
    with LLM(str(folder), plan=plan, weights="f32") as llm:
        placement = llm.engine.placement
        where = {x.name: placement.devices(x) for x in placement.graph.nodes}
        assert where["layer0.experts"] == where["layer0.experts_join"] == {"gpu"}
        assert where["layer0.experts_npu"] == {"npu"}
        ops = [x.op for x in placement.graph.nodes if isinstance(x.op, Experts)]
        assert [len(x.own) for x in ops] == [5, 3, 6, 2]
        held = placement.kernels.weight_bytes
        assert 0 < held["npu"] < held["gpu"]
        assert llm.engine.deployment.kernels.nbytes >= held["npu"]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "drawing"), [("GptOss", GPT_OSS_GGUF), ("Gemma4", GEMMA4_GGUF)])
def test_biases_and_parallel_experts(kind: str, drawing: dict[str, object]) -> None:
    folder, model = drawn(kind, drawing)
    check(folder, model, "hetero", "f32", (1, 33), plan=shared_plan(folder))


@pytest.mark.full
@pytest.mark.parametrize("sync", ["copy", "finish", "event"])
def test_every_way_to_wait(sync: str) -> None:
    folder, model = drawn("Qwen3Moe", QWEN3_GGUF)
    check(folder, model, "hetero", "f32", (1, 33), plan=shared_plan(folder), sync=sync)


@pytest.mark.full
def test_one_layer_on_the_npu_and_one_on_the_gpu() -> None:
    folder, model = drawn("Qwen3Moe", QWEN3_GGUF)
    plan = shared_plan(folder, (LayerExperts(layer=1, npu=tuple(range(8))),))
    check(folder, model, "hetero", "f32", (33,), plan=plan)
    with LLM(str(folder), plan=plan, weights="f32") as llm:
        placement = llm.engine.placement
        routed = [x for x in placement.graph.nodes if isinstance(x.op, Experts)]
        assert [placement.devices(x) for x in routed] == [{"gpu"}, {"npu"}]


def test_experts_that_the_model_lacks() -> None:
    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF)
    plan = shared_plan(folder, (LayerExperts(layer=0, npu=(8,)),))
    with pytest.raises(PlanError, match=r"expert 8 of layer 0 on the NPU; .* has 8 experts there"):
        LLM(str(folder), plan=plan, weights="f32")
    with pytest.raises(PlanError, match="experts on the npu, which has no kernels of them"):
        LLM(str(folder), plan=shared_plan(folder), weights="f32", npu="null")


@pytest.mark.full
@pytest.mark.parametrize("device", ["gpu", "npu", "hetero"])
def test_choices_are_counted(device: str) -> None:
    """In calls of a prompt and in decoding, padding aside."""
    torch = pytest.importorskip("torch")
    folder, model = drawn("Qwen3Moe", QWEN3_GGUF)
    tokens = np.random.default_rng(1).integers(3, 263, 21).tolist()
    seen: list[np.ndarray] = []
    routers = [x for x in model.modules() if type(x).__name__.endswith("TopKRouter")]
    hooks = [x.register_forward_hook(lambda *x: seen.append(x[2][-1].numpy())) for x in routers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    with LLM(str(folder), device=device, weights="f32", kv="f32") as llm:
        counts = llm.engine.deployment.count_routes()
        llm.engine.prefill(llm.context, tokens[:20])
        llm.engine.decode(llm.context, tokens[20])
        for layer, chosen in enumerate(seen):
            expected = np.bincount(chosen.astype(np.int64).ravel(), minlength=8)
            np.testing.assert_array_equal(counts.layers[layer], expected)


@pytest.mark.full
def test_experts_stay_in_the_file_where_a_budget_has_no_room(tmp_path: Path) -> None:
    """The same answer; a device that makes copies of them refuses."""
    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF)
    save(open_model(folder, weights="w4a16").weights, tmp_path / "out", name="routed")
    path, said = str(tmp_path / "out"), "of routed experts stay in the model's file"
    with LLM(path, device="gpu", max_seq_len=64) as llm:
        wanted, needs = llm.generate([5, 6, 7], max_tokens=4).tokens, llm.engine.memory
        experts = llm.engine.placement.graph.expert_weight_bytes
        assert needs.file_bytes == 0
        assert not any(said in note for note in llm.choice.notes)
    budget = needs.total_bytes - experts // 2
    with LLM(path, device="gpu", max_seq_len=64, memory_budget=budget) as llm:
        assert llm.generate([5, 6, 7], max_tokens=4).tokens == wanted
        assert llm.engine.memory.file_bytes == experts
        assert any(said in note for note in llm.choice.notes)
    for device, least in (("gpu", needs.total_bytes - experts - 1), ("npu", budget)):
        with pytest.raises(UserError, match="the memory budget is"):
            LLM(path, device=device, max_seq_len=64, memory_budget=least)
    with pytest.raises(UserError, match="the memory budget is"):  # not of a mapped file
        LLM(str(folder), device="gpu", max_seq_len=64, memory_budget=budget, weights="w4a16")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::hetero.profiler.errors.ProfileWarning")
def test_counts_of_experts_reach_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is opened without a plan; where none would be made they are refused."""
    folder, _ = drawn("Qwen3Moe", QWEN3_GGUF)
    path, counts = tmp_path / "counts.json", (9, 1, 1, 1, 1, 1, 1, 1)
    Routing(model="drawn", tokens=8, layers=dict.fromkeys((0, 1), counts)).save(path)
    asked: list[Routing | None] = []
    solve = by_profile.prepare_solver

    def noted(spec: ModelGraph, profile: DeviceProfile, request: PlanRequest) -> PreparedSolver:
        asked.append(request.routing)
        return solve(spec, profile, request)

    monkeypatch.setattr(by_profile, "prepare_solver", noted)
    options: dict[str, Any] = {"weights": "w4a16", "max_seq_len": 64}
    able = able_at(DeviceProfile.load("host-amx"), "gpu", "npu")
    with LLM(str(folder), device="hetero", profile=able, experts=path, **options) as llm:
        note = next(x for x in llm.engine.plan.notes if x.startswith("routed experts"))
        assert llm.generate([5, 6, 7], max_tokens=2).tokens
    assert [x.layers[0] for x in asked if x is not None] == [counts]
    assert "by their shares of 8 tokens" in note
    for other in ({"device": "gpu"}, {"device": "npu"}, {"strategy": "layer"}):
        with pytest.raises(UserError, match="--experts says by which counts"):
            LLM(str(folder), experts=path, **options, **other)
    with pytest.raises(UserError, match="has no routed experts: leave --experts out"):
        LLM("demo", experts=path)
    Routing(model="other", tokens=8, layers={0: (1, 2)}).save(path)
    with pytest.raises(PlanError, match="none of the 8 experts of layer 0"):
        LLM(str(folder), experts=path, **options)


def test_the_disks_rate_says_how_fast_answers_are() -> None:
    graph = model_spec("qwen3-moe-3b")
    whole = graph.expert_weight_bytes
    needs = MemoryEstimate(
        pool_bytes=10, weight_bytes=whole + 90, context_bytes=0, largest_bytes=10,
        file_bytes=whole,
    )  # fmt: skip
    disk = Storage(read_bytes_per_s=1e9, piece_bytes=1 << 20)
    said = file_note(needs, graph, 100 + whole // 2, disk)
    rate = 1e9 / (whole / 8 / 2)  # 8 of 64, half of them in memory
    assert said.endswith(f"(1000 MB/s: at most {rate:.3g} tokens/s)")
    assert "MB/s" not in file_note(needs, graph, 100 + whole // 2, None)
    assert file_note(replace(needs, file_bytes=0), graph, 100, disk) == ""
