"""Split results equal unsplit ones: every strategy, random cuts, every pair of backends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.registry import open_device
from hetero.models import open_model
from hetero.runtime.engine import Engine
from hetero.runtime.kernels import OnlineCall
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from tests.runtime.models import context_of, emptied, tiny_model
from tests.runtime.plans import STRATEGIES, random_plan
from tests.support.checkpoints import Case, make_checkpoint, relative_error
from tests.support.selection import examples

pytestmark = pytest.mark.usefixtures("no_chains")

GRAPHS = (1, 2, 4, 8, 32, 64)
# w4a8: an activation between two int8 codes rounds to either one as sums are ordered, and what
# follows differs by as much as the format does: up to 0.020 in 600 random cuts (99 % below 0.016),
# while w4a8 differs from w4a16 by 0.02 to 0.058. A tile that is wrong or stale differs by 1.
TOLERANCE = {"f32": 2e-5, "f16": 3e-3, "w4a16": 3e-3, "w8a16": 3e-3, "w4a8": 4e-2}
PAIRS = {
    "real": ("opencl", "ort-cpu"),
    "reference": ("reference", "reference"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def devices_of(pair: str) -> dict[DeviceKind, Device]:
    gpu, npu = PAIRS[pair]
    options: dict[str, Any] = {"graph_sizes": GRAPHS}
    if gpu == "reference":
        fast = {"kind": "gpu", "asynchronous": True}
        return {
            "gpu": open_device("reference", **fast),
            "npu": open_device("reference", kind="npu", **options),
        }
    return {"gpu": open_device(gpu), "npu": open_device(npu, **options)}


def make_engine(
    folder: Path, plan: ExecutionPlan | DeviceKind, pair: str, weights: str, **options: Any
) -> Engine:
    loaded = open_model(str(folder), weights=weights)
    if isinstance(plan, str):
        plan = single_device(loaded.spec(), plan)
    devices = {k: d for k, d in devices_of(pair).items() if k in plan.devices()}
    return Engine(loaded.weights, plan, devices, max_seq_len=160, **options)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Any]:
    """Logits of the unsplit model after a prompt and after each of three more tokens."""
    engines: dict[str, Engine] = {}

    def logits(weights: str, tokens: list[int]) -> list[Any]:
        if weights not in engines:
            engines[weights] = make_engine(folder, "gpu", "real", weights)
        return run(engines[weights], tokens)

    yield logits
    for engine in engines.values():
        engine.close()


def run(engine: Engine, tokens: list[int]) -> list[Any]:
    context = emptied(engine)
    found = [engine.prefill(context, tokens[:-3]).copy()]
    found += [engine.decode(context, token).copy() for token in tokens[-3:]]
    return found


def check(engine: Engine, tokens: list[int], wanted: list[Any], tolerance: float) -> None:
    for slot in engine.deployment.pool.slots():
        if slot.name not in ("tokens", "position"):
            engine.deployment.pool[slot].array[:] = 7e7  # whatever is not written shows
    for got, want in zip(run(engine, tokens), wanted, strict=True):
        assert np.isfinite(got).all()
        assert relative_error(got, want) < tolerance


SYNCS = [(strategy, "fast") for strategy in STRATEGIES]
SYNCS += [("hybrid-cut", "event"), ("hybrid-cut", "finish")]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("strategy", "sync"), SYNCS)
def test_every_strategy(folder: Path, expected: Any, strategy: str, pair: str, sync: str) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    tokens = np.random.default_rng(1).integers(0, 263, 48).tolist()
    plan = random_plan(spec, 45, GRAPHS, random.Random(5), strategies=[strategy])
    with make_engine(folder, plan, pair, "f32", sync=sync) as engine:
        check(engine, tokens, expected("f32", tokens), TOLERANCE["f32"])
        assert (
            engine.steps.step(context_of(engine), "prefill", 45).copied_bytes == 0
        )  # merging moves nothing


@pytest.mark.parametrize(
    ("pair", "non_matmul"), [("real", "gpu"), ("real", "npu"), ("reference", "gpu")]
)
def test_hand_overs_by_copying_change_no_result_and_are_counted(
    folder: Path, expected: Any, pair: str, non_matmul: str
) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    tokens = np.random.default_rng(1).integers(0, 263, 48).tolist()
    plan = random_plan(spec, 45, GRAPHS, random.Random(5), non_matmul=non_matmul)
    alone = single_device(spec, "gpu")
    with make_engine(folder, plan, pair, "f32", sync="copy") as engine:
        check(engine, tokens, expected("f32", tokens), TOLERANCE["f32"])
        copied = engine.steps.step(context_of(engine), "prefill", 45).copied_bytes
        assert copied > 45 * 64 * 4 * spec.layers  # every layer's hidden states, at the least
        copies = [
            x
            for x in engine.steps.step(context_of(engine), "decode", 1).launches
            if "copy of" in x.call.name
        ]
        assert len(copies) > spec.layers
        if pair == "real":
            assert engine.devices["gpu"].copies > 0  # type: ignore[attr-defined]
    with make_engine(folder, alone, pair, "f32", sync="copy") as engine:
        check(engine, tokens, expected("f32", tokens), TOLERANCE["f32"])
        assert (
            engine.steps.step(context_of(engine), "decode", 1).copied_bytes == 4 * 263
        )  # the logits, for the host


FORMATS = [x for x in WeightFormat if not (x.activations.static or x.of_file)]


@pytest.mark.full
@settings(max_examples=examples(6, 12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(1, 100),
    weights=st.sampled_from(FORMATS),
    pair=st.sampled_from(list(PAIRS)),
    non_matmul=st.sampled_from(["gpu", "npu"]),
)
def test_random_cuts_change_no_result(
    folder: Path,
    expected: Any,
    seed: int,
    tokens: int,
    weights: WeightFormat,
    pair: str,
    non_matmul: str,
) -> None:
    """A strategy of its own for every matmul and phase; prompts at and below the plan's length."""
    rng = random.Random(seed)
    spec = open_model(str(folder), weights=weights.value).spec()
    plan = random_plan(spec, tokens, GRAPHS, rng, non_matmul=non_matmul, shares=True)
    with make_engine(folder, plan, pair, weights.value) as engine:
        for count in {tokens, rng.randint(1, tokens)}:
            ids = np.random.default_rng(seed).integers(0, 263, count + 3).tolist()
            check(engine, ids, expected(weights.value, ids), TOLERANCE[weights.value])


