"""Which graphs the tiles of a plan take, and that every output is computed once."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import Capabilities
from hetero.models import open_model
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.placement import Placement
from hetero.solver.plan import NonMatmulDevices, OpPlan, Phase
from tests.runtime.models import tiny_model
from tests.runtime.plans import random_plan, tiles_of

SIZES = (1, 8, 32, 64)
WHOLE_ROWS = ("gpu-only", "npu-only", "sequence-cut", "multi-sequence-cut")  # k has 32 of them
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
    plan = ExecutionPlan(
        model="m", ops=(entry,), non_matmul=NonMatmulDevices(prefill="npu", decode="npu")
    )
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


def random_placement(model: ModelGraph, seed: int, tokens: int) -> Placement:
    """Any strategy for each matmul, at two lengths; q, k and v apart or not; any operand order."""
    rng = random.Random(seed)
    plans = [random_plan(model, m, SIZES, rng) for m in sorted({tokens, max(tokens // 3, 1)})]
    entries = {(x.phase, x.op, x.m): x for plan in plans for x in plan.ops}
    for (phase, op, m), entry in list(entries.items()):
        if op == "qkv" and rng.random() < 0.5:
            del entries[phase, op, m]
            for name in ("q", "k", "v"):
                n, k = model.shapes[name]  # type: ignore[index]
                tiles = tiles_of(rng.choice(WHOLE_ROWS), m or 1, n, SIZES, rng)
                fields = entry.model_dump() | {"op": name, "n": n, "k": k, "tiles": tiles}
                entries[phase, name, m] = OpPlan.model_validate(fields)
    turned = [
        entry.model_copy(
            update={
                "tiles": tuple(
                    tile.model_copy(update={"order": rng.choice(("plain", "transposed"))})
                    if tile.device == "npu"
                    else tile
                    for tile in entry.tiles
                )
            }
        )
        for entry in entries.values()
    ]
    non_matmul = NonMatmulDevices.model_validate(
        {"prefill": rng.choice(("gpu", "npu")), "decode": "gpu"}
    )
    plan = ExecutionPlan(model="m", ops=tuple(turned), non_matmul=non_matmul)
    return Placement(plan, model, {"npu": NPU, "gpu": Capabilities(kind="gpu")})


@pytest.mark.full
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**20), tokens=st.integers(1, 64), part=st.floats(0, 1))
def test_tokens_and_rows_of_every_node_are_computed_once(
    model: ModelGraph, seed: int, tokens: int, part: float
) -> None:
    placement = random_placement(model, seed, tokens)
    calls: list[tuple[Phase, int]] = [("prefill", tokens), ("decode", 1), ("decode", 5)]
    calls.append(("prefill", 1 + int(part * (tokens - 1))))  # a length that the plan may not list
    for phase, m in calls:
        assigned = list(placement.at(phase, m))
        assert [x.node for x in assigned] == list(model.nodes)
        for node, kind, graph, parts, *_ in assigned:
            if node.plan_op is None:
                assert kind == placement.non_matmul(phase)
                assert not parts
                assert graph == (m if kind == "gpu" else min(s for s in SIZES if s >= m))
                continue
            assert kind is None
            count = 1 if node.plan_op == "lm_head" else m
            written = np.zeros((count, node.op.n), int)  # type: ignore[union-attr]
            for cell in parts:
                written[slice(*cell.tokens), slice(*cell.rows)] += 1
                assert cell.tokens[1] <= count
                assert cell.stop <= cell.tokens[1] or cell.tokens[1] == count
                if cell.kind == "npu":
                    assert cell.graph in SIZES
                    assert cell.segment in placement.kernels.segments(node, "npu")
                else:
                    assert cell.graph == cell.tokens[1] - cell.tokens[0]
            assert (written == 1).all()
            shared = [a.rows for a in parts for b in parts if meets(a.rows, b.rows)]
            assert len(shared) == sum([a.rows == b.rows for a in parts for b in parts])


def meets(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def test_an_edge_of_the_other_device_cuts_a_kernel(model: ModelGraph) -> None:
    """The NPU's tile has all rows, the GPU's next to it two halves: panels have one row length."""
    node = down_of(model)
    n, k = node.op.n, node.op.k  # type: ignore[union-attr]
    tiles = [
        {"device": "npu", "tokens": (0, 32), "rows": (0, n), "graph_size": 32},
        {"device": "gpu", "tokens": (32, 40), "rows": (0, 16)},
        {"device": "gpu", "tokens": (32, 40), "rows": (16, n)},
    ]
    entry = OpPlan.model_validate(
        {"phase": "prefill", "m": 40, "op": "down", "n": n, "k": k, "strategy": "row-cut",
         "tiles": tiles}
    )  # fmt: skip
    plan = ExecutionPlan(
        model="m", ops=(entry,), non_matmul=NonMatmulDevices(prefill="gpu", decode="gpu")
    )
    placement = Placement(plan, model, {"npu": NPU, "gpu": Capabilities(kind="gpu")})
    assert [s.rows for s in placement.kernels.segments(node, "npu")] == [(0, 16), (16, n)]
    found = [(x.kind, x.tokens, x.rows) for x in placement.parts(node, "prefill", 40)]
    assert found == [
        ("npu", (0, 32), (0, 16)),
        ("npu", (0, 32), (16, n)),
        ("gpu", (32, 40), (0, 16)),
        ("gpu", (32, 40), (16, n)),
    ]


def test_a_graph_that_no_device_has_is_refused_at_once(model: ModelGraph) -> None:
    with pytest.raises(PlanError, match="down: the plan wants a graph of 48 tokens, and the npu"):
        placed(model, 40, 48)
