"""`hetero compile` makes the graphs that the runtime asks for, whatever the plan: all, and no more.

A bundle that lacks one works all the same: it is compiled while a prompt waits.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM
from hetero.compiling.npu_graphs import CompileRequest, compile_model, prepare
from hetero.errors import ModelError, UserError
from hetero.models import open_model
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.plan import AttentionShare, DecodeBand, HeadCounts, OpPlan, Tile
from tests.runtime.plans import random_plan
from tests.support.checkpoints import Case, make_checkpoint
from tests.support.helpers import assert_close

pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("no_graphs")

GRAPHS = (8, 32)
TOKENS = 45
CONTEXT = 80
CUT = 16  # rows: also where no other tile has an edge
KINDS = (
    "layer level", "npu only", "row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut",
    "chunked", "cuts of two lengths", "q, k and v apart", "precision", "orders",
    "cut on the other device", "feed-forward", "block, cut where it is decoded", "shared heads",
    "a band of decoding", "random",
)  # fmt: skip

# What a hybrid cut, or another kind, has in it as well.
MILD = ("npu only", "row-cut", "sequence-cut", "multi-sequence-cut", "chunked", "orders")
# Each compiles for seconds.
LONG = (
    "layer level",
    "precision",
    "cuts of two lengths",
    "q, k and v apart",
    "block, cut where it is decoded",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(Case("tiny", "Llama", {"num_hidden_layers": 1, "vocab_size": 96}), folder)
    return str(folder)


def replaced(plan: ExecutionPlan, *entries: OpPlan) -> ExecutionPlan:
    """The plan with these entries instead of its own of the same matmul, phase and length."""
    keys = {(entry.phase, entry.op, entry.m) for entry in entries}
    kept = (entry for entry in plan.ops if (entry.phase, entry.op, entry.m) not in keys)
    return plan.model_copy(update={"ops": (*kept, *entries)})


def entry(
    spec: ModelGraph, op: str, *tiles: Tile, m: int | None = None, phase: str = "prefill"
) -> OpPlan:
    n, k = spec.shapes[op]  # type: ignore[index]
    return OpPlan.model_validate(
        {"phase": phase, "m": m, "op": op, "n": n, "k": k, "strategy": "row-cut", "tiles": tiles}
    )


def rows(device: str, start: int, stop: int, **more: Any) -> Tile:
    """A tile of all tokens."""
    found = {"device": device, "tokens": (0, None), "rows": (start, stop), **more}
    return Tile.model_validate(found)


def plan_of(kind: str, spec: ModelGraph, seed: int = 0) -> ExecutionPlan:
    rng, n = random.Random(seed), spec.shapes["gate_up"][0]
    whole = layer_level(spec, graph_sizes=GRAPHS)
    npu = single_device(spec, "npu", graph_sizes=GRAPHS)
    match kind:
        case "layer level" | "npu only":
            return whole if kind == "layer level" else npu
        case "row-cut" | "sequence-cut" | "multi-sequence-cut" | "hybrid-cut":
            return sized(random_plan(spec, TOKENS, GRAPHS, rng, strategies=[kind]))
        case "chunked":
            return whole.model_copy(update={"step_tokens": 32, "strategy": "chunked"})
        case "cuts of two lengths":
            cuts = {None: n // 2 // CUT * CUT, 32: CUT, 20: 3 * CUT}
            parts = {m: (rows("npu", 0, cut), rows("gpu", cut, n)) for m, cut in cuts.items()}
            return replaced(whole, *(entry(spec, "gate_up", *t, m=m) for m, t in parts.items()))
        case "q, k and v apart":
            apart = [
                entry(spec, name, rows("gpu" if name == "k" else "npu", 0, spec.shapes[name][0]),
                      phase=phase)
                for phase in ("prefill", "decode") for name in ("q", "k", "v")
            ]  # fmt: skip
            kept = tuple(op for op in whole.ops if op.op != "qkv")
            return whole.model_copy(update={"ops": (*kept, *apart)})
        case "precision":
            tiles = (rows("npu", 0, 64, precision="w4a16"), rows("gpu", 64, n))
            return replaced(whole_gpu(spec), entry(spec, "gate_up", *tiles))
        case "orders":
            one = rows("npu", 0, n, order="transposed")
            two = rows("npu", 0, 64, order="transposed"), rows("npu", 64, n)
            return replaced(
                whole, entry(spec, "gate_up", one, m=20), entry(spec, "gate_up", *two, m=32)
            )
        case "cut on the other device":
            tiles = (
                Tile(device="npu", tokens=(0, 32), rows=(0, n), graph_size=32),
                Tile(device="gpu", tokens=(32, TOKENS), rows=(0, CUT)),
                Tile(device="gpu", tokens=(32, TOKENS), rows=(CUT, n)),
            )
            gpu = whole_gpu(spec)
            kept = tuple(e for e in gpu.ops if (e.phase, e.op) != ("prefill", "gate_up"))
            kept = (*kept, entry(spec, "gate_up", *tiles, m=TOKENS))
            return gpu.model_copy(update={"ops": kept})
        case "shared heads":
            heads = HeadCounts(gpu=3, npu=1)
            share = AttentionShare(phase="prefill", m=None, heads=heads)
            return whole.model_copy(update={"attention": (share,)})
        case "feed-forward" | "a band of decoding":
            ops = tuple(x for x in npu.ops if x.phase == "decode" and x.op not in spec.sampled)
            band = DecodeBand(depth_from=8, device="npu", devices=("npu",), ops=ops)
            banded = whole_gpu(spec).model_copy(update={"bands": (band,)})
            fused = npu.model_copy(update={"fused": ("feed_forward",)})
            return fused if kind == "feed-forward" else banded
        case "block, cut where it is decoded":
            cut = entry(spec, "down", rows("npu", 0, CUT), rows("gpu", CUT, 64), phase="decode")
            return replaced(npu.model_copy(update={"fused": ("block",)}), cut)
        case _:
            non_matmul = rng.choice(("gpu", "npu"))
            return sized(random_plan(spec, TOKENS, GRAPHS, rng, non_matmul=non_matmul))


def sized(plan: ExecutionPlan) -> ExecutionPlan:
    return plan.model_copy(update={"graph_sizes": GRAPHS})


def whole_gpu(spec: ModelGraph) -> ExecutionPlan:
    return single_device(spec, "gpu", graph_sizes=GRAPHS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *(
            pytest.param(
                k,
                0,
                marks=[pytest.mark.exhaustive] * (k in MILD) + [pytest.mark.full] * (k in LONG),
            )
            for k in KINDS
        ),
        *(pytest.param("random", seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 3)),
    ],
)
def test_a_bundle_has_the_graphs_that_any_prompt_runs(
    model: str, kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetero.backends.qnn.graph_store import GraphStore

    weights = "w4a8" if kind == "precision" else "w4a16"
    spec = open_model(model, weights=weights).spec()
    request = CompileRequest(
        model, "sm8650", plan_of(kind, spec, seed), weights=weights, max_seq_len=CONTEXT
    )
    manifest = compile_model(prepare(request), tmp_path / "bundle")
    opened: set[str] = set()
    compile_one = GraphStore.compile

    def noted(store: GraphStore, *graph: Any) -> Path:
        path = compile_one(store, *graph)
        opened.add(path.name)
        return path

    monkeypatch.setattr(GraphStore, "compile", noted)
    with LLM(str(tmp_path / "bundle"), weights=weights) as llm:
        store = llm.devices.devices["npu"].store  # type: ignore[attr-defined]
        assert (store.counts.compiled, store.counts.rebuilt) == (0, [])
        engine, context = llm.engine, llm.context
        for m in range(1, engine.placement.longest + 1):
            engine.steps.step(context, "prefill", m)
        engine.score(context, [3] * 32)
        for m in range(1, 9):
            engine.steps.step(context, "decode", m, m)
        assert (store.counts.compiled, store.counts.rebuilt) == (0, [])
    assert opened == {graph.entry for graph in manifest.graphs}


@pytest.mark.full
def test_both_devices_share_the_heads_of_a_bundle(model: str, tmp_path: Path) -> None:
    """The Hexagon computes one of four heads: logits are those of one device."""
    plan = plan_of("shared heads", open_model(model, weights="w4a16").spec())
    request = CompileRequest(model, "sm8650", plan, max_seq_len=CONTEXT)
    compile_model(prepare(request), tmp_path / "b")
    tokens = list(range(3, 3 + GRAPHS[-1]))
    with LLM(model, device="gpu", gpu="reference", weights="w4a16", kv="f32") as alone:
        expected = alone.logits(tokens)
    with LLM(str(tmp_path / "b")) as llm:
        launches = llm.engine.steps.step(llm.context, "prefill", len(tokens)).launches
        assert {x.kind for x in launches if x.node == "layer0.attention"} == {"gpu", "npu"}
        assert_close(llm.logits(tokens), expected, 1e-2, "shared heads")
        store = llm.devices.devices["npu"].store  # type: ignore[attr-defined]
        assert (store.counts.compiled, store.counts.rebuilt) == (0, [])


@pytest.mark.full
def test_a_plan_and_the_chips_profile_order_the_calls_of_a_prompt(
    model: str, tmp_path: Path
) -> None:
    prompt = list(range(3, 75))
    plan = layer_level(open_model(model, weights="w4a16").spec(), graph_sizes=(8, 32))
    answers, windows = [], []
    for profile in (None, DeviceProfile.load("snapdragon-8-gen-3")):
        out = tmp_path / ("plain" if profile is None else "ordered")
        request = CompileRequest(model, "sm8650", plan, profile, max_seq_len=CONTEXT)
        manifest = compile_model(prepare(request), out)
        assert bool(manifest.profile_sha256) == (profile is not None)
        assert manifest.solver is None
        with LLM(str(out)) as llm:
            windows.append(llm.engine.deployment.window)
            answers.append(llm.generate(prompt, max_tokens=3).tokens)
    assert answers[0] == answers[1]
    assert windows[0] == 1
    assert windows[1] > 1
    (tmp_path / "ordered" / "profile.json").write_text("{}")
    with pytest.raises(ModelError, match=r"profile\.json: does not have the SHA-256"):
        LLM(str(tmp_path / "ordered"))


def test_a_plan_leaves_no_room_for_a_strategy(model: str) -> None:
    plan = layer_level(open_model(model, weights="w4a16").spec())
    with pytest.raises(UserError, match="--strategy row-cut cannot be honoured"):
        LLM(model, plan=plan, strategy="row-cut")


def test_an_order_by_times_needs_a_profile(model: str) -> None:
    plan = layer_level(open_model(model, weights="w4a16").spec())
    with pytest.raises(UserError, match="--order paper sorts calls by the times of a profile"):
        LLM(model, plan=plan, order="paper")


def test_a_profile_that_does_not_know_a_plans_formats_is_refused(model: str) -> None:
    plan = layer_level(open_model(model, weights="f32").spec())
    with pytest.raises(ProfileError, match="f32"):
        LLM(model, weights="f32", plan=plan, profile="snapdragon-8-gen-3")
