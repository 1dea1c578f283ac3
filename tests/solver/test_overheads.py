"""The host queue's corrections can be taken out one by one, down to the paper's costs."""

from __future__ import annotations

import pytest

from hetero.backends.protocol import KINDS
from hetero.models import model_spec
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.solver.host_queue import CORRECTIONS, HostQueue
from hetero.solver.overheads import Overheads
from hetero.solver.planner import Planner
from hetero.solver.request import DECODE
from hetero.solver.solution import Scenario, Solution
from tests.solver.test_repredict import slower

SCENARIOS = (Scenario("prefill", 64), Scenario("prefill", 300), Scenario("decode", 1))


def solutions(profile: DeviceProfile, overheads: Overheads | None = None) -> list[Solution]:
    planner = Planner(model_spec("llama-3.2-1b"), profile, overheads=overheads)
    return [planner.solve(scenario) for scenario in SCENARIOS]


@pytest.mark.parametrize("name", ["host", "host-avx2", "snapdragon-8-gen-3"])
def test_without_corrections_a_host_queue_costs_what_the_paper_says(name: str) -> None:
    profile = DeviceProfile.load(name)
    cost = CostModel(profile)
    paper = solutions(profile, Overheads.of(cost))
    none = solutions(profile, HostQueue.of(cost, corrections=frozenset()))
    assert [x.seconds for x in paper] == [x.seconds for x in none]
    assert [x.options for x in paper] == [x.options for x in none]


def test_a_chip_without_measured_corrections_has_the_papers_costs_and_a_queue() -> None:
    """The one correction that needs no measurement: what follows a cut is submitted in time."""
    profile = DeviceProfile.load("snapdragon-8-gen-3")
    cost = CostModel(profile)
    paper = [x.seconds for x in solutions(profile, Overheads.of(cost))]
    others = HostQueue.of(cost, corrections=CORRECTIONS - {"queue"})
    assert paper == [x.seconds for x in solutions(profile, others)]
    queued = [x.seconds for x in solutions(profile)]
    assert all(x <= y for x, y in zip(paper, queued, strict=True))
    assert paper != queued


@pytest.mark.parametrize("correction", sorted(CORRECTIONS - {"chains", "queue"}))
def test_each_correction_shows_in_the_profile_that_it_was_measured_for(correction: str) -> None:
    profile = DeviceProfile.load("host")
    cost = CostModel(profile)
    kept = frozenset(x for x in CORRECTIONS if x != correction)
    without = solutions(profile, HostQueue.of(cost, corrections=kept))
    assert [x.seconds for x in without] != [x.seconds for x in solutions(profile)]


def saving(chain_s: float, profile: DeviceProfile) -> DeviceProfile:
    """A profile by which each launch of a fused one saves so many seconds."""
    gpu = profile.sync["gpu"].model_copy(update={"chain_s": chain_s})
    return profile.model_copy(update={"sync": profile.sync | {"gpu": gpu}})


@pytest.mark.full
def test_steps_on_the_gpu_alone_save_what_fused_launches_do() -> None:
    """A launch's saving for each operation; long prompts and steps of both devices save nothing."""
    profile, chained = (saving(x, DeviceProfile.load("host")) for x in (0.0, 1e-6))
    spec = model_spec("llama-3.2-1b")
    for scenario in (Scenario("decode", 1), Scenario("prefill", 32), Scenario("prefill", 64)):
        for device in KINDS:
            plain, less = (Planner(spec, x).single(scenario, device) for x in (profile, chained))
            assert plain is not None
            assert less is not None
            saves = scenario.m < 64 and device == "gpu"
            saved_s = 1e-6 * len(spec.nodes) if saves else 0.0
            assert plain.seconds - less.seconds == pytest.approx(saved_s, abs=1e-12)


@pytest.mark.parametrize("scenario", [DECODE, Scenario("prefill", 8)])
def test_cuts_of_a_step_gain_more_than_its_fused_launches(scenario: Scenario) -> None:
    """The layers' search adds up options: what one cut takes from all launches is none of them."""
    host, spec = slower(DeviceProfile.load("host"), "npu", 0.5), model_spec("llama-3.2-1b")
    cut = []
    for saved in (0.0, 1e-6, 1e-5, 1e-4):
        planner = Planner(spec, saving(saved, host))
        best, alone = planner.solve(scenario), planner.single(scenario, "gpu")
        assert alone is not None
        cut.append(not best.alone_on("gpu"))
        if cut[-1]:
            assert best.seconds < (1 - planner.settings.rules.margin) * alone.seconds
        else:
            assert best.seconds <= alone.seconds
    assert cut[0]
    assert not cut[-1]
