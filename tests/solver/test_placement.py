"""Which graphs the tiles of a plan take."""

from __future__ import annotations

import pytest

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import Capabilities
from hetero.models import open_model
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.placement import Placement
from hetero.solver.plan import OpPlan, Rest
from tests.runtime.models import tiny_model

SIZES = (1, 8, 32, 64)
NPU = Capabilities(
    kind="npu", static_shapes=True, graph_sizes=SIZES, weight_formats=(WeightFormat.F32,)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelGraph:
    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    return open_model(str(folder), weights="f32").spec()


def down_of(model: ModelGraph) -> Node:
    return next(n for n in model.nodes if n.plan_op == "down")


def placed(
    model: ModelGraph, m: int | None, graph: int | None, phase: str = "prefill"
) -> Placement:
    node = down_of(model)
    n, k = node.op.n, node.op.k  # type: ignore[union-attr]
    tile = {"device": "npu", "tokens": (0, m), "rows": (0, n), "graph_size": graph}
    entry = OpPlan.model_validate(
        {"phase": phase, "m": m, "op": "down", "n": n, "k": k, "strategy": "npu-only",
         "tiles": [tile]}
    )  # fmt: skip
    plan = ExecutionPlan(model="m", ops=(entry,), rest=Rest(prefill="npu", decode="npu"))
    return Placement(plan, model, {"npu": NPU})


@pytest.mark.parametrize(
    ("listed", "graph", "m", "runs"),
    [
        (20, 64, 20, 64),  # as the plan says, though a smaller one would hold it
        (20, 32, 20, 32),
        (20, None, 20, 32),
        (50, 64, 20, 32),  # a call that is not listed: the smallest that holds it
        (50, 64, 5, 8),
        (None, 64, 20, 32),
        (None, None, 5, 8),
    ],
)
def test_a_prompts_graph(
    model: ModelGraph, listed: int | None, graph: int | None, m: int, runs: int
) -> None:
    (part,) = placed(model, listed, graph).parts(down_of(model), "prefill", m)
    assert (part.tokens, part.graph) == ((0, m), runs)


def test_verified_tokens_take_the_smallest_graph(model: ModelGraph) -> None:
    (part,) = placed(model, 1, 1, "decode").parts(down_of(model), "decode", 5)
    assert (part.tokens, part.graph) == ((0, 5), 8)
