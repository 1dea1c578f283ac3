"""Rows of several contexts in one step that decodes, against each context alone."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.backends.errors import DeviceError
from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.runtime.engine import ContextFullError, Engine
from hetero.runtime.kv.attention_stats import ScoreStats
from hetero.runtime.kv.context import Context
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.placement import Placement
from tests.contexts.models import WAYS, open_llm, plan_of
from tests.runtime.models import tiny_model
from tests.runtime.plans import random_plan
from tests.support.checkpoints import CASES, make_checkpoint, relative_error

pytestmark = pytest.mark.usefixtures("no_chains")

VOCABULARY = 263
GRAPHS = (1, 2, 4, 8, 32, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def filled(engine: Engine, count: int, rng: random.Random) -> list[Context]:
    """Contexts with prompts of their own, of different lengths."""
    contexts = [engine.new_context() for _ in range(count)]
    for context in contexts:
        engine.prefill(context, tokens_of(rng, rng.randint(1, 40)))
    return contexts


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def poison(engine: Engine) -> None:
    """What a step leaves behind is not to be read by the next. Finite: padded graphs multiply what
    lies behind a row by 0.
    """
    for slot in engine.deployment.pool.slots():
        if engine.deployment.pool[slot].dtype == np.float32:
            engine.deployment.pool[slot].array[:] = 1e3


def check(engine: Engine, rows: Sequence[tuple[Context, int]], tolerance: float = 2e-5) -> None:
    """A step of these rows, and the same tokens on copies, one at a time."""
    twins = [context.fork() for context, _ in rows]
    poison(engine)
    found = engine.decode_rows(rows)
    for (context, token), twin, logits in zip(rows, twins, found, strict=True):
        expected = engine.decode(twin, token)
        assert logits is not None
        assert relative_error(logits, expected) < tolerance
        assert context.tokens == twin.tokens
        assert context.cached == twin.cached
        kept = context.cache.read(0, context.cached)
        assert relative_error(kept, twin.cache.read(0, twin.cached)) < tolerance
        twin.close()


def joins_and_leaves(engine: Engine, rng: random.Random, tolerance: float = 2e-5) -> None:
    """Other contexts in other orders, step after step."""
    contexts = filled(engine, 5, rng)
    for count in (2, 5, 3, 4, 5):
        part = rng.sample(contexts, count)
        check(engine, [(context, rng.randrange(VOCABULARY)) for context in part], tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_what_each_is_alone(folder: Path, way: str) -> None:
    with open_llm(folder, way, adapt=False) as llm:
        assert llm.engine.max_rows == 8
        joins_and_leaves(llm.engine, random.Random())
        eight = filled(llm.engine, 8, random.Random(2))
        check(llm.engine, [(context, i) for i, context in enumerate(eight)])


@pytest.mark.full
def test_rows_of_a_plan_of_layers(folder: Path) -> None:
    loaded = open_model(str(folder), weights="f32")
    plan = layer_level(loaded.spec(), decode="npu")
    with LLM(str(folder), weights="f32", plan=plan, max_seq_len=120, kv="f32") as llm:
        joins_and_leaves(llm.engine, random.Random())


@pytest.mark.parametrize("name", ["opt", "gemma2", "phi2"])
@pytest.mark.parametrize("non_matmul", ["gpu", "npu"])
def test_rows_of_every_architecture(tmp_path: Path, name: str, non_matmul: str) -> None:
    """Learned positions, windows, caps, partial rotary embeddings; panels that are gathered."""
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    with engine_of(tmp_path, GRAPHS, non_matmul) as engine:
        joins_and_leaves(engine, random.Random())


@pytest.mark.full
@pytest.mark.parametrize("sync", ["copy", "finish", "event"])
def test_rows_by_every_way_to_wait(folder: Path, sync: Any) -> None:
    with open_llm(folder, "tensor level", sync=sync) as llm:
        joins_and_leaves(llm.engine, random.Random())


def engine_of(
    folder: Path, graphs: Sequence[int], non_matmul: str = "npu", **options: Any
) -> Engine:
    """Reference devices, whose padded graphs write rows behind a call's own."""
    loaded = open_model(str(folder), weights="f32")
    plan = random_plan(
        loaded.spec(),
        40,
        graphs,
        random.Random(3),
        strategies=["row-cut", "npu-only"],
        non_matmul=non_matmul,
    )
    devices: Any = {
        "gpu": open_device("reference", kind="gpu", asynchronous=True),
        "npu": open_device("reference", kind="npu", graph_sizes=tuple(graphs)),
    }
    return Engine(loaded.weights, plan, devices, max_seq_len=80, **options)


def test_padded_graphs_of_a_row_leave_the_others_alone(folder: Path) -> None:
    with engine_of(folder, (4, 16, 64)) as engine:
        assert engine.placement.padded("decode", 1) == 4
        joins_and_leaves(engine, random.Random())


