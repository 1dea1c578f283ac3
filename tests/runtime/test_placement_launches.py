"""The engine launches what the placement says, and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.backends.registry import open_device
from hetero.models import LoadedModel, open_model
from hetero.runtime.engine import Engine
from hetero.runtime.step import Step
from hetero.solver.placement import Placement
from hetero.solver.plan import Phase
from tests.runtime.models import context_of, tiny_model
from tests.runtime.plans import random_plan
from tests.support.selection import examples

GRAPHS = (1, 8, 32, 64)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: Any) -> LoadedModel:
    folder: Path = tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    return open_model(str(folder), weights="f32")


def launched(step: Step) -> Counter[Any]:
    """Node, device, tokens, rows and bound token count of every launch but gathering ones."""
    return Counter(
        (x.node, x.kind, x.tokens, x.rows, x.call.m)
        for x in step.launches
        if not x.call.name.endswith("(gather)")
    )


def said(placement: Placement, phase: Phase, m: int, logit_rows: int) -> Counter[Any]:
    found: list[Any] = []
    for node, kind, graph, parts, _, heads in placement.at(phase, m, logit_rows):
        found += [(node.name, x.kind, (0, m), None, x.graph) for x in heads]
        if kind is not None and not heads:
            found.append((node.name, kind, (0, m), None, graph))
        found += [(node.name, x.kind, x.tokens, x.rows, x.graph) for x in parts]
    return Counter(found)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(4, 64),  # a pool for as many as are verified here
    non_matmul=st.sampled_from(["gpu", "npu"]),
)
@pytest.mark.parametrize("backend", ["null", "reference"])
def test_a_steps_launches_are_those_of_the_placement(
    loaded: LoadedModel, backend: str, seed: int, tokens: int, non_matmul: str
) -> None:
    plan = random_plan(
        loaded.spec(), tokens, GRAPHS, random.Random(seed), non_matmul=non_matmul, shares=True
    )
    devices: Any = {
        "gpu": open_device(backend, kind="gpu"),
        "npu": open_device(backend, kind="npu", graph_sizes=GRAPHS),
    }
    with Engine(loaded.weights, plan, devices, max_seq_len=80) as engine:
        context = context_of(engine)
        few = min(tokens, 3)
        calls: tuple[tuple[Phase, int, int], ...] = (
            ("prefill", tokens, 1), ("prefill", tokens, 0), ("prefill", few, few),
            ("decode", 1, 1), ("decode", 4, 4),
        )  # fmt: skip
        for phase, m, rows in calls:
            step = engine.steps.step(context, phase, m, rows, wait_values=False)
            assert launched(step) == said(engine.placement, phase, m, rows)
