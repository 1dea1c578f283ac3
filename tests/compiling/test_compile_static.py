"""`hetero compile` of w8a8 models: text in, text out, by the compiler's graphs in the emulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hetero import LLM
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Outliers
from hetero.compiling.calibration import calibrated
from hetero.compiling.npu_graphs import CompileRequest, compile_model, prepare
from hetero.models import model_graph, quantized
from hetero.profiler.model_graph import ModelGraph
from hetero.solver.handmade import single_device
from hetero.solver.node_groups import node_groups
from hetero.solver.plan import FusedGroup
from tests.models.model_helpers import small_config
from tests.support.checkpoints import Case, make_checkpoint

pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)

TEXT = "Once upon a time, there was a young fox named Jasmund. He lived in the village. " * 4
MAX_OFF = 0.2  # results of 8 bits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(Case("tiny", "Llama", {"num_hidden_layers": 2}), folder / "model")
    (folder / "text").write_text(TEXT)
    return folder


def quantise(checkpoint: Path, folder: Path, outliers: str) -> Path:
    text, model = checkpoint / "text", str(checkpoint / "model")
    found = calibrated(model, WeightFormat.W8A8, text, 96, outliers=outliers)
    return quantized.save(found, folder)


@pytest.fixture(scope="module")
def shadowed(checkpoint: Path) -> Path:
    return quantise(checkpoint, checkpoint / "shadowed", "all")


def logits_of(llm: LLM) -> npt.NDArray[np.float32]:
    """Behind a prompt, and behind one more token."""
    prompt = llm.engine.prefill(llm.context, [3, 4, 5]).copy()
    return np.stack([prompt, llm.engine.decode(llm.context, 6)])


def compare(model: Path, bundle: Path) -> None:
    """A bundle's logits with those of exact integers; nothing was compiled when it ran."""
    with LLM(str(model), device="npu", npu="reference", kv="f32") as llm:
        expected = logits_of(llm)
    with LLM(str(bundle)) as llm:
        found, store = logits_of(llm), llm.devices.devices["npu"].store  # type: ignore[attr-defined]
        assert llm.devices.name("npu") == "qnn"
    assert (store.counts.compiled, store.counts.rebuilt) == (0, [])
    assert np.linalg.norm(found - expected) < MAX_OFF * np.linalg.norm(expected)


@pytest.mark.full
def test_a_bundle_with_shadows_beside_it(shadowed: Path, tmp_path: Path) -> None:
    """The Hexagon's matmuls are emulated, the shadows run on the GPU meanwhile."""
    request = CompileRequest(str(shadowed), "sm8650", weights="w8a8", max_seq_len=40)
    compile_model(prepare(replace(request, graph_sizes=(1, 32))), tmp_path / "bundle")
    compare(shadowed, tmp_path / "bundle")
    with LLM(str(tmp_path / "bundle")) as llm:
        assert llm.model.weights.weight_format == "w8a8"
        found = llm.generate("Once upon", max_tokens=3)
        launches = llm.engine.steps.step(llm.context, "prefill", 9).launches
    assert set(found.stats.placement) == {"gpu", "npu"}
    assert {x.kind for x in launches if x.node.endswith("_shadow")} == {"gpu"}
    assert {x.kind for x in launches if x.node.endswith(("qkv", "down"))} == {"npu"}


def test_alone_the_hexagon_refuses_shadows_with_the_remedy(shadowed: Path) -> None:
    with pytest.raises(DeviceError) as refused:
        LLM(str(shadowed), device="npu", npu="qnn")
    assert str(refused.value).endswith(
        "failed: outliers are floating-point sums for a GPU; use --device hetero, or quantise with "
        "--outliers none"
    )


@pytest.mark.full
def test_static_graphs_between_attentions(checkpoint: Path, tmp_path: Path) -> None:
    """Two graphs and attention a layer, codes rounded inside them: compiled ahead, as they run."""
    model = quantise(checkpoint, tmp_path / "w8a8", "none")
    request = CompileRequest(str(model), "sm8650", weights="w8a8", max_seq_len=40)
    plan = single_device(prepare(request).loaded.spec(), "npu", graph_sizes=(1, 32))
    ready = prepare(replace(request, plan=plan.model_copy(update={"fused": ("static",)})))
    assert [job.name for job in ready.jobs] == [
        "embed",
        *(f"layer0.{name}" for name in ("input_norm_to_rope", "attention", "o_to_down")),
        *(f"layer1.{name}" for name in ("input_norm_to_rope", "o_to_down")),
        "final_norm",
        "lm_head",
    ]
    compile_model(ready, tmp_path / "bundle")
    compare(model, tmp_path / "bundle")


GROUPS: list[tuple[tuple[FusedGroup, ...], list[int]]] = [
    (("static",), [3, 5]),
    (("feed_forward",), [2]),
    (("block", "static"), [9]),
]


@pytest.mark.parametrize(("fused", "nodes"), GROUPS)
def test_what_is_one_graph(fused: tuple[FusedGroup, ...], nodes: list[int]) -> None:
    graph = model_graph(small_config(), "w8a8")
    assert lengths(graph, fused) == nodes * graph.layers
    whole = {
        node.name for group in node_groups(graph.nodes, fused).values() for node in group.nodes
    }
    assert len(whole) == sum(nodes) * graph.layers
    shadows = {"blocks.1.o": Outliers(n=24, k=24, hot=2)}
    beside = lengths(model_graph(small_config(), "w8a8", shadows=shadows), fused)
    assert beside == {  # layer 1 is cut where the GPU computes meanwhile
        "static": [3, 5, 3, 5, *nodes * (graph.layers - 2)],
        "feed_forward": nodes * graph.layers,
    }.get(fused[0], [9, 3, 5, *nodes * (graph.layers - 2)])


def lengths(graph: ModelGraph, fused: tuple[FusedGroup, ...]) -> list[int]:
    return [len(group.nodes) for group in node_groups(graph.nodes, fused).values()]