@pytest.mark.parametrize("pair", PAIRS)
def test_the_rest_on_the_npu_reads_split_results(folder: Path, expected: Any, pair: str) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    tokens = np.random.default_rng(2).integers(0, 263, 48).tolist()
    plan = random_plan(spec, 45, GRAPHS, random.Random(3), strategies=["row-cut"], non_matmul="npu")
    with make_engine(folder, plan, pair, "f32") as engine:
        check(engine, tokens, expected("f32", tokens), TOLERANCE["f32"])
        gathers = engine.steps.step(context_of(engine), "prefill", 45).copied_bytes
        assert (gathers > 0) == (pair == "real")  # ONNX Runtime takes whole tensors


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
def test_attention_without_rope_gets_a_cut_qkv_gathered(tmp_path: Path, pair: str) -> None:
    """OPT: attention takes whole tensors, on every device."""
    make_checkpoint(Case("opt", "OPT", {"ffn_dim": 172, "word_embed_proj_dim": 64}), tmp_path)
    spec = open_model(str(tmp_path), weights="f32").spec()
    tokens = np.random.default_rng(2).integers(0, 263, 48).tolist()
    plan = random_plan(spec, 45, GRAPHS, random.Random(3), strategies=["row-cut"])
    with make_engine(tmp_path, "gpu", pair, "f32") as whole:
        wanted = run(whole, tokens)
    with make_engine(tmp_path, plan, pair, "f32") as engine:
        check(engine, tokens, wanted, TOLERANCE["f32"])
        assert (
            engine.steps.step(context_of(engine), "prefill", 45).copied_bytes
            == 4 * 45 * 3 * 64 * spec.layers
        )


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_panels_reach_as_far_as_the_padded_graph_that_reads_them(
    folder: Path, expected: Any, seed: int
) -> None:
    """45 tokens in graphs of 64, read where the GPU left 45: by RoPE, activation and norm."""
    spec = open_model(str(folder), weights="f32").spec()
    tokens = np.random.default_rng(1).integers(0, 263, 48).tolist()
    plan = random_plan(spec, 45, GRAPHS, random.Random(seed), non_matmul="npu")
    with make_engine(folder, plan, "reference", "f32") as engine:
        check(engine, tokens, expected("f32", tokens), TOLERANCE["f32"])
        assert engine.steps.step(context_of(engine), "prefill", 45).copied_bytes == 0


@pytest.mark.full
def test_scoring_and_longer_prompts_than_planned(folder: Path, expected: Any) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    ids = np.random.default_rng(4).integers(0, 263, 150).tolist()
    plan = random_plan(spec, 33, GRAPHS, random.Random(8), strategies=["hybrid-cut", "row-cut"])
    with make_engine(folder, plan, "real", "f32") as engine:
        check(engine, ids, expected("f32", ids), TOLERANCE["f32"])
        scored = engine.score(emptied(engine), ids)
        assert relative_error(scored[-1], expected("f32", ids)[-1]) < 2e-5
        assert scored.shape == (150, 263)


