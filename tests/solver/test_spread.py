"""The longer of two halves whose times vary takes longer than the longer mean."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import NormalDist
from typing import Final, get_args

import numpy as np
import pytest

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.models import model_spec
from hetero.profiler.cost import CostModel
from hetero.profiler.records import MIN_SAMPLES, DeviceProfile, Phase, ReferencePoint
from hetero.profiler.stats import SMOOTHED_S, drift
from hetero.solver.chooser import Chooser, Rules
from hetero.solver.host_queue import HostCutTimes, later, longer
from hetero.solver.options import INF, Objective
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario

W4A8 = WeightFormat.W4A8
KEYS: Final = tuple(itertools.product(get_args(DeviceKind), get_args(Phase)))


@pytest.mark.parametrize("spread", [(0.1, 0.1), (0.2, 0.05), (0.0, 0.15)])
@pytest.mark.parametrize("times", [(10.0, 10.0), (10.0, 9.0), (4.0, 10.0), (10.0, 0.0)])
def test_the_mean_of_the_longer_of_many(
    times: tuple[float, float], spread: tuple[float, float]
) -> None:
    rng = np.random.default_rng(1)
    a, b = (t * (1 + s * rng.standard_normal(400_000)) for t, s in zip(times, spread, strict=True))
    found = longer(np.asarray([[times[0]]]), np.asarray([[times[1]]]), spread)
    assert found[0, 0] == pytest.approx(np.maximum(a, b).mean(), rel=2e-3)
    assert found[0, 0] >= max(times)


def test_times_that_do_not_vary_are_not_longer_and_impossible_ones_stay_so() -> None:
    a, b = np.asarray([[1.0, np.inf, 3.0]]), np.asarray([[2.0, 1.0, np.inf]])
    assert longer(a, b, (0.0, 0.0)).tolist() == [[2.0, np.inf, np.inf]]
    assert np.isinf(longer(a, b, (0.1, 0.1))[0, 1:]).all()


@pytest.mark.parametrize("spread", [(0.1, 0.1), (0.3, 0.0)])
def test_what_is_left_out_of_very_different_times_changes_no_bit(
    spread: tuple[float, float],
) -> None:
    rng = np.random.default_rng(2)
    a, b = 10 ** rng.uniform(-6, 0, (2, 200, 50))
    deviation = np.sqrt((spread[0] * a) ** 2 + (spread[1] * b) ** 2)
    x = np.abs(a - b) / -deviation
    below = 0.5 + 0.5 * np.tanh(0.7978846 * x + 0.0356774 * x**3)
    more = deviation * (0.3989423 * np.exp(-0.5 * x * x) + x * below)
    assert (longer(a, b, spread) == np.maximum(a, b) + np.maximum(more, 0.0)).all()
    assert 0.1 < (x < -9).mean() < 0.9


@pytest.mark.parametrize("spread", [(0.1, 0.1), (0.2, 0.05), (0.0, 0.15)])
@pytest.mark.parametrize("times", [(10.0, 10.0), (10.0, 9.0), (8.0, 10.0), (10.0, 1.0)])
def test_the_chance_that_a_queue_runs_dry(
    times: tuple[float, float], spread: tuple[float, float]
) -> None:
    """The NPU's thread, which has 0.5 to do until the queue has more, is done after the GPU."""
    rng = np.random.default_rng(2)
    gpu, npu = (
        t * (1 + s * rng.standard_normal(400_000)) for t, s in zip(times, spread, strict=True)
    )
    chance = float((npu + 0.5 * (1 + spread[1] * rng.standard_normal(400_000)) > gpu).mean())
    one = np.ones((1, 1))
    halves = HostCutTimes(times[0] * one, times[1] * one, spread=spread, start_s=3.0, after_s=0.5)
    dominant = times[1] >= times[0]
    expected = 3.0 * (chance - dominant)  # the mode says all of it or nothing
    assert np.asarray(halves.restarts_s)[0, 0] == pytest.approx(expected, abs=0.05)
    calm = replace(halves, spread=(0.0, 0.0))
    assert np.all(calm.restarts_s == 0)
    impossible = later(np.asarray([np.inf, 1.0, np.inf]), np.asarray([1.0, np.inf, np.inf]), spread)
    assert impossible.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.full
