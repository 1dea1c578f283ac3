"""`hetero compile`: a bundle runs, goes on after an interruption, and fits the chip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from hetero.backends.snapdragon import DOMAIN_BYTES
from hetero.cli.app import main
from hetero.compiling.npu_graphs import CompileRequest, compile_model, prepare
from hetero.contexts.service import Service
from hetero.errors import ModelError, UserError
from hetero.models import model_spec
from hetero.models.bundle import BUNDLE_FILE, GRAPHS_DIRECTORY, PLAN_FILE, find_bundle
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.plan import Tile
from tests.support.checkpoints import Case, make_checkpoint
from tests.support.selection import exhaustive

pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("no_graphs")

REQUEST = CompileRequest("demo", "sm8650", graph_sizes=(1, 32), max_seq_len=96)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that was interrupted after ten graphs."""
    out = tmp_path_factory.mktemp("bundles") / "demo-sm8650"

    def stop(done: int, total: int, name: str) -> None:
        if done >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_model(prepare(REQUEST), out, stop)
    assert find_bundle(out) is None
    return out


@pytest.fixture(scope="module")
def bundle(interrupted: Path) -> Path:
    before = {path.name for path in (interrupted / GRAPHS_DIRECTORY).iterdir()}
    assert len(before) == 10
    times = {name: (interrupted / GRAPHS_DIRECTORY / name).stat().st_mtime_ns for name in before}
    seen: list[int] = []
    manifest = compile_model(prepare(REQUEST), interrupted, lambda done, *_: seen.append(done))
    assert seen[-1] == len(manifest.graphs) == 32
    for name, written in times.items():
        assert (interrupted / GRAPHS_DIRECTORY / name).stat().st_mtime_ns == written
    return interrupted


def test_a_begun_bundle_is_not_gone_on_with_differently(interrupted: Path) -> None:
    if (interrupted / BUNDLE_FILE).exists():
        pytest.skip("the bundle was finished by another test first")
    with pytest.raises(UserError, match="begun with another model, chip, plan or size"):
        compile_model(prepare(replace(REQUEST, soc="sm8750")), interrupted)


@pytest.mark.full
def test_a_bundle_runs_as_it_is(bundle: Path) -> None:
    count = 8 if exhaustive() else 3  # of tokens, which take the emulator a second each
    with LLM("demo", device="gpu", max_seq_len=96) as llm:
        expected = llm.generate("Once upon a time", max_tokens=count).text
    with LLM(str(bundle)) as llm:
        assert llm.max_seq_len == 96
        assert llm.devices.name("npu") == "qnn"
        result = llm.generate("Once upon a time", max_tokens=count)
        counts = llm.devices.devices["npu"].store.counts  # type: ignore[attr-defined]
    assert result.text == expected
    assert set(result.stats.placement) == {"gpu", "npu"}
    assert (counts.compiled, counts.rebuilt) == (0, [])


def test_the_manifest_says_what_was_compiled(bundle: Path) -> None:
    manifest = find_bundle(bundle)
    assert manifest is not None
    assert (manifest.soc, manifest.htp_arch, manifest.graph_sizes) == ("sm8650", 75, (1, 32))
    assert manifest.licence
    names = {name for graph in manifest.graphs for name in graph.nodes}
    assert names == {f"layer{i}.{op}" for i in range(4) for op in ("qkv", "o", "gate_up", "down")}
    for graph in manifest.graphs:
        assert (bundle / GRAPHS_DIRECTORY / graph.entry / "graph_qnn.bin").stat().st_size == (
            graph.size_bytes
        )


@pytest.mark.full
@pytest.mark.parametrize("name", ["out", "none/../out"])
def test_a_relative_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compile_model(prepare(REQUEST), Path(name), stop)
    assert list((tmp_path / "out" / GRAPHS_DIRECTORY).iterdir())