@pytest.mark.parametrize("m", [None, 37])
def test_matmuls_apart(folder: Path, expected: Any, m: int | None) -> None:
    """q, k and v as matmuls of their own, on devices of their own: at all lengths, or at one."""
    loaded = open_model(str(folder), weights="f32")
    config, spec = loaded.config, loaded.spec()
    apart = {
        "q": (config.heads * config.head_dim, "npu"),
        "k": (config.kv_heads * config.head_dim, "gpu"),
        "v": (config.kv_heads * config.head_dim, "npu"),
    }
    document = single_device(spec, "gpu").model_dump(mode="json")
    if m is None:
        document["ops"] = [o for o in document["ops"] if o["op"] != "qkv"]
    for phase in ("prefill", "decode"):
        for name, (n, device) in apart.items():
            document["ops"].append(
                {
                    "phase": phase, "m": m, "op": name, "n": n, "k": config.hidden_size,
                    "strategy": f"{device}-only",
                    "tiles": [{"device": device, "tokens": [0, None], "rows": [0, n]}],
                }
            )  # fmt: skip
    plan = ExecutionPlan.model_validate(document)
    ids = np.random.default_rng(4).integers(0, 263, 40).tolist()
    with make_engine(folder, plan, "real", "f32") as engine:
        qkv = next(node for node in engine.placement.graph.nodes if node.plan_op == "qkv")
        for tokens in (36, 37):
            parts = engine.placement.parts(qkv, "prefill", tokens)
            assert [part.kind for part in parts] == (
                ["gpu"] if tokens != (m or tokens) else ["npu", "gpu", "npu"]
            )
        check(engine, ids, expected("f32", ids), TOLERANCE["f32"])


def test_rows_that_cannot_be_cut_are_named(folder: Path) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    document = single_device(spec, "gpu").model_dump(mode="json")
    entry = next(o for o in document["ops"] if o["op"] == "down" and o["phase"] == "decode")
    entry["tiles"] = [
        {"device": "npu", "tokens": [0, None], "rows": [0, 24]},
        {"device": "gpu", "tokens": [0, None], "rows": [24, entry["n"]]},
    ]
    plan = ExecutionPlan.model_validate(document)
    with pytest.raises(PlanError, match=r"layer0.down: rows \[24, 64\).*a multiple of 16 rows"):
        make_engine(folder, plan, "real", "f32")


def test_a_graph_that_is_not_there_is_named(folder: Path) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    plan = random_plan(spec, 45, (1, 48), random.Random(0), strategies=["npu-only"])
    with pytest.raises(PlanError, match="the plan wants a graph of 48 tokens"):
        make_engine(folder, plan, "real", "f32")


@pytest.mark.parametrize("pair", PAIRS)
def test_online_preparation_makes_the_graphs_of_every_prompt_anew(
    folder: Path, expected: Any, pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    plan = random_plan(spec, 45, (1, 45), random.Random(0), strategies=["npu-only"])
    plan = plan.model_copy(update={"strategy": "online-prepare"})
    tokens = np.random.default_rng(1).integers(0, 263, 48).tolist()
    with make_engine(folder, plan, pair, "f32") as engine:
        made: list[int] = []
        npu = engine.devices["npu"]
        prepare = npu.prepare_graph
        monkeypatch.setattr(
            npu, "prepare_graph", lambda op, w, m: (made.append(m), prepare(op, w, m))[1]
        )
        for _ in range(2):
            check(engine, tokens, expected("f32", tokens), TOLERANCE["f32"])
        matmuls = (
            sum(x.plan_op is not None for x in engine.placement.graph.nodes) - 1
        )  # the head has one token
        assert made == [45] * matmuls * 2
        made.clear()
        engine.prefill(
            emptied(engine), tokens[:30]
        )  # a length that is not listed has exact graphs as well
        assert made == [30] * matmuls
        calls = [launch.call for launch in engine.runner.last_step.launches]
        late = [call for call in calls if isinstance(call, OnlineCall)]
        assert len(late) == matmuls
        engine.prefill(emptied(engine), tokens[:45])  # which frees those of the prompt before
        for call in late:
            with pytest.raises(ValueError, match="prepare"):
                call.run()


def test_a_graph_that_reaches_over_anothers_tokens_is_named(folder: Path) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    document = random_plan(spec, 45, GRAPHS, random.Random(0), strategies=["gpu-only"]).model_dump(
        mode="json"
    )
    entry = next(o for o in document["ops"] if o["op"] == "o" and o["phase"] == "prefill")
    entry["tiles"] = [
        {"device": "npu", "tokens": [0, 20], "rows": [0, entry["n"]], "graph_size": 32},
        {"device": "gpu", "tokens": [20, 45], "rows": [0, entry["n"]]},
    ]
    plan = ExecutionPlan.model_validate(document)
    with pytest.raises(PlanError, match=r"layer0\.o: the graph of 32 tokens at 0 reaches over"):
        make_engine(folder, plan, "real", "f32")
