"""Several chunks of a prompt in one program: the numbers of one after another, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends.memory import Tensor
from hetero.backends.registry import open_device
from hetero.models import open_model
from hetero.runtime.engine import Engine
from hetero.runtime.holes import MOST_PIECES
from hetero.runtime.launch_graph import LaunchSpec
from hetero.runtime.lowering import Lowering
from hetero.runtime.memory_estimate import gathered_slots
from hetero.runtime.pool import ActivationPool, slot_shapes
from hetero.runtime.program import RUN, SUBMIT
from hetero.runtime.schedule import ordered
from hetero.runtime.slot_refs import SlotRef, position_of
from hetero.runtime.step import Step
from tests.runtime.models import context_of, tiny_model
from tests.runtime.plans import random_order, random_plan
from tests.runtime.stress import GRAPHS, POISON, delay, spoil_pool

CHUNKS = (45, 45, 31)
CONTEXT = 160
Pair = tuple[str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def engine_of(folder: Path, seed: int, backend: str, sync: Any = "fast") -> Engine:
    loaded, rng = open_model(str(folder), weights="f32"), random.Random(seed)
    plan = random_plan(
        loaded.spec(), CHUNKS[0], GRAPHS, rng, non_matmul=("gpu", "npu")[seed % 2], shares=True
    )
    devices: Any = {
        "opencl+ort-cpu": lambda: {
            "gpu": open_device("opencl"),
            "npu": open_device("ort-cpu", graph_sizes=GRAPHS),
        },
        "reference": lambda: {  # a queue that computes nothing until it is waited for
            "gpu": open_device("reference", kind="gpu", asynchronous=True),
            "npu": open_device("reference", kind="npu", graph_sizes=GRAPHS),
        },
        "reference, both queued": lambda: {
            "gpu": open_device("reference", kind="gpu", asynchronous=True),
            "npu": open_device("reference", kind="npu", graph_sizes=GRAPHS, asynchronous=True),
        },
    }[backend]()
    kept = {kind: devices[kind] for kind in plan.devices()}
    return Engine(loaded.weights, plan, kept, max_seq_len=CONTEXT, sync=sync)


def chunked(engine: Engine, chunks: int) -> tuple[ActivationPool, Lowering]:
    """The engine's kernels on a pool with so many sets of slots."""
    shapes = slot_shapes(
        engine.config,
        tokens=engine.deployment.pool.tokens,
        logit_rows=32,
        gathered=gathered_slots(engine.placement, engine.devices),
        chunks=chunks,
        rows=MOST_PIECES,
    )
    owner = engine.devices.get("npu") or engine.devices["gpu"]
    pool = ActivationPool(shapes, owner, engine.deployment.pool.tables)
    pool.map_to(engine.devices.values())
    lowering = Lowering(
        engine.placement,
        engine.deployment.kernels,
        pool,
        engine.devices,
        engine.deployment.synchroniser,
    )
    return pool, lowering


def costs(seed: int) -> Callable[[LaunchSpec], float]:
    """Each launch has some length of its own, so that every seed has another order."""
    return lambda launch: random.Random(f"{seed} {launch}").choice((0.1, 1.0, 3.0))


def run(
    engine: Engine, pool: ActivationPool, step: Step, ids: Sequence[int], at: int = 0
) -> list[Any]:
    """Logits and caches after a step; everything that it has to write was spoiled."""
    spoil_pool(pool)
    start = at
    for chunk, count in enumerate(step.chunks):
        pool.feed(ids[:count], at, chunk=chunk)
        ids, at = ids[count:], at + count
    cache = context_of(engine).cache
    for slot in cache.layout.slots:
        cache[slot].array[:, start:] = POISON
    engine.runner.executor.run(step.on(cache))
    found = [cache[slot].array[:, :at].copy() for slot in cache.layout.slots]
    if step.logits is not None:
        whole = isinstance(step.logits, Tensor)
        found.append((step.logits.array[:1] if whole else step.logits.gather(1)).copy())  # type: ignore[union-attr]
    return found


def one_after_another(engine: Engine, ids: Sequence[int]) -> list[Any]:
    pool, lowering = chunked(engine, 1)
    at = 0
    for i, count in enumerate(CHUNKS):
        rows = int(i == len(CHUNKS) - 1)
        step = lowering.lower("prefill", count, rows, wait_values=False)
        found = run(engine, pool, step, ids[at : at + count], at)
        at += count
    return found