@pytest.mark.parametrize("m", [64, 135])
def test_a_cut_that_is_balanced_to_the_microsecond_pays_for_the_queue_that_may_run_dry(
    m: int,
) -> None:
    """Of the same tiles no profile may say much more than another whose times differ little."""
    spec, profile = model_spec("llama-3.2-1b", W4A8), DeviceProfile.load("host")
    gpu = profile.sync["gpu"].model_copy(update={"submit_empty_s": 3e-3})
    profile = varying_by(profile, 0.05).model_copy(update={"sync": {**profile.sync, "gpu": gpu}})
    even = Planner(spec, profile).space("down").grid(m)
    mask = np.zeros(even.gpu_s.shape, dtype=bool)
    mask.flat[np.argmin(np.abs(even.gpu_s / even.npu_s - 1))] = True
    found = []
    for factor in np.linspace(0.9, 1.1, 41):
        slower = {("npu", "prefill"): float(factor), ("npu", "decode"): float(factor)}
        planner = Planner(spec, profile).drifted(slower)
        chooser = Chooser(planner.overheads, Rules(margin=-INF), Objective())
        options = chooser.options(planner.space("down"), m, mask=mask)
        (cut,) = [option for option in options if option.is_cut]
        found.append(cut.seconds_alone())
    assert len(set(found)) > 30
    assert np.abs(np.diff(found)).max() < 0.3 * 3e-3  # without that chance all of it at once


def varying_by(profile: DeviceProfile, spread: float, drifts: float = 0.0) -> DeviceProfile:
    """The profile with these standard deviations from run to run and of the reference kernels."""
    rows = tuple(row.model_copy(update={"spread": spread}) for row in profile.matmuls)
    times = [1e-3 * (1 + drifts * NormalDist().inv_cdf((i + 0.5) / 500)) for i in range(500)]
    points = tuple(
        ReferencePoint(device=device, phase=phase, at_s=10.0 * i, seconds=seconds)
        for device, phase in KEYS
        for i, seconds in enumerate(times)
    )
    return profile.model_copy(update={"matmuls": rows, "references": points})


def test_a_measured_profile_says_how_much_its_kernels_vary() -> None:
    profile = DeviceProfile.load("host")
    cost = CostModel(profile)
    rows = [
        row.spread
        for row in profile.matmuls
        if (row.device, row.phase, row.weight_format) == ("npu", "prefill", W4A8)
        and row.samples >= MIN_SAMPLES
    ]
    assert cost.spread("npu", "prefill", W4A8) > np.median(rows) > 0
    for spread, drifts in ((0.0, 0.0), (0.05, 0.0), (0.0, 0.08), (0.06, 0.08)):
        found = CostModel(varying_by(profile, spread, drifts)).spread("npu", "prefill", W4A8)
        assert found == pytest.approx(np.hypot(spread, drifts), rel=0.01)
    simulated = CostModel(DeviceProfile.load("snapdragon-8-gen-3"))
    assert simulated.spread("gpu", "decode", WeightFormat.W4A16) == 0


def test_what_scatters_within_a_moment_is_no_drift() -> None:
    rng = np.random.default_rng(3)
    at = np.arange(0.0, 400.0, SMOOTHED_S / 15)
    slow = np.repeat(rng.normal(1.0, 0.1, 20), -(-len(at) // 20))[: len(at)]
    scattered = slow * rng.normal(1.0, 0.05, len(at))
    assert drift(at.tolist(), np.where(rng.random(len(at)) < 0.1, 9.0, scattered).tolist()) == (
        pytest.approx(drift(at.tolist(), slow.tolist()), rel=0.15)
    )
    assert drift(at.tolist(), rng.normal(1.0, 0.05, len(at)).tolist()) < 0.025


@pytest.mark.parametrize("m", [64, 300])
def test_a_cut_on_devices_that_vary_gains_less_and_one_device_is_not_touched(m: int) -> None:
    spec, profile = model_spec("llama-3.2-1b", W4A8), DeviceProfile.load("host")
    planners = [Planner(spec, varying_by(profile, spread)) for spread in (0.08, 0.0)]
    varying, calm = (planner.solve(Scenario("prefill", m)).seconds for planner in planners)
    assert 1.02 * calm < varying < 1.12 * calm
    alone = [planner.single(Scenario("prefill", m), "gpu") for planner in planners]
    assert alone[0] is not None
    assert alone[1] is not None
    assert alone[0].seconds == alone[1].seconds