@pytest.mark.full
def test_each_row_tells_what_it_attends_to(folder: Path) -> None:
    with open_llm(folder, "gpu") as llm:
        rng = random.Random(5)
        contexts = filled(llm.engine, 3, rng)
        for context, length in zip(contexts, (15, 20, 31), strict=True):
            context.truncate(0)
            llm.engine.prefill(context, tokens_of(rng, length))
            context.score_stats = ScoreStats(120)
        twins = [context.fork() for context in contexts]
        llm.engine.decode_rows([(context, 7) for context in contexts])
        for context, twin in zip(contexts, twins, strict=True):
            twin.score_stats = ScoreStats(120)
            llm.engine.decode(twin, 7)
            assert context.score_stats is not None
            assert np.array_equal(context.score_stats.rows, twin.score_stats.rows)
            assert np.allclose(
                context.score_stats.sums, twin.score_stats.sums, rtol=1e-4, atol=1e-6
            )
        assert [bool(c.score_stats and c.score_stats.rows.any()) for c in contexts] == [
            True,
            False,
            True,
        ]


def test_work_of_a_step_is_shared_by_its_rows(folder: Path) -> None:
    with engine_of(folder, GRAPHS, non_matmul="gpu", max_gpu_share=0.9) as engine:
        contexts = filled(engine, 3, random.Random(1))
        before = [context.work.copy() for context in contexts]
        engine.decode_rows([(context, 7) for context in contexts])
        run = engine.runner.last_run
        parts = [c.work.since(was) for c, was in zip(contexts, before, strict=True)]
        for kind, ops in run.counts.items():
            assert sum(part.devices[kind].ops for part in parts) == ops
            busy_s = run.usage[kind].busy_s
            assert sum(part.devices[kind].busy_s for part in parts) == pytest.approx(busy_s)
        assert [part.tokens for part in parts] == [1, 1, 1]
        assert all(part.wall_s > 0 for part in parts)


@pytest.mark.full
def test_a_row_that_is_not_finite_harms_no_other(folder: Path) -> None:
    with open_llm(folder, "tensor level") as llm:
        engine = llm.engine
        good, bad, other = filled(engine, 3, random.Random(1))
        bad.cache.layer(1)[0][:, 0] = np.nan
        bad.cache.wrote(1, 0, 1)
        length, twin = len(bad), good.fork()
        found = engine.decode_rows([(good, 1), (bad, 2), (other, 3)])
        assert [logits is None for logits in found] == [False, True, False]
        assert (len(bad), bad.cached) == (length, length)
        expected = engine.decode(twin, 1)
        assert found[0] is not None
        assert relative_error(found[0], expected) < 2e-5
        with pytest.raises(DeviceError, match="values are not finite"):
            engine.decode(bad, 2)


@pytest.mark.parametrize("launch", [0, 11, 25])
def test_a_device_that_fails_is_dropped_and_the_step_done(folder: Path, launch: int) -> None:
    with engine_of(folder, GRAPHS, non_matmul="gpu") as engine:
        contexts = filled(engine, 3, random.Random(1))
        expected = [engine.decode(c.fork(), i).copy() for i, c in enumerate(contexts)]
        faults: Any = engine.devices["gpu"]
        faults._faults = type(faults._faults)(fail_launch=faults._launches + launch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = engine.decode_rows([(context, i) for i, context in enumerate(contexts)])
        assert [w.category for w in caught] == [FallbackWarning]
        for logits, wanted in zip(found, expected, strict=True):
            assert logits is not None
            assert relative_error(logits, wanted) < 2e-5
        check(engine, [(context, 9) for context in contexts])


def test_what_cannot_be_one_step_is_refused(folder: Path) -> None:
    with open_llm(folder, "npu") as llm:
        one, other = filled(llm.engine, 2, random.Random(1))
        for rows in ([(one, 1)], [(one, 1), (one, 2)], []):
            with pytest.raises(ValueError, match="2 to 8 contexts, each once"):
                llm.engine.decode_rows(rows)
        other.truncate(0)
        llm.engine.prefill(other, [1] * 120)
        before = one.tokens
        with pytest.raises(ContextFullError):
            llm.engine.decode_rows([(one, 1), (other, 2)])
        assert one.tokens == before


def test_blocks_that_are_one_graph_decode_alone(folder: Path) -> None:
    spec = open_model(str(folder), weights="f32").spec()
    device = open_device("reference", kind="npu", graph_sizes=GRAPHS)
    plan = single_device(spec, "npu")
    for fused, joins in (((), True), (("feed_forward",), True), (("block",), False)):
        changed = plan.model_copy(update={"fused": fused})
        placement = Placement(changed, spec, {"npu": device.capabilities})
        assert placement.joins is joins


@pytest.mark.full
def test_a_step_keeps_no_context_alive(folder: Path) -> None:
    with open_llm(folder, "npu") as llm:
        contexts = filled(llm.engine, 3, random.Random(1))
        llm.engine.deployment.warm_rows(contexts)
        llm.engine.decode_rows([(context, 1) for context in contexts])
        buffers = [weakref.ref(c.cache["k_cache.0"].buffer) for c in contexts]
        contexts.pop().close()
        gc.collect()
        assert buffers[2]() is None
        assert buffers[0]() is not None
        check(llm.engine, [(context, 4) for context in contexts])


def test_plans_of_the_ways_cut_matmuls(folder: Path) -> None:
    """Or the tests above would show less than they say."""
    cut = plan_of(folder, "tensor level")
    assert any(len(entry.tiles) > 1 for entry in cut.ops if entry.phase == "decode")