@pytest.mark.full
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(i, marks=pytest.mark.full) for i in range(2, 6))]
)
@pytest.mark.parametrize("backend", ["reference", "reference, both queued", "opencl+ort-cpu"])
def test_chunks_in_one_program_have_the_numbers_of_one_after_another(
    folder: Path, backend: str, seed: int
) -> None:
    ids = np.random.default_rng(seed).integers(0, 263, sum(CHUNKS)).tolist()
    rng = random.Random(seed)
    with engine_of(folder, seed, backend) as engine:
        wanted = one_after_another(engine, ids)
        pool, lowering = chunked(engine, len(CHUNKS))
        steps = [lowering.lower_chunks(CHUNKS, 1, cost=cost) for cost in (None, costs(seed))]
        for _ in range(12):  # 108 orders in the gate, 216 where all is run
            placed = lowering.place("prefill", CHUNKS, 1)
            graph = placed.graph()
            steps.append(placed.bound(ordered(graph, random_order(graph, rng)), {}))
        for step in steps:
            if backend == "opencl+ort-cpu" and "gpu" in engine.devices:
                delay(step.on(context_of(engine).cache), engine.devices["gpu"], rng)
            for _ in range(2):
                found = run(engine, pool, step, ids)
                assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("sync", ["event", "finish", "copy"])
def test_chunks_by_other_waits(folder: Path, sync: str) -> None:
    ids = np.random.default_rng(1).integers(0, 263, sum(CHUNKS)).tolist()
    with engine_of(folder, 4, "reference", sync) as engine:
        wanted = one_after_another(engine, ids)
        pool, lowering = chunked(engine, len(CHUNKS))
        found = run(engine, pool, lowering.lower_chunks(CHUNKS, 1, cost=costs(1)), ids)
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_chunks_that_are_out_of_order_overlap(folder: Path) -> None:
    """Chunks meet in the caches alone, and a slow NPU leaves time for another chunk's launches."""
    with engine_of(folder, 0, "reference") as engine:
        _, lowering = chunked(engine, 2)
        graph = lowering.place("prefill", CHUNKS[:2], 1).graph()
        between = {
            edge.slot for edge in graph.edges
            if graph.launches[edge.before].chunk != graph.launches[edge.after].chunk
        }  # fmt: skip
        assert {slot.name for slot in between} == {
            f"{kind}_cache.{layer}" for kind in "kv" for layer in range(3)
        }
        slow: Any = {"gpu": 1.0, "npu": 9.0, None: 0.0}
        plain, mixed = (
            lowering.lower_chunks(CHUNKS[:2], 1, cost=cost)
            for cost in (None, lambda launch: slow[launch.kind])
        )
        starts = [order(step) for step in (plain, mixed)]
        assert sorted(starts[0]) == sorted(starts[1])
        assert starts[0] != starts[1]


def order(step: Step) -> list[tuple[str, str]]:
    launches = [step.launches[a.launch] for a in step.program if a.code in (SUBMIT, RUN)]
    return [(launch.node, launch.call.name) for launch in launches]


def test_more_chunks_than_sets_of_slots_are_refused(folder: Path) -> None:
    with engine_of(folder, 0, "reference") as engine:
        _, lowering = chunked(engine, 2)
        with pytest.raises(ValueError, match="3 chunks do not fit a pool with slots for 2"):
            lowering.lower_chunks(CHUNKS, 1)


def test_one_set_of_slots_is_the_pool_as_it_was(folder: Path) -> None:
    with engine_of(folder, 0, "reference") as engine:
        one, two = (chunked(engine, n)[0] for n in (1, 2))
        assert one.slots() == engine.deployment.pool.slots()
        assert one.nbytes == engine.deployment.pool.nbytes
        shared = {slot for slot in one.slots() if slot.name == "logits"}
        shared |= {position_of(row) for row in range(1, MOST_PIECES)}
        again = {s._replace(chunk=1) for s in one.slots() if s not in shared}
        assert set(two.slots()) == set(one.slots()) | again
        assert SlotRef("qkv", chunk=1) in two.slots()
