"""The depths at which decoding moves: where it gains more than predictions are sure of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.models import model_spec
from hetero.placement.planning import planned
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import errors_of, make_plan
from hetero.solver.decode_bands import STEP, decode_bands, switches
from hetero.solver.drift import Factors
from hetero.solver.overheads import Overheads
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.request import DECODE, PlanRequest
from hetero.solver.solution import Scenario
from hetero.solver.weight_memory import Limits

CHIP = "snapdragon-8-elite"
LONGEST = 8192
LENGTHS = spread_lengths((), 512)


@pytest.fixture(scope="module")
def spec() -> ModelGraph:
    return model_spec("llama-3.2-1b")


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return DeviceProfile.load(CHIP)


@pytest.fixture(scope="module")
def solver(spec: ModelGraph, profile: DeviceProfile) -> PreparedSolver:
    return prepare_solver(spec, profile, PlanRequest(seq_lens=LENGTHS, explain=False))


@given(
    lines=st.lists(
        st.tuples(st.floats(0.5, 2.0), st.floats(0.0, 1e-3)), min_size=1, max_size=4, unique=True
    ),
    tolerance=st.floats(0.0, 0.3),
    longest=st.integers(0, 70 * STEP),
)
def test_switches_are_where_a_search_of_every_depth_finds_them(
    lines: list[tuple[float, float]], tolerance: float, longest: int
) -> None:
    """Of two lines, by looking at every depth; of more, each switch gains what is needed."""

    def seconds(i: int, depth: int) -> float:
        return lines[i][0] + lines[i][1] * depth

    def gains(after: int, before: int, depth: int) -> bool:
        return seconds(after, depth) < seconds(before, depth) * (1 - tolerance)

    names = range(len(lines))
    found = switches(0, names, seconds, lambda *_: tolerance, longest)
    assert [depth for depth, _ in found] == sorted(depth for depth, _ in found)
    assert all(STEP <= depth <= longest and depth % STEP == 0 for depth, _ in found)
    before = 0
    for depth, after in found:
        assert gains(after, before, depth)
        before = after
    if len(lines) == 2:
        every = range(STEP, longest + 1, STEP)
        first = next((depth for depth in every if gains(1, 0, depth)), None)
        assert (found[0][0] if found else None) == first


def test_a_band_begins_where_it_gains_more_than_the_error_of_predictions(
    spec: ModelGraph, profile: DeviceProfile, solver: PreparedSolver
) -> None:
    moving = solver.with_bands(LONGEST)
    (band,) = moving.plan.bands
    assert (solver.plan.non_matmul.decode, band.device) == ("gpu", "npu")
    error = errors_of(profile, spec.weight_format)["decode"]
    assert band.predicted_s is not None
    assert band.before_s is not None
    assert band.predicted_s < band.before_s * (1 - error)
    alone = Planner(spec, profile).single(Scenario("decode", 1, band.depth_from), "npu")
    assert alone is not None
    assert alone.seconds < band.predicted_s < 1.1 * alone.seconds, "the head stays on the GPU"
    earlier = moving.with_bands(band.depth_from - STEP)
    assert earlier.plan.bands == moving.plan.bands, "the same where a context is too short for one"
    assert solver.with_bands(band.depth_from - STEP) is solver


@pytest.mark.full
def test_a_plan_without_bands_has_the_same_document(spec: ModelGraph) -> None:
    """With them it differs by a key alone."""
    profile = DeviceProfile.load("snapdragon-8-elite-gen-5")
    request = PlanRequest(seq_lens=(64, 512), explain=False)
    plain, moving = make_plan(spec, profile, request), planned(spec, profile, request)
    new = moving.model_copy(update={"bands": ()}).model_dump(exclude={"solve_s", "totals"})
    assert new == plain.model_dump(exclude={"solve_s", "totals"})
    assert "bands" not in plain.model_dump()


def test_energy_and_a_limited_gpu_move_nothing(spec: ModelGraph, profile: DeviceProfile) -> None:
    request = PlanRequest(seq_lens=LENGTHS, explain=False, max_gpu_share=0.9)
    assert not prepare_solver(spec, profile, request).with_bands(LONGEST).plan.bands


def test_weights_that_a_band_alone_needs_fit_the_memory_and_are_paid_for(
    spec: ModelGraph, profile: DeviceProfile, solver: PreparedSolver
) -> None:
    """The NPU alone holds all rows; without room for them it gets what it has."""
    apart = solver.alone_in({"prefill": "gpu", "decode": "gpu"})
    (band,) = apart.with_bands(LONGEST).plan.bands
    assert band.devices == ("npu",)
    assert band.more_bytes > 500 << 20
    asked = apart.with_bands(LONGEST)._bands
    assert asked is not None
    assert asked.apart
    tight = replace(asked, limits=Limits(both=900 << 20))
    decoding = apart.solution_for(DECODE)
    assert decode_bands(apart._planner, decoding, apart.resident, tight) == []


def test_handing_over_takes_no_longer_than_a_step(
    spec: ModelGraph, profile: DeviceProfile, solver: PreparedSolver
) -> None:
    """Where memory is not unified keys and values are copied."""
    asked = solver.with_bands(LONGEST)._bands
    assert asked is not None
    decoding = solver.solution_for(DECODE)
    for per_byte, moves in ((1e-14, True), (1e-6, False)):
        planner = Planner(
            spec, profile, overheads=Overheads(copy_s=0.0, copy_s_per_byte=per_byte)
        ).with_rows(solver.rows)
        assert bool(decode_bands(planner, decoding, solver.resident, asked)) == moves


def test_other_speeds_move_decoding_within_the_rows_that_are_held(solver: PreparedSolver) -> None:
    """A slower GPU hands over earlier, and to a slow NPU it never does."""
    moving = solver.alone_in({"prefill": "gpu", "decode": "gpu"}).with_bands(LONGEST)
    (band,) = moving.plan.bands
    sooner = moving.drifted({("gpu", "decode"): 1.05})
    assert sooner.plan.non_matmul.decode == "gpu"
    assert sooner.plan.bands[0].depth_from < band.depth_from
    assert sooner.plan.bands[0].more_bytes == 0, "they were held before"
    slow: Factors = {("npu", "prefill"): 50.0, ("npu", "decode"): 50.0}
    assert moving.drifted(slow).plan.bands == ()
    assert solver.drifted({("gpu", "decode"): 1.05}).plan.bands == (), "it had none"