def test_a_finished_bundle_is_not_overwritten(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already holds a compiled model"):
        compile_model(prepare(REQUEST), bundle)
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is not empty"):
        compile_model(prepare(REQUEST), tmp_path)


def test_a_plan_that_the_graphs_were_not_compiled_for_is_refused(
    bundle: Path, tmp_path: Path
) -> None:
    manifest = find_bundle(bundle)
    assert manifest is not None
    assert manifest.load_plan(bundle).plan_id == manifest.plan_id
    text = (bundle / PLAN_FILE).read_text(encoding="utf-8")
    (tmp_path / PLAN_FILE).write_text(text.replace('"prefill"', '"decode"', 1), encoding="utf-8")
    with pytest.raises(ModelError, match=r"does not have the SHA-256 that compiled\.json names"):
        manifest.load_plan(tmp_path)
    (tmp_path / PLAN_FILE).unlink()
    with pytest.raises(ModelError, match=r"plan\.json: cannot be read"):
        manifest.load_plan(tmp_path)


def test_a_damaged_manifest_is_named(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / BUNDLE_FILE).write_text('{"kind": "hetero-compiled"}')
    with pytest.raises(ModelError, match=r"compiled\.json: model: Field required"):
        find_bundle(tmp_path)


def test_dry_run_writes_nothing(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["compile", "random:llama-3.2-1b", "--soc", "sm8650", "--dry-run", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--graph-sizes", "32,256", "--strategy", "layer"])
    first, memory, shared, last = capsys.readouterr().out.strip().splitlines()
    assert "128 graphs" in first
    assert "in 1 of 4 process domains of 3,584 MiB, a context is a graph: layer0.qkv to" in memory
    assert "in 4 calls of up to 256. 64 of the 64 graphs of a call (100%) are shared" in shared
    found = json.loads(last)
    assert found["prompt"]["calls"] == [256] * 4
    assert found["prompt"]["built"] * 4 == found["prompt"]["apart"] == 256
    assert found["graph_sizes"] == [32, 256]
    assert 1.0e9 < found["graphs_bytes"] < 1.4e9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_model_that_does_not_fit_names_the_smallest_change() -> None:
    large = CompileRequest("random:llama-3-8b", "sm8450", graph_sizes=(256,))
    with pytest.raises(UserError, match=r"need [\d,]+ MiB.*give some matmuls to the GPU"):
        prepare(large)
    sizes = (1, 32, 64, 96, 128, 192, 224, 256)
    some = CompileRequest("random:llama-3.2-1b", "sm8450", graph_sizes=sizes, share_weights=False)
    with pytest.raises(
        UserError, match=r"--share-weights or --graph-sizes 1,32,64,96,128,192,224 fits"
    ):
        prepare(some)
    assert prepare(replace(some, share_weights=None)).share_weights
    assert not prepare(replace(some, soc="sm8650", share_weights=False)).share_weights


def test_a_large_model_shares_weights_and_fills_several_process_domains() -> None:
    ready = prepare(CompileRequest("random:llama-3-8b", "sm8650"))
    assert ready.share_weights
    assert len(ready.domains) == 2
    assert all(0 < x.weight_bytes <= DOMAIN_BYTES for x in ready.domains)
    assert sum(x.contexts for x in ready.domains) == 4 * 32
    total = sum(x.weight_bytes for x in ready.domains)
    assert total == sum(job.layout_bytes for job in ready.jobs) > DOMAIN_BYTES
    said = ready.describe_memory()
    assert "in 2 of 4 process domains" in said
    assert "layer0.qkv to" in said
    assert f"GPU: {ready.gpu_bytes / 2**20:,.0f} MiB" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"soc": "sm9999"}, "unknown chip 'sm9999'"),
        ({"model": "nowhere"}, "there is no such directory"),
        ({"weights": "w4a8"}, "w4a8"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(replace(REQUEST, **change))  # type: ignore[arg-type]


def test_a_cut_matmul_is_compiled_segment_by_segment() -> None:
    plan = prepare(REQUEST).plan
    cut = (
        Tile(device="gpu", tokens=(0, None), rows=(0, 256)),
        Tile(device="npu", tokens=(0, None), rows=(256, 1536)),
    )
    whole = (Tile(device="npu", tokens=(0, 32), rows=(0, 1536), graph_size=32),)
    base = next(op for op in plan.ops if op.op == "gate_up" and op.phase == "prefill")
    entries = (
        *(op for op in plan.ops if (op.phase, op.op) != ("prefill", "gate_up")),
        base.model_copy(update={"tiles": cut, "strategy": "row-cut"}),
        base.model_copy(update={"tiles": whole, "m": 32}),
    )
    jobs = prepare(replace(REQUEST, plan=plan.model_copy(update={"ops": entries}))).jobs
    found = {job.name: job.sizes for job in jobs if job.name.startswith("layer0.gate_up")}
    assert found == {"layer0.gate_up[0:256]": (32,), "layer0.gate_up[256:1536]": (1, 32)}


def test_other_operations_are_compiled_where_the_plan_has_them_on_the_npu() -> None:
    compilation = prepare(REQUEST)
    spec = compilation.loaded.spec()
    npu = layer_level(spec, prefill="npu", decode="npu", non_matmul="npu", graph_sizes=(1, 32))
    jobs = prepare(replace(REQUEST, plan=npu)).jobs
    kinds = {type(job.op).__name__ for job in jobs}
    assert kinds == {"Embed", "RMSNorm", "MatMul", "Rope", "Attention", "GatedAct"}


@pytest.mark.full
def test_shared_weights_make_one_file_for_each_weight(tmp_path: Path) -> None:
    shared = replace(REQUEST, share_weights=True)
    assert prepare(shared).estimate.graphs_bytes < prepare(REQUEST).estimate.graphs_bytes
    manifest = compile_model(prepare(shared), tmp_path / "shared")
    assert len(manifest.graphs) == 16
    assert {graph.tokens for graph in manifest.graphs} == {(1, 32)}
    assert all(len(graph.files) == 3 for graph in manifest.graphs)


@pytest.mark.full
def test_fused_groups_are_compiled_as_the_runtime_asks_for_them(tmp_path: Path) -> None:
    make_checkpoint(Case("tiny", "Llama", {"num_hidden_layers": 2}), tmp_path / "model")
    request = CompileRequest(str(tmp_path / "model"), "sm8650", max_seq_len=40)
    spec = prepare(request).loaded.spec()
    plan = single_device(spec, "npu", graph_sizes=(1, 32))
    plan = plan.model_copy(update={"fused": ("block",)})
    ready = prepare(replace(request, plan=plan))
    assert [job.name for job in ready.jobs] == [
        "embed", "layer0.block", "layer1.block", "final_norm", "lm_head"
    ]  # fmt: skip
    compile_model(ready, tmp_path / "bundle")
    with LLM(str(tmp_path / "bundle")) as llm:
        llm.engine.prefill(llm.context, [3, 4, 5])
        llm.engine.decode(llm.context, 6)
        store = llm.devices.devices["npu"].store  # type: ignore[attr-defined]
    assert (store.counts.compiled, store.counts.rebuilt) == (0, [])


@pytest.mark.full
@pytest.mark.parametrize("fused", [(), ("block",)])
def test_windows_have_graphs_for_the_rows_that_they_keep(tmp_path: Path, fused: Any) -> None:
    """Beside those of layers without one, whose caches are longer."""
    changes = {"sliding_window": 24, "head_dim": 32, "num_hidden_layers": 2}
    make_checkpoint(Case("tiny", "Gemma2", changes), tmp_path / "model")
    request = CompileRequest(str(tmp_path / "model"), "sm8650", max_seq_len=448)
    spec = prepare(request).loaded.spec()
    plan = single_device(spec, "npu", graph_sizes=(1, 32)).model_copy(update={"fused": fused})
    ready = prepare(replace(request, plan=plan))
    found = {
        name: {shape.context for shape in job.shapes}
        for job in ready.jobs
        for name in job.names
        if "attention" in name or "block" in name
    }
    name = "block" if fused else "attention"
    rows = 24 + 64 + 64 + 32  # the window, those kept behind it, a stride, a call
    assert found == {f"layer0.{name}": {128, rows}, f"layer1.{name}": {128, 448 + 32}}
    shared = ready.sharing(440)
    assert shared is not None
    assert len(shared.calls) == 14


@pytest.mark.full
def test_a_service_has_graphs_for_caches_that_keep_all(tmp_path: Path) -> None:
    """Of a model whose layers all have windows: no other layer's graphs would do."""
    changes = {"sliding_window": 24, "num_hidden_layers": 1}
    make_checkpoint(Case("tiny", "Mistral", changes), tmp_path / "model")
    request = CompileRequest(str(tmp_path / "model"), "sm8650", max_seq_len=448)
    plan = single_device(prepare(request).loaded.spec(), "npu", graph_sizes=(1, 32))
    for whole in (False, True):
        out = tmp_path / f"{whole}"
        manifest = compile_model(prepare(replace(request, plan=plan, whole_caches=whole)), out)
        assert ("whole_caches" in (out / BUNDLE_FILE).read_text("utf-8")) == whole
        assert find_bundle(out) == manifest
        with LLM(str(out)) as llm:
            assert llm.context.cache.layout.slides != whole
            llm.engine.prefill(llm.context, [3 + i % 90 for i in range(300)])
            store = llm.devices.devices["npu"].store  # type: ignore[attr-defined]
        assert (store.counts.compiled, store.counts.rebuilt) == (0, [])
    with pytest.raises(UserError, match="keep all, as a service has them: compile it with --whole"):
        Service(str(tmp_path / "False"), directory=tmp_path / "kept")


@pytest.mark.parametrize(
    ("where", "graphs", "shared", "built", "apart"),
    [
        # 24 layers of qkv, o, gate_up and down; the GPU has everything else.
        ("matmuls of prefill", 96, 96, 96, 4 * 96),
        # 9 operations a layer, embedding and last norm; 24 attend, in two context lengths. The
        # last call has the output head as well.
        ("everything", 24 * 9 + 2, 24 * 8 + 2, 24 * 10 + 3, 4 * (24 * 9 + 2) + 1),
    ],
)
def test_chunks_of_a_prompt_share_their_graphs(
    where: str, graphs: int, shared: int, built: int, apart: int
) -> None:
    """mllm-NPU, section 3.2: 120 of 144 of Qwen1.5-1.8B's, and 75 % of the memory, at 1024 tokens
    in chunks of 256.
    """
    spec = model_spec("qwen1.5-1.8b")
    plan = single_device(spec, "npu") if where == "everything" else None
    request = CompileRequest("random:qwen1.5-1.8b", "sm8650", plan, graph_sizes=(1, 256))
    found = prepare(request).sharing(1024)
    assert found is not None
    assert found.calls == (256,) * 4
    assert (found.graphs, found.shared) == (graphs, shared)
    assert (found.built, found.apart) == (built, apart)
    assert found.shared >= 0.8 * found.graphs
    assert found.built_bytes <= 0.3 * found.apart_bytes
    weights = 24 * (3 * 2048 * 2048 + 2048 * 2048 + 3 * 2048 * 5504) * 18 / 32  # 4 bits and scales
    ends = 151936 * 2048 * (2 + 18 / 32) if where == "everything" else 0  # the embedding in fp16
    assert found.built_bytes == pytest.approx(1.06 * (weights + ends), rel=0.02)


def test_a_prompt_on_the_gpu_shares_nothing() -> None:
    spec = model_spec("demo")
    plan = layer_level(spec, prefill="gpu", decode="npu", graph_sizes=(1, 32))
    assert prepare(replace(REQUEST, plan=plan)).sharing(64) is None
