"""Prompts of several texts in one step, against each text alone."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hetero.backends.registry import open_device
from hetero.errors import FallbackWarning
from hetero.models import open_model
from hetero.runtime.engine import Engine
from hetero.runtime.hidden_states import hidden_states, max_together, states_together
from hetero.runtime.kv.context import Context
from hetero.solver.handmade import single_device
from hetero.solver.placement import Placement
from tests.contexts.models import WAYS, open_llm
from tests.runtime.models import tiny_model
from tests.runtime.test_rows import GRAPHS, engine_of, poison, tokens_of
from tests.support.checkpoints import CASES, GEMMA4, make_checkpoint, relative_error

pytestmark = pytest.mark.usefixtures("no_chains")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def alone(engine: Engine, context: Context, text: Sequence[int]) -> npt.NDArray[np.float32]:
    context.rewind(0)
    return np.concatenate(list(hidden_states(engine, context, text, every=True)))


def check(engine: Engine, rng: random.Random, tolerance: float = 2e-5) -> None:
    """Texts of many lengths, and then an answer's beginning on the same context."""
    context = engine.new_context()
    for length in (8, 16):
        most = max_together(engine, length)
        assert most == min(8, engine.placement.longest // length) > 1
        for count in {2, most}:
            texts = [tokens_of(rng, rng.randint(1, length)) for _ in range(count)]
            expected = [alone(engine, context, text) for text in texts]
            context.rewind(0)
            poison(engine)
            found = states_together(engine, context, texts, length)
            assert found is not None
            for states, text, wanted in zip(found, texts, expected, strict=True):
                assert relative_error(states[: len(text)], wanted) < tolerance
            assert context.cached == len(context) == 0
    assert relative_error(alone(engine, context, texts[0]), expected[0]) < tolerance
    context.close()


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_what_each_is_alone(folder: Path, way: str) -> None:
    with open_llm(folder, way, adapt=False) as llm:
        check(llm.engine, random.Random())


@pytest.mark.parametrize("name", ["opt", "gemma2", "phi2", "lfm2", "qwen3.5"])
@pytest.mark.parametrize("non_matmul", ["gpu", "npu"])
def test_texts_of_every_architecture(tmp_path: Path, name: str, non_matmul: str) -> None:
    """Learned positions, windows, caps, partial rotary embeddings, states."""
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    with engine_of(tmp_path, GRAPHS, non_matmul) as engine:
        check(engine, random.Random())


@pytest.mark.parametrize("sync", ["finish", "event"])
def test_texts_by_every_way_to_wait(folder: Path, sync: Any) -> None:
    with open_llm(folder, "tensor level", sync=sync) as llm:
        check(llm.engine, random.Random())


def test_padded_graphs_of_a_text_leave_the_others_alone(folder: Path) -> None:
    with engine_of(folder, (4, 32, 64)) as engine:
        assert engine.placement.padded("prefill", 8) == 32
        check(engine, random.Random())


def test_a_failed_device_leaves_texts_to_be_read_alone(folder: Path) -> None:
    rng = random.Random(1)
    texts = [tokens_of(rng, 8) for _ in range(3)]
    with engine_of(folder, GRAPHS, non_matmul="gpu") as engine:
        context = engine.new_context()
        expected = [alone(engine, context, text) for text in texts]
        context.rewind(0)
        faults: Any = engine.devices["gpu"]
        faults._faults = type(faults._faults)(fail_launch=faults._launches + 11)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert states_together(engine, context, texts, 8) is None
        assert [w.category for w in caught] == [FallbackWarning]
        assert list(engine.devices) == ["npu"]
        found = states_together(engine, context, texts, 8)
        assert found is not None
        assert relative_error(found, np.array(expected)) < 2e-5


def test_what_cannot_be_one_step_is_not(folder: Path, tmp_path: Path) -> None:
    """Blocks that are one graph, layers that read another's keys, too many texts."""
    spec = open_model(str(folder), weights="f32").spec()
    device = open_device("reference", kind="npu", graph_sizes=GRAPHS)
    plan = single_device(spec, "npu").model_copy(update={"fused": ("block",)})
    placement = Placement(plan, spec, {"npu": device.capabilities})
    assert not placement.joins_at("prefill", 16)
    with open_llm(folder, "npu") as llm:
        context = llm.new_context()
        texts = [[5] * 8] * 9
        assert states_together(llm.engine, context, texts, 8) is None
        assert states_together(llm.engine, context, texts[:8], 8) is not None
    make_checkpoint(GEMMA4, tmp_path)
    with engine_of(tmp_path, GRAPHS) as engine:
        assert max_together(engine, 8) == 1
