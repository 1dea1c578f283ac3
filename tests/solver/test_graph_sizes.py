"""The choice of graph sizes against all sets of sizes, and what limited memory does to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from hetero.backends.protocol import PerGraphSize
from hetero.backends.qnn.npu_capabilities import LAYOUT_OVERHEAD
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile, PreparationPredictor
from hetero.solver.build import make_plan
from hetero.solver.errors import PlanError
from hetero.solver.graph_sizes import Budgets, SizeProgram
from hetero.solver.options import INF
from hetero.solver.planner import Planner
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.weight_memory import graph_bytes
from tests.solver.instances import F32, planner_of, random_instance
from tests.support.selection import examples

CANDIDATES = (2, 3, 4, 5, 8)
LENGTHS = {2: 1.0, 5: 3.0, 7: 0.5, 11: 2.0}


def sized(planner: Planner, kind: PerGraphSize, s_per_token: float) -> Planner:
    """The same on an NPU whose graphs have so much for themselves and take so long to prepare."""
    profile = planner.profile
    npu = profile.devices["npu"]
    own = npu.capabilities.model_copy(update={"per_graph_size": kind})
    preparation = PreparationPredictor(
        device="npu", weight_format=F32, fixed_s=1.0, s_per_byte=0.0, cached_fixed_s=0.0,
        cached_s_per_byte=0.0, s_per_token=s_per_token, layers_share=True,
    )  # fmt: skip
    profile = profile.model_copy(
        update={
            "devices": {**profile.devices, "npu": npu.model_copy(update={"capabilities": own})},
            "preparation_predictors": (preparation,),
        }
    )
    cost = planner.cost.with_profile(profile)
    return Planner(planner.spec, profile, planner.settings, cost=cost, overheads=planner.overheads)


def program_of(seed: int, kind: PerGraphSize) -> SizeProgram:
    free = planner_of(random_instance(seed), margin=-99.0)  # every cut may be chosen
    planner = sized(free, kind, 0.25)
    return SizeProgram(planner, LENGTHS, candidates=CANDIDATES)


class Brute:
    """Every set of sizes; a length is served by the best pair of a set, or by the GPU alone."""

    def __init__(self, program: SizeProgram) -> None:
        self.planner = planner = program.planner
        pairs = [p for count in (1, 2) for p in itertools.combinations(CANDIDATES, count)]
        self.served = {
            (m, pair): planner.with_graph_sizes({*pair, *({1} & {*planner.sizes})})
            .solve(Scenario("prefill", m))
            .seconds
            for m in LENGTHS
            for pair in pairs
            if m <= 2 * max(pair)
        }
        alone = {m: planner.single(Scenario("prefill", m), "gpu") for m in LENGTHS}
        self.alone = {m: INF if x is None else x.seconds for m, x in alone.items()}

    def seconds(self, chosen: Iterable[int]) -> float:
        sizes, found = set(chosen), 0.0
        for m, weight in LENGTHS.items():
            ways = [s for (length, p), s in self.served.items() if length == m and {*p} <= sizes]
            found += weight * min([self.alone[m], *ways])
        return found / sum(LENGTHS.values())

    def best(self, allowed: Any) -> float:
        counts = range(len(CANDIDATES) + 1)
        sets = (s for count in counts for s in itertools.combinations(CANDIDATES, count))
        return min((self.seconds(s) for s in sets if allowed(s)), default=INF)


@pytest.mark.parametrize("seed", range(examples(14, 40)))
def test_the_chosen_sizes_are_the_best_of_all_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind: PerGraphSize = "weights" if seed % 2 else "graph"
    program = program_of(seed, kind)
    brute, planner = Brute(program), program.planner
    own = graph_bytes(planner)
    assert (own > 0) == (kind == "weights")
    for _ in range(3):
        count, seconds, copies = rng.integers(1, 5), rng.uniform(4, 25), rng.uniform(0.5, 5)
        budgets = Budgets(int(count), float(seconds), float(copies * (own or 1)))

        def allowed(sizes: tuple[int, ...], budgets: Budgets = budgets) -> bool:
            return (
                2 * max(sizes, default=0) >= max(LENGTHS)
                and len(sizes) <= budgets.graphs
                and sum(map(planner.preparation_s, sizes)) <= budgets.preparation_s
                and own * len(sizes) <= budgets.memory_bytes
            )

        if brute.best(allowed) == INF:
            with pytest.raises(PlanError, match="no set of graphs for prompts of up to 11 tokens"):
                program.best(budgets)
            continue
        found = program.best(budgets)
        chosen = tuple(g for g in found.sizes if g != 1)  # that one is decoding's
        assert allowed(chosen)
        assert brute.seconds(chosen) == pytest.approx(brute.best(allowed), rel=1e-6), (seed, found)
        assert found.expected_s <= brute.best(allowed) * (1 + 1e-6)
        assert found.memory_bytes == own * len(chosen)
        assert found.preparation_s == pytest.approx(sum(map(planner.preparation_s, chosen)))


@pytest.mark.parametrize("seed", range(examples(4, 12)))
def test_more_budget_is_never_slower(seed: int) -> None:
    program = program_of(seed, "weights")
    brute, own = Brute(program), graph_bytes(program.planner)
    axes: list[list[Budgets]] = [
        [Budgets(graphs=c) for c in range(1, 6)],
        [Budgets(preparation_s=s) for s in (13.0, 20.0, 30.0, 60.0)],
        [Budgets(memory_bytes=x * own) for x in (1.0, 2.0, 3.5, 9.0)],
    ]
    for axis in axes:
        times = [brute.seconds(program.best(budgets).sizes) for budgets in axis]
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(times)), (axis, times)


def test_one_graph_for_all_sizes_is_prepared_once() -> None:
    program = program_of(3, "nothing")
    once = program.planner.preparation_s(8)
    enough = program.best(Budgets(preparation_s=once))
    assert len(enough.sizes) > 1 or enough.expected_s == program.best(Budgets()).expected_s
    assert enough.preparation_s <= once
    assert enough.expected_s == program.best(Budgets()).expected_s
    with pytest.raises(PlanError, match="fits the budgets"):
        program.best(Budgets(preparation_s=0.1))


def hexagon(limit_bytes: int | None, kind: PerGraphSize = "weights") -> DeviceProfile:
    """The simulated chip with an NPU process that holds so much, its graphs with their weights."""
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    npu = chip.devices["npu"]
    own = npu.capabilities.model_copy(
        update={"per_graph_size": kind, "memory_limit_bytes": limit_bytes}
    )
    return chip.model_copy(
        update={"devices": {**chip.devices, "npu": npu.model_copy(update={"capabilities": own})}}
    )


@pytest.mark.full
def test_graphs_with_weights_of_their_own_count_once_for_each_size() -> None:
    spec = model_spec("llama-3.2-1b")
    shared = make_plan(spec, hexagon(None, "graph"), PlanRequest(seq_lens=(256,)))
    own = make_plan(spec, hexagon(None, "weights"), PlanRequest(seq_lens=(256,)))
    assert shared.memory is not None
    assert own.memory is not None
    assert [op.tiles for op in own.ops] == [op.tiles for op in shared.ops]
    assert shared.memory.graphs_bytes == 0
    more = own.memory.npu_bytes - shared.memory.npu_bytes
    assert abs(own.memory.graphs_bytes - more) <= 1  # each is rounded
    sizes = len(own.graph_sizes)
    head = 0.5625 * LAYOUT_OVERHEAD * sum(
        t.rows[1] * 2048 for op in own.ops if op.op == "lm_head" and op.phase == "prefill"
        for t in op.tiles if t.device == "npu"
    )  # fmt: skip
    blocks = shared.memory.npu_bytes - head
    assert own.memory.npu_bytes == pytest.approx(sizes * blocks + head, rel=1e-6)


@pytest.mark.full
def test_what_the_npu_holds_limits_its_rows_and_fewer_sizes_leave_it_more() -> None:
    spec, limit = model_spec("llama-3.2-1b"), 1 << 30
    free = make_plan(spec, hexagon(None), PlanRequest(seq_lens=(256,)))
    assert free.memory is not None
    assert free.memory.npu_bytes > limit
    tight = make_plan(spec, hexagon(limit), PlanRequest(seq_lens=(256,)))
    auto = make_plan(spec, hexagon(limit), PlanRequest(seq_lens=(256,), graph_sizes="auto"))
    for plan in (tight, auto):
        assert plan.memory is not None
        assert 0 < plan.memory.npu_bytes <= limit
    assert any("the NPU holds 1.00 GiB of weights at most" in note for note in tight.notes)
    assert len(auto.graph_sizes) < len(tight.graph_sizes)
    seconds = [p.totals[0].predicted_s or 0.0 for p in (free, auto, tight)]
    assert seconds[0] <= seconds[1] < seconds[2]


def test_a_device_that_cannot_hold_a_model_is_no_single_device() -> None:
    spec = model_spec("llama-3.2-1b")
    for limit, expected in ((None, {"gpu", "npu"}), (100 << 20, {"gpu"})):
        plan = make_plan(spec, hexagon(limit), PlanRequest(seq_lens=(256,)))
        assert set(plan.totals[0].single_devices) == expected


@pytest.mark.full
def test_single_devices_hold_their_weights_for_each_graph_size_as_plans_do() -> None:
    """Of the chip's sizes, an NPU that holds each row once has room for one."""
    spec, profile = model_spec("llama-3.2-3b"), hexagon(7 << 29)
    default = make_plan(spec, profile, PlanRequest(seq_lens=(256,)))
    assert set(default.totals[0].single_devices) == {"gpu"}
    auto = make_plan(spec, profile, PlanRequest(seq_lens=(256,), graph_sizes="auto"))
    assert set(auto.totals[0].single_devices) == {"gpu", "npu"}
    for plan in (default, auto):
        for total in plan.totals:
            assert total.predicted_s is not None
            assert total.best_single_device_s is not None
            assert total.predicted_s <= total.best_single_device_s * (1 + 1e-9)


