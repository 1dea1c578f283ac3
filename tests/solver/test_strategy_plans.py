"""Named strategies as plans that a runtime can execute."""

from __future__ import annotations

from typing import get_args

import pytest

from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy
from hetero.solver.plan import OpPlan, check_cover
from hetero.solver.strategy_plans import strategy_plan

PROMPTS = (64, 135, 300, 600, 1000)
NPU_ONLY = ("npu-only", "padding", "pipe", "chunked", "online-prepare")


@pytest.fixture(scope="module")
def chip() -> DeviceProfile:
    return DeviceProfile.load("snapdragon-8-gen-3")


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3-8b")


def made(spec: ModelGraph, chip: DeviceProfile, name: str) -> ExecutionPlan:
    return strategy_plan(spec, chip, name, PROMPTS)  # type: ignore[arg-type]


def block_entries(plan: ExecutionPlan) -> list[OpPlan]:
    return [o for o in plan.ops if o.phase == "prefill" and o.op != "lm_head"]


@pytest.mark.parametrize("name", get_args(NamedStrategy))
def test_every_strategy_covers_every_call_of_every_prompt(
    spec: ModelGraph, chip: DeviceProfile, name: str
) -> None:
    plan = made(spec, chip, name)
    assert plan.strategy == name
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
    plan.check_fits(spec)
    for matmul in spec.matmuls:
        for m in (m for prompt in PROMPTS for m in plan.steps(prompt)):
            tiles = plan.partition("prefill", m, matmul.name)
            check_cover(tiles, m=m, n=matmul.n, what=matmul.name)
        check_cover(plan.partition("decode", 1, matmul.name), m=1, n=matmul.n, what=matmul.name)


@pytest.mark.parametrize("name", ["gpu-only", *NPU_ONLY])
def test_one_device_computes_all_prefill_matmuls(
    spec: ModelGraph, chip: DeviceProfile, name: str
) -> None:
    kinds = {t.device for o in block_entries(made(spec, chip, name)) for t in o.tiles}
    assert kinds == {"npu" if name in NPU_ONLY else "gpu"}


@pytest.mark.parametrize("name", ["row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut"])
def test_a_forced_cut_is_that_cut_or_one_device(
    spec: ModelGraph, chip: DeviceProfile, name: str
) -> None:
    found = block_entries(made(spec, chip, name))
    cuts = {o.strategy for o in found if len({t.device for t in o.tiles}) > 1}
    assert cuts == {name}


def graphs(plan: ExecutionPlan, m: int) -> tuple[int | None, ...]:
    return tuple(t.graph_size for t in plan.partition("prefill", m, "down"))


def test_graphs_of_the_npu_only_strategies(spec: ModelGraph, chip: DeviceProfile) -> None:
    assert graphs(made(spec, chip, "padding"), 300) == (512,)
    assert graphs(made(spec, chip, "pipe"), 300) == (256, 64)
    chunked = made(spec, chip, "chunked")
    assert chunked.steps(600) == (256, 256, 88)
    assert graphs(chunked, 256) == graphs(chunked, 88) == (256,)


@pytest.mark.full
def test_online_preparation_uses_a_graph_that_is_not_prepared_and_pays_for_it(
    spec: ModelGraph, chip: DeviceProfile
) -> None:
    plan = made(spec, chip, "online-prepare")
    assert graphs(plan, 135) == (135,)
    assert 135 not in plan.graph_sizes
    compute = sum(o.predicted_s or 0.0 for o in block_entries(plan) if o.m == 135) * spec.layers
    total = next(t for t in plan.totals if t.m == 135)
    assert 0.3 < total.predicted_s - compute < 0.6  # 408 ms of preparation, and the rest


def test_only_the_pipe_may_have_more_than_two_pieces(spec: ModelGraph, chip: DeviceProfile) -> None:
    few = strategy_plan(spec, chip, "pipe", (1000,))
    entry = next(o for o in few.ops if o.op == "down" and o.m == 1000)
    thirds = [
        {"device": "npu", "tokens": (a, b), "rows": (0, entry.n), "graph_size": 512}
        for a, b in ((0, 300), (300, 600), (600, 1000))
    ]
    document = entry.model_dump() | {"tiles": thirds}
    assert len(OpPlan.model_validate(document).tiles) == 3
    with pytest.raises(ValueError, match="in 3 tiles along tokens, at most 2"):
        OpPlan.model_validate(document | {"pipe": False})


def test_prefill_comparisons_decode_at_layer_level(spec: ModelGraph, chip: DeviceProfile) -> None:
    for name in ("padding", "layer", "sequence-cut"):
        decode = [o for o in made(spec, chip, name).ops if o.phase == "decode"]
        assert {o.strategy for o in decode} == {"gpu-only"}
    cut = [o.strategy for o in made(spec, chip, "hybrid-cut").ops if o.phase == "decode"]
    assert "row-cut" in cut


def test_unknown_names_and_lengths_are_one_sentence(spec: ModelGraph, chip: DeviceProfile) -> None:
    with pytest.raises(PlanError, match="unknown strategy 'diagonal': choose one of auto, gpu"):
        made(spec, chip, "diagonal")
    with pytest.raises(PlanError, match="token counts from 1 on, got \\[0\\]"):
        strategy_plan(spec, chip, "auto", (0,))
