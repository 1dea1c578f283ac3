"""Shadows of outliers in the engine: computed beside their matmul, and the numbers of the walk that
adds them one operation after the other (`bench.lab.schemes`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bench.lab.outliers import OutlyingWeights
from bench.lab.schemes import Schemes
from hetero.backends.ops import Outliers
from hetero.compiling.static_scales import StaticWeights, choose, most_important, static_weights
from hetero.models import LoadedModel, open_model
from hetero.models.graph import model_graph, slot_widths
from hetero.runtime.engine import Engine
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from tests.models.model_helpers import small_config
from tests.runtime.models import context_of
from tests.runtime.plans import random_plan
from tests.runtime.test_split import GRAPHS, devices_of

TEXT = "Once upon a time, there was a young fox named Jasmund. He lived in the village. " * 6
COUNT = 45
# A code of an activation that lies between two flips where devices round differently, which moves
# the logits by some thousandths; a shadow that is left out moves them by more than a tenth.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Case:
    """Weights with outliers and shadows, and what the walk makes of them."""

    weights: StaticWeights
    tokens: list[int]
    wanted: Any
    without: Any


@pytest.fixture(scope="module", params=["all", "50%", "paper"])
def case(request: pytest.FixtureRequest) -> Case:
    exact = open_model("demo", weights="f32")
    outlying = OutlyingWeights(exact.weights, 1)
    tokens = exact.encode(TEXT)
    weights = static_weights(outlying, [tokens[COUNT:]], outliers=request.param)
    schemes = Schemes(LoadedModel("demo", exact.config, outlying, "0" * 64), [tokens[COUNT:]], 160)
    scales = schemes.scales(paper=request.param == "paper")
    kept = most_important(scales, {"all": 1.0, "50%": 0.5, "paper": 0.15}[request.param])
    bare = choose(scales, kept)
    wanted = schemes.chosen(bare).logits(tokens[:COUNT])[-1]
    stripped = StaticWeights(outlying, bare)  # no calibration: nothing runs beside the matmuls
    with engine_of(stripped, "gpu", "reference") as engine:
        without = engine.prefill(context_of(engine), tokens[:COUNT]).copy()
    return Case(weights, tokens[:COUNT], wanted, without)


def engine_of(
    weights: StaticWeights, plan: ExecutionPlan | str, pair: str, **options: Any
) -> Engine:
    if isinstance(plan, str):
        plan = single_device(model_graph(weights.config, "w8a8"), plan)  # type: ignore[arg-type]
    devices = {k: d for k, d in devices_of(pair).items() if k in plan.devices()}
    return Engine(weights, plan, devices, max_seq_len=160, **options)


def off(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", ["reference", "real"])
@pytest.mark.parametrize("device", ["gpu", "npu"])
def test_one_device_computes_both(case: Case, device: str, pair: str) -> None:
    with engine_of(case.weights, device, pair) as engine:
        found = engine.prefill(context_of(engine), case.tokens)
        assert off(found, case.wanted) < TOLERANCE


@pytest.mark.full
@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", ["reference", "real"])
@pytest.mark.parametrize("strategy", ["npu-only", "row-cut", "hybrid-cut"])
def test_the_gpu_computes_them_beside_the_npu(case: Case, strategy: str, pair: str) -> None:
    """On whatever device the rest is; outputs of cut matmuls are read where they lie."""
    graph = model_graph(case.weights.config, "w8a8", shadows=case.weights.outliers())
    plan = random_plan(
        graph, COUNT, GRAPHS, random.Random(2), strategies=[strategy], non_matmul="gpu"
    )
    with engine_of(case.weights, plan, pair) as engine:
        context = context_of(engine)
        for slot in engine.deployment.pool.slots():
            if slot.name not in ("tokens", "position"):
                engine.deployment.pool[slot].array[:] = 7e7  # whatever is not written shows
        assert off(engine.prefill(context, case.tokens), case.wanted) < TOLERANCE
        launches = engine.steps.step(context, "prefill", COUNT).launches
        shadows = [x for x in launches if x.node.endswith("_shadow")]
        assert len(shadows) == len(case.weights.outliers()) > 0
        assert {x.kind for x in shadows} == {"gpu"}


@pytest.mark.full
def test_they_matter(case: Case) -> None:
    """The limit of the tests above tells whether they are there."""
    assert off(case.without, case.wanted) > 2 * TOLERANCE


SHADOW = Outliers(n=24, k=24, hot=2)


def nodes_around(shadows: dict[str, Outliers], **changes: Any) -> Iterator[tuple[str, Any, Any]]:
    graph = model_graph(small_config(**changes), "w8a8", shadows=shadows)
    for before, node, after in zip(graph.nodes, graph.nodes[1:], graph.nodes[2:], strict=False):
        if isinstance(node.op, Outliers):
            yield node.name, before, (node, after)


def test_a_shadow_of_the_stream_stands_before_its_matmul() -> None:
    """So that the GPU has it to compute while the NPU computes the matmul, which nothing awaits."""
    shadows = {"blocks.1.o": SHADOW, "blocks.2.down": Outliers(n=24, k=43, excess=True)}
    (o, _, (node, after)), (down, _, (last, behind)) = nodes_around(shadows)
    assert (o, after.name) == ("layer1.o_shadow", "layer1.o")
    assert (down, behind.name) == ("layer2.down_shadow", "layer2.down")
    assert node.slots == {"x": "attended", "residual": "x", "y": "x3"}
    graph = model_graph(small_config(), "w8a8", shadows=shadows)
    norms = {x.name: x.slots for x in graph.nodes if x.name.endswith("norm")}
    assert norms["layer1.post_norm"]["x"] == norms["final_norm"]["x"] == "x3"
    assert last.slots["residual"] == norms["layer2.post_norm"]["sum"]
    assert slot_widths(small_config(), shadows)["x3"] == 24
    assert "x3" not in slot_widths(small_config())


def test_both_of_a_parallel_block_are_added_to_the_stream() -> None:
    shadows = {"blocks.0.o": SHADOW, "blocks.0.down": Outliers(n=24, k=43, hot=1)}
    changes = {"architecture": "phi", "norm": "layer", "parallel": True, "gated": False}
    found = [node.slots for _, _, (node, _) in nodes_around(shadows, **changes)]
    assert [(x["residual"], x["y"]) for x in found] == [("x", "x3"), ("x3", "x4")]


def test_others_are_added_to_the_output() -> None:
    qkv = Outliers(n=48, k=24, hot=1)
    ((name, before, (node, after)),) = nodes_around({"blocks.1.qkv": qkv})
    assert (name, before.name, after.name) == ("layer1.qkv_shadow", "layer1.qkv", "layer1.rope")
    assert node.slots == {"x": "h", "residual": "qkv_codes", "y": "qkv"}
    assert before.slots["y"] == "qkv_codes"