def test_without_graphs_there_is_none_to_choose() -> None:
    request, spec = PlanRequest(graph_sizes="auto"), model_spec("llama-3.2-1b")
    chip = hexagon(None)
    alone = chip.model_copy(update={"devices": {"gpu": chip.devices["gpu"]}})
    with pytest.raises(PlanError, match="has no NPU, so there are no graphs"):
        make_plan(spec, alone, request)
    npu = chip.devices["npu"]
    free = npu.capabilities.model_copy(update={"static_shapes": False, "graph_sizes": ()})
    devices = {**chip.devices, "npu": npu.model_copy(update={"capabilities": free})}
    with pytest.raises(PlanError, match="takes any token count"):
        make_plan(spec, chip.model_copy(update={"devices": devices}), request)


@pytest.mark.full
def test_weights_of_lengths_move_the_choice() -> None:
    spec, chip = model_spec("llama-3-8b"), DeviceProfile.load("snapdragon-8-gen-3")
    found = {}
    for weights in ((100.0, 1.0), (1.0, 100.0)):
        request = PlanRequest(
            seq_lens=(96, 400), length_weights=weights, graph_sizes="auto", preparation_budget_s=1.0
        )
        found[weights] = {t.m: t.predicted_s or 0.0 for t in make_plan(spec, chip, request).totals}
    assert found[100.0, 1.0][96] < found[1.0, 100.0][96]
    assert found[1.0, 100.0][400] < found[100.0, 1.0][400]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (PlanRequest(preparation_budget_s=1.0), "add --graph-sizes auto"),
        (PlanRequest(graph_sizes="auto", graph_memory_bytes=0), "are above 0"),
        (PlanRequest(length_weights=(1.0,)), "each of 3 prompt lengths has a weight above 0"),
        (PlanRequest(seq_lens=(5,), length_weights=(0.0,)), "has a weight above 0"),
    ],
)
def test_requests_that_mean_nothing_are_one_sentence(request_: PlanRequest, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        make_plan(model_spec("llama-3.2-1b"), hexagon(None), request_)
