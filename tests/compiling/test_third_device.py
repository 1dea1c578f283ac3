"""`hetero compile` of a plan for GPU, NPU and CPU: the NPU's graphs, and what runs the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.compiling.npu_graphs import Compilation, CompileRequest, compile_model, prepare
from hetero.models import open_model
from tests.runtime.plans import ROWS, plan_for_three
from tests.support.checkpoints import Case, make_checkpoint

pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("no_graphs")

CONTEXT = 64
TOKENS = [3, 9, 14, 2, 7, 7, 11, 30]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: Any) -> Compilation:
    """A model of a layer, with every matmul cut for three."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    changes = {"num_hidden_layers": 1, "vocab_size": 96}
    make_checkpoint(Case("tiny", "Llama", changes), folder)
    plan = plan_for_three(open_model(str(folder)).spec())
    request = CompileRequest(
        str(folder), "sm8650", plan=plan, graph_sizes=(8,), max_seq_len=CONTEXT
    )
    return prepare(request)


def test_the_npus_rows_are_compiled_and_the_cpus_are_counted(prepared: Compilation) -> None:
    rows = {job.segment.rows for job in prepared.jobs if job.segment is not None}
    assert rows == {(0, ROWS)}
    cut = [
        node.op
        for node in prepared.placement.graph.nodes
        if node.plan_op is not None and "cpu" in prepared.placement.devices(node)
    ]
    assert cut
    able = prepared.placement.kernels._capabilities["cpu"].weight_bytes
    assert prepared.cpu_bytes == pytest.approx(
        sum(able[op.weight_format] * ROWS * op.k for op in cut),
        abs=len(cut),  # type: ignore[union-attr]
    )
    assert "packed on opening" in prepared.describe_memory()


@pytest.mark.full
def test_a_bundle_runs_on_three_devices(prepared: Compilation, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    compile_model(prepared, out)
    with LLM(prepared.request.model, device="gpu", kv="f32", max_seq_len=CONTEXT) as llm:
        wanted = llm.engine.prefill(llm.context, TOKENS).copy()
    with LLM(str(out), kv="f32") as llm:
        assert set(llm.devices.devices) == {"gpu", "npu", "cpu"}
        assert llm.devices.name("cpu") == "ort-cpu"
        found = llm.engine.prefill(llm.context, TOKENS).copy()
        assert set(llm.context.work.devices) == {"gpu", "npu", "cpu"}
        store = llm.devices.devices["npu"].store.counts  # type: ignore[attr-defined]
        assert (store.compiled, store.rebuilt) == (0, [])
    np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.05)
