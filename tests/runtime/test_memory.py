"""What a model needs is known before anything is allocated, and too much is refused in numbers."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM, UserError
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import HostBuffer
from hetero.backends.ops import MatMul, Outliers
from hetero.backends.registry import open_device
from hetero.models import open_model
from hetero.models.gguf import packed_store
from hetero.models.graph import model_graph
from hetero.runtime import memory_estimate
from hetero.runtime.engine import Engine
from hetero.runtime.sizes import cache_layout, pool_bytes
from hetero.runtime.slot_refs import SlotRef
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.placement import Placement
from tests.models.gguf_files import write_mixed
from tests.runtime.models import context_of, tiny_model
from tests.runtime.plans import random_plan

GRAPHS = (1, 2, 4, 8, 32, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


def make_engine(folder: str, plan: ExecutionPlan, *, panels: bool = True, **options: Any) -> Engine:
    gpu = open_device("reference", kind="gpu", asynchronous=True)
    npu = open_device("reference", kind="npu", graph_sizes=GRAPHS)
    limits = options.pop("limits", {})
    gpu.capabilities = dataclasses.replace(gpu.capabilities, reads_panels=panels, **limits)
    own, kind = options.pop("npu_bytes", {}), options.pop("per_graph_size", "nothing")
    npu.capabilities = dataclasses.replace(npu.capabilities, weight_bytes=own, per_graph_size=kind)
    devices: Any = {"gpu": gpu, "npu": npu}
    kept = {kind: devices[kind] for kind in plan.devices()}
    weights = open_model(folder, weights="f32").weights
    return Engine(weights, plan, kept, max_seq_len=80, **options)


def plan_of(folder: str, name: str) -> ExecutionPlan:
    spec = open_model(folder, weights="f32").spec()
    plans = {
        "gpu": lambda: single_device(spec, "gpu"),
        "layer": lambda: layer_level(spec),
        "cut": lambda: random_plan(spec, 40, GRAPHS, random.Random(3), strategies=["hybrid-cut"]),
    }
    return plans[name]()


@pytest.mark.parametrize(
    ("name", "panels"), [("gpu", True), ("layer", True), ("cut", True), ("cut", False)]
)
def test_the_pool_has_the_size_that_was_computed(folder: str, name: str, panels: bool) -> None:
    plan = plan_of(folder, name)
    with make_engine(folder, plan, panels=panels) as engine:
        assert engine.deployment.pool.nbytes == engine.memory.pool_bytes
        engine.prefill(context_of(engine), list(range(40)))
        assert engine.deployment.pool.nbytes == engine.memory.pool_bytes, "a step allocated"
        assert engine.memory.largest_bytes < engine.memory.pool_bytes
        room = SlotRef("qkv", gathered=True)
        assert (room in engine.deployment.pool.slots()) == (not panels)
        alone = sum(4 * m.n * m.k * m.count for m in model_graph(engine.config, "f32").matmuls)
        assert engine.memory.weight_bytes >= alone - 16 * 4 * 64  # the last block of rows is padded
        bound = pool_bytes(engine.config, engine.max_seq_len, 512)
        assert bound >= engine.memory.pool_bytes + engine.memory.context_bytes or not panels


def test_rows_on_both_devices_count_twice(folder: str) -> None:
    plans = plan_of(folder, "layer"), plan_of(folder, "gpu")
    with make_engine(folder, plans[0]) as both, make_engine(folder, plans[1]) as one:
        blocks = one.memory.weight_bytes - 4 * 64 * 272  # all but the head, its rows padded
        assert both.memory.weight_bytes == one.memory.weight_bytes + blocks


def test_graphs_with_weights_of_their_own_count_once_for_each_size(folder: str) -> None:
    plan = plan_of(folder, "layer")  # of any token count: every graph may be used
    kinds = ("nothing", "graph", "weights")
    found = {}
    for kind in kinds:
        with make_engine(folder, plan, per_graph_size=kind) as engine:
            found[kind] = engine.memory.weight_bytes
    with make_engine(folder, plan_of(folder, "gpu")) as one:
        blocks = one.memory.weight_bytes - 4 * 64 * 272
    assert found["graph"] == found["nothing"]
    assert found["weights"] == found["nothing"] + (len(GRAPHS) - 1) * blocks


def test_a_devices_own_layout_counts_as_it_says(folder: str) -> None:
    plan = plan_of(folder, "cut")
    with make_engine(folder, plan, npu_bytes={WeightFormat.F32: 4.0}) as engine:
        stored = engine.memory.weight_bytes
        mine = sum(
            4 * (rows[1] - rows[0]) * node.op.k
            for node in engine.placement.graph.nodes
            if isinstance(node.op, MatMul)
            for rows, *_ in engine.placement.kernels.segments(node, "npu")
        )
    with make_engine(folder, plan, npu_bytes={WeightFormat.F32: 10.0}) as engine:
        assert engine.memory.weight_bytes == stored + mine // 4 * 6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"memory_budget_bytes": 100_000}, r"needs 1\.\d\d MiB .* the memory budget is 0\.10 MiB"),
        ({"limits": {"max_allocation_bytes": 4096}}, "reference allocates at most 0.00 MiB"),
        ({}, r"this machine's memory is 0\.50 MiB"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated(
    folder: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    made: list[int] = []
    original = HostBuffer.__init__
    if not options:
        monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: 1 << 19)

    def record(self: HostBuffer, nbytes: int) -> None:
        made.append(nbytes)
        original(self, nbytes)

    monkeypatch.setattr(HostBuffer, "__init__", record)
    with pytest.raises(UserError, match=sentence):
        make_engine(folder, plan_of(folder, "cut"), **options)
    assert made == []


@pytest.mark.full
def test_a_mapped_model_larger_than_the_memory_runs_where_it_is_used_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time and later; not on a device that makes copies, nor beyond a budget."""
    monkeypatch.setattr(packed_store, "folder", lambda: tmp_path / "stores")
    monkeypatch.setattr(packed_store, "SMALLEST_BYTES", 0)
    path = str(write_mixed(tmp_path / "m.gguf", np.random.default_rng(0)))
    wanted, needs = answer(path, device="gpu")
    for store in (tmp_path / "stores").iterdir():
        store.unlink()
    others = needs.total_bytes - needs.weight_bytes
    monkeypatch.setattr(memory_estimate, "memory_bytes", lambda: others + needs.weight_bytes // 2)
    for _ in range(2):
        tokens, mapped = answer(path, device="gpu")
        assert tokens == wanted
        assert mapped.mapped_bytes == needs.weight_bytes
    with pytest.raises(UserError, match="this machine's memory is"):
        LLM(path, device="npu", max_seq_len=64)
    with pytest.raises(UserError, match="the memory budget is"):
        LLM(path, device="gpu", max_seq_len=64, memory_budget=needs.weight_bytes)
    monkeypatch.setattr(packed_store, "SMALLEST_BYTES", 1 << 40)
    with pytest.raises(UserError, match="this machine's memory is"):
        LLM(path, device="gpu", max_seq_len=64)


def answer(path: str, **options: Any) -> tuple[list[int], memory_estimate.MemoryEstimate]:
    with LLM(path, max_seq_len=64, **options) as llm:
        return llm.generate([5, 6, 7], max_tokens=4).tokens, llm.engine.memory


def test_a_budget_is_said_in_units_and_bounds_plan_and_pool(folder: str) -> None:
    plan = plan_of(folder, "layer")
    with pytest.raises(UserError, match=r"the memory budget is 1\.00 MiB: open it with a smaller"):
        LLM(folder, plan=plan, max_seq_len=64, memory_budget="1MiB")
    with LLM(folder, plan=plan, max_seq_len=64, memory_budget="1GiB") as llm:
        assert llm.engine.memory.total_bytes < 1 << 30


def test_lists_of_what_codes_cut_off_count_as_memory(folder: str) -> None:
    """A column and a value of every feature, for each token that a call writes."""
    config, found = open_model(folder, weights="f32").config, []
    able = {"gpu": open_device("reference", kind="gpu").capabilities}
    for excess in (False, True):
        op = Outliers(n=config.hidden_size, k=config.intermediate_size, hot=2, excess=excess)
        graph = model_graph(config, WeightFormat.W8A8, shadows={"blocks.1.down": op})
        placement = Placement(single_device(graph, "gpu"), graph, able)  # type: ignore[arg-type]
        layout = cache_layout(config, 64)
        slots = {SlotRef("x"): ((4, 4), np.dtype(np.float32))}
        found.append(memory_estimate.estimate_memory(slots, layout, placement))
    lists = 4 * placement.written * (1 + 2 * config.intermediate_size)
    assert found[1].pool_bytes - found[0].pool_bytes == lists
    assert found[1].largest_bytes == max(lists, found[0].largest_bytes)


@pytest.mark.full
@pytest.mark.parametrize("device", ["gpu", "npu", "hetero"])
def test_what_lies_there_twice_is_counted(device: str) -> None:
    with LLM("demo", device=device) as llm:  # type: ignore[arg-type]
        needs, placement = llm.engine.memory, llm.engine.placement
        assert needs.weight_bytes == sum(placement.kernels.weight_bytes.values())
        assert needs.copied_bytes == max(needs.weight_bytes - placement.kernels.stored_bytes, 0)
        if device == "gpu":  # reads them where they are stored
            assert needs.copied_bytes == 0
        if device == "hetero":
            assert 0 < needs.copied_bytes < needs.weight_bytes
