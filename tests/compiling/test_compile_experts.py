"""Routed experts in bundles: a tiny Qwen3-MoE compiled, opened, and said where its experts are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.ops import Experts
from hetero.compiling.npu_graphs import CompileRequest, compile_model, prepare
from hetero.models import open_model
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.plan import PHASES, LayerExperts
from tests.compiling.test_solved_bundle import slow_gpu
from tests.runtime.test_routed_logits import QWEN3_GGUF, decided_prompt, drawn
from tests.support.helpers import Command, assert_close

pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("no_graphs")

GRAPHS, CONTEXT, TOKENS = (1, 8), 32, 19
CHANGES = QWEN3_GGUF | {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
ALL = tuple(range(4))
SOME = (LayerExperts(layer=0, npu=(1, 3)), LayerExperts(layer=1, npu=ALL))
MARGIN = 2e-3  # of the probabilities of experts, which see what is rounded to half precision
CLOSE = 2e-2


def plan_of(model: Path, *npu: LayerExperts) -> ExecutionPlan:
    """All but experts on the GPU."""
    spec = open_model(model, weights="w4a16").spec()
    plan = single_device(spec, "gpu", GRAPHS)
    return plan.model_copy(update={"npu_experts": npu, "step_tokens": 16})


@pytest.mark.full
def test_a_bundle_runs_experts_on_the_npu(tmp_path: Path) -> None:
    """It has every graph that prompts and answers need, and gives the numbers of the GPU alone."""
    folder, model = drawn("Qwen3Moe", CHANGES)
    request = CompileRequest(
        str(folder), "sm8650", plan_of(folder, *SOME), graph_sizes=GRAPHS, max_seq_len=CONTEXT
    )
    made = prepare(request)
    assert "routed experts: 6 of 8 on the NPU, the rest on the GPU" in made.notes
    assert any("routing to experts (2 layers)" in note for note in made.notes)
    manifest = compile_model(made, tmp_path / "bundle")
    names = {name for graph in manifest.graphs for name in graph.nodes}
    assert names == {
        "layer0.experts_npu[1]", "layer0.experts_npu[3]", *(f"layer1.experts[{x}]" for x in ALL)
    }  # fmt: skip
    assert len(manifest.graphs) == len(GRAPHS) * 6
    tokens, _ = decided_prompt(model, TOKENS, MARGIN)
    with LLM(str(folder), device="gpu", gpu="reference", weights="w4a16", kv="f32") as alone:
        expected = alone.logits(tokens)
        wanted = alone.generate(tokens, max_tokens=4).tokens
    with LLM(str(tmp_path / "bundle")) as llm:
        placement = llm.engine.placement
        routed = [x for x in placement.graph.nodes if isinstance(x.op, Experts)]
        assert [placement.devices(x) for x in routed] == [{"gpu"}, {"npu"}, {"npu"}]
        got = [llm.engine.prefill(llm.context, tokens[:15]).copy()]
        got += [llm.engine.decode(llm.context, token).copy() for token in tokens[15:]]
        assert_close(np.stack(got), expected[14:], CLOSE, "logits")
        llm.context.truncate(0)
        assert llm.generate(tokens, max_tokens=4).tokens == wanted
        store = llm.devices.devices["npu"].store  # type: ignore[attr-defined]
        assert (store.counts.compiled, store.counts.rebuilt) == (0, [])


@pytest.mark.full
def test_the_chips_times_share_experts() -> None:
    """Solved by the chip's profile, with a GPU so slow that the NPU has all experts."""
    request = CompileRequest(
        "random:qwen3-moe-3b", "sm8650", profile=slow_gpu(*PHASES), max_seq_len=1024
    )
    made = prepare(request)
    assert made.plan.experts == "npu"
    assert any(x.startswith("routed experts: on the NPU (") for x in made.notes)
    jobs = {name: job for job in made.jobs for name in job.names if "experts" in name}
    assert set(jobs) == {f"layer{i}.experts[{e}]" for i in range(24) for e in range(64)}
    assert {job.sizes for job in jobs.values()} == {tuple(x for x in made.sizes if x <= 256)}
    assert made.share_weights
    assert made.gpu_bytes == 0


def test_graphs_of_an_expert_share_its_weights(tmp_path: Path) -> None:
    folder, _ = drawn("Qwen3Moe", CHANGES)
    npu = LayerExperts(layer=1, npu=(2,))
    request = CompileRequest(
        str(folder), "sm8650", plan_of(folder, npu), max_seq_len=CONTEXT, share_weights=True
    )
    manifest = compile_model(prepare(request), tmp_path / "bundle")
    (graph,) = manifest.graphs
    assert graph.nodes == ("layer1.experts_npu[2]",)
    assert graph.tokens == GRAPHS


def test_the_command_says_where_experts_are(command: Command, tmp_path: Path) -> None:
    folder, _ = drawn("Qwen3Moe", CHANGES)
    done = command("compile", str(folder), "--soc", "sm8650", "--strategy", "layer", "--dry-run")
    assert done.returncode == 0
    assert "routed experts: 0 of 8 on the NPU, the rest on the GPU" in done.stderr
    plan = tmp_path / "plan.json"
    plan.write_text(plan_of(folder, *SOME).model_dump_json())
    done = command("compile", str(folder), "--soc", "sm8650", "--plan", str(plan), "--dry-run")
    assert done.returncode == 0
    assert "routed experts: 6 of 8 on the NPU" in done.stderr
