"""Profiles scaled to another machine: what is multiplied, by what, and how that is measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import ManualClock
from hetero.backends.protocol import DeviceKind
from hetero.models import model_spec
from hetero.profiler import features, predict
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.measure import REFERENCE_SIZES
from hetero.profiler.non_matmul_ops import BLOCKS, cases
from hetero.profiler.records import (
    DeviceProfile,
    Kind,
    MatMulPredictor,
    Phase,
    Regimes,
    ShapeRange,
    Tree,
    phase_of,
)
from hetero.profiler.scaling import (
    factors_of,
    prepare_references,
    reference_tasks,
    scaled,
    time_references,
)
from hetero.profiler.session import profile_devices
from hetero.profiler.workload import Workload
from hetero.solver.planner import Planner
from hetero.solver.prepared import prepare_solver
from hetero.solver.request import DECODE, PlanRequest
from hetero.solver.solution import Scenario
from tests.profiler.fakes import (
    PAIRS,
    W4,
    devices,
    gpu_cost,
    knots,
    npu_cost,
    only_formats,
    options,
    record,
)

W8 = WeightFormat.W4A8
KINDS: tuple[DeviceKind, ...] = ("gpu", "npu")
PHASES: tuple[Phase, ...] = ("prefill", "decode")
TOKENS = np.asarray([1, 2, 3, 5, 8, 9, 12, 15, 16, 17, 31, 40, 64, 100, 256, 300, 1024], float)
ROWS = np.asarray([256, 512, 1024, 1300, 2048, 8192], float)


@pytest.fixture(scope="module")
def host() -> DeviceProfile:
    return DeviceProfile.load("host")


def factors(profile: DeviceProfile, wanted: Mapping[tuple[str, str], float]) -> dict[Kind, float]:
    """The same for every format."""
    return {
        (p.device, phase, p.weight_format): wanted.get((p.device, phase), 1.0)
        for p in profile.predictors
        for phase in PHASES
    }


NPU_PREFILL = {("npu", "prefill"): 2.0}


def test_factors_of_one_change_nothing(host: DeviceProfile) -> None:
    assert scaled(host, {}) == host
    assert scaled(host, factors(host, {})) == host
    assert scaled(host, factors(host, {})).fingerprint == host.fingerprint


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_factor_multiplies_its_device_and_phase_and_nothing_else(
    host: DeviceProfile, kind: DeviceKind, phase: Phase
) -> None:
    before, after = (
        CostModel(p) for p in (host, scaled(host, factors(host, {(kind, phase): 2.0})))
    )
    for device in KINDS:
        padded = features.padded_tokens(host.devices[device], TOKENS)
        own = (device == kind) & ((padded <= 8) == (phase == "decode"))
        expected = np.where(own, 2.0, 1.0)
        for weight_format in (W4, W8):
            for k in (896, 2048, 8192):
                sizes = (TOKENS[:, None], ROWS, k)
                one = before.matmul_s(device, weight_format, *sizes).seconds
                two = after.matmul_s(device, weight_format, *sizes).seconds
                np.testing.assert_array_equal(two, one * expected[:, None])
        for case in cases(host.devices[device], W4, quick=True, blocks=BLOCKS):
            times = [cost.other_s(device, case.op, case.m).seconds for cost in (before, after)]
            tokens = features.padded_count(host.devices[device], case.m)
            doubled = (device, phase_of(tokens)) == (kind, phase)
            assert times[1] == pytest.approx(times[0] * (2.0 if doubled else 1.0), rel=1e-12)
        for row in host.matmuls:
            measured = [
                float(cost.matmul_s(row.device, row.weight_format, row.m, row.n, row.k).seconds)
                for cost in (before, after)
            ]
            doubled = (row.device, row.phase) == (kind, phase)
            assert measured[1] == measured[0] * (2.0 if doubled else 1.0)


def test_what_belongs_to_a_phase_follows_and_the_rest_stays(host: DeviceProfile) -> None:
    found = scaled(host, factors(host, {("gpu", "decode"): 2.0, ("gpu", "prefill"): 4.0}))
    before, after = host.bandwidth, found.bandwidth
    assert before.gpu_alone_bytes_per_s is not None
    assert after.gpu_alone_bytes_per_s == before.gpu_alone_bytes_per_s / 2
    assert after.npu_together_bytes_per_s == before.npu_together_bytes_per_s
    for old, new in zip(host.every_core, found.every_core, strict=True):
        factor = 2.0 if old.phase == "decode" else 4.0
        # of a step on one core, which takes so many times as long too
        assert new.seconds(factor * 1e-3, 16) == pytest.approx(factor * old.seconds(1e-3, 16))
    for name in ("contention", "sync", "host_sync", "preparation", "preparation_predictors"):
        assert getattr(found, name) == getattr(host, name)
    medians = {
        profile: statistics.median(
            p.seconds for p in of.references if (p.device, p.phase) == ("gpu", "prefill")
        )
        for profile, of in (("host", host), ("found", found))
    }
    assert medians["found"] == 4 * medians["host"]


def test_formats_have_factors_of_their_own_and_the_first_counts_for_the_rest(
    host: DeviceProfile,
) -> None:
    host = only_formats(host, W4, W8)
    first, second = (
        scaled(host, {("gpu", "prefill", weight_format): 3.0}) for weight_format in (W4, W8)
    )
    rows = {row.key: row.seconds for row in host.matmuls}
    for found, own in ((first, W4), (second, W8)):
        for row in found.matmuls:
            changed = (row.device, row.phase, row.weight_format) == ("gpu", "prefill", own)
            assert row.seconds == rows[row.key] * (3.0 if changed else 1.0)
    assert second.other_predictors == host.other_predictors
    assert first.other_predictors != host.other_predictors
    assert scaled(scaled(host, {("gpu", "prefill", W4): 3.0}), {("gpu", "prefill", W4): 0.5}) == (
        scaled(host, {("gpu", "prefill", W4): 1.5})
    )


def test_a_format_without_a_kernel_that_was_timed_has_the_factor_of_one_that_computes_alike() -> (
    None
):
    """More formats in a profile add no kernels that a first start has to compile."""
    taken = DeviceProfile.load("host-avx2")
    formats = {row.weight_format for row in taken.matmuls}
    assert {"w4a16", "w4a8", "w8a8", "gguf-a16"} <= formats
    tasks = reference_tasks(taken)
    assert len(tasks) == 8
    assert {task.weight_format for task in tasks} == {"w4a16", "w4a8"}
    floats, integers = 2.0, 3.0
    wanted = {("gpu", "decode", WeightFormat.W4A16): floats,
              ("gpu", "decode", WeightFormat.W4A8): integers}  # fmt: skip
    here = scaled(taken, wanted)
    for row, before in zip(here.matmuls, taken.matmuls, strict=True):
        factor = floats if row.weight_format.activations.are_floats else integers
        factor = factor if row.kind[:2] == ("gpu", "decode") else 1.0
        assert row.seconds == before.seconds * factor


def test_trees_and_models_are_scaled_too() -> None:
    tree = Tree(feature=(0, -1, -1), threshold=(5.0, 0.0, 0.0), left=(1, 0, 0), right=(2, 0, 0),
                value=(0.0, 0.3, -0.2))  # fmt: skip
    grown = MatMulPredictor(
        device="npu", weight_format=W4, knots=knots((1, 1e-9), (64, 3e-9)),
        features=features.FEATURES, trees=(tree,), regimes=Regimes(bytes_per_s=8e9, knee_m=16),
        measured=ShapeRange(m=(1, 64), n=(1, 64), k=(1, 64)),
    )  # fmt: skip
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    modelled = next(p for p in chip.predictors if p.model is not None)
    for predictor in (grown, modelled):
        device = record(predictor.device)
        bare = chip.model_copy(update={"predictors": (predictor,)})
        kind = (predictor.device, "prefill", predictor.weight_format)
        (found,) = scaled(bare, {kind: 2.0}).predictors
        one, two = (
            predict.predict_table(p, device, TOKENS, ROWS, 64.0) for p in (predictor, found)
        )
        np.testing.assert_array_equal(two, one * np.where(TOKENS > 8, 2.0, 1.0)[:, None])
        flat = (TOKENS, np.full_like(TOKENS, 512.0), np.full_like(TOKENS, 64.0))
        one, two = (predict.predict(p, device, *flat) for p in (predictor, found))
        np.testing.assert_array_equal(two, one * np.where(TOKENS > 8, 2.0, 1.0))
    (slow,) = scaled(chip.model_copy(update={"predictors": (grown,)}),
                     {("npu", "decode", W4): 4.0}).predictors  # fmt: skip
    assert (slow.regimes.bytes_per_s, slow.regimes.knee_m) == (2e9, 64)


@pytest.mark.full
def test_plans_follow(host: DeviceProfile) -> None:
    """The solver's predictions double where the npu's prefill does, and rows go to the GPU."""
    spec, slow = model_spec("llama-3.2-1b"), scaled(host, factors(host, NPU_PREFILL))
    prompt = Scenario("prefill", 256)
    before, after = Planner(spec, host), Planner(spec, slow)
    for scenario, device in ((prompt, "gpu"), (DECODE, "gpu"), (DECODE, "npu")):
        alone = [planner.single(scenario, device) for planner in (before, after)]  # type: ignore[arg-type]
        assert alone[0] is not None
        assert alone[1] is not None
        assert alone[0].seconds == alone[1].seconds
    npu = [planner.single(prompt, "npu") for planner in (before, after)]
    assert npu[0] is not None
    assert npu[1] is not None
    for name, option in npu[0].options.items():
        times = 1.0 if name == "lm_head" else 2.0  # which one token of a prompt reaches
        assert npu[1].options[name].npu_s == times * option.npu_s
    plans = [prepare_solver(spec, p, PlanRequest(seq_lens=(256,))).plan for p in (host, slow)]
    shares = []
    for plan in plans:
        rows = dict.fromkeys(KINDS, 0)
        for op in plan.ops:
            for tile in op.tiles if op.m == 256 and op.op != "lm_head" else ():
                rows[tile.device] += tile.rows[1] - tile.rows[0]
        shares.append(rows["npu"] / sum(rows.values()))
    assert shares[1] < 0.8 * shares[0]
    decode = [[(op.op, op.tiles) for op in plan.ops if op.phase == "decode"] for plan in plans]
    assert decode[0] == decode[1]


def test_the_reference_kernels_of_a_profile(host: DeviceProfile) -> None:
    tasks = reference_tasks(host)
    assert len(tasks) == len(set(tasks)) == 8
    for task in tasks:
        assert (task.m, task.n, task.k) == REFERENCE_SIZES[phase_of(task.m)]
    record = host.devices["npu"]
    few = record.model_copy(
        update={
            "capabilities": record.capabilities.model_copy(update={"graph_sizes": (1, 64, 256)})
        }
    )
    odd = host.model_copy(update={"devices": host.devices | {"npu": few}})
    assert {t.m for t in reference_tasks(odd) if t.device == "npu"} == {1, 64}
    with pytest.raises(ProfileError, match="has no times of kernels that ran"):
        reference_tasks(DeviceProfile.load("snapdragon-8-gen-3"))


SLOWER = {("gpu", "prefill"): 1.8, ("gpu", "decode"): 1.7, ("npu", "prefill"): 0.9,
          ("npu", "decode"): 1.25}  # fmt: skip


def slower(kind: DeviceKind) -> Any:
    cost = gpu_cost if kind == "gpu" else npu_cost
    return lambda op, m: cost(op, m) * SLOWER[kind, phase_of(m)]


def other_machine(clock: ManualClock, *, kind: type[Workload] = Workload, **costs: Any) -> Workload:
    """The null devices of another machine than the one that was profiled."""
    found = devices(clock, **({kind: slower(kind) for kind in KINDS} | costs))  # type: ignore[arg-type]
    return kind(found, clock=clock, cold=0)


@pytest.fixture(scope="module")
def taken() -> DeviceProfile:
    """A profile of the null devices, which measured the reference kernels as shipped ones did."""
    clock = ManualClock()
    return profile_devices(
        devices(clock), options(pairs=(*PAIRS, (1024, 1024)), blocks=()), clock=clock
    )


def test_the_factors_of_another_machine_are_found(taken: DeviceProfile) -> None:
    workload, tasks = other_machine(ManualClock()), reference_tasks(taken)
    start_s = workload.clock.now()
    runners = prepare_references(workload, tasks)
    prepared_s = workload.clock.now()
    seconds = time_references(workload, runners, 1.2, 1.8)
    assert workload.clock.now() - prepared_s <= 1.3
    assert start_s < prepared_s
    found = factors_of(taken, tasks, seconds)
    assert {kind[:2] for kind in found} == set(SLOWER)
    for (device, phase, _), factor in found.items():
        assert factor == pytest.approx(SLOWER[device, phase], rel=0.02)
    here = CostModel(scaled(taken, found))
    for task, measured_s in zip(tasks, seconds, strict=True):
        predicted = here.matmul_s(task.device, W4, task.m, task.n, task.k).seconds
        assert predicted == pytest.approx(measured_s, rel=0.01)


@pytest.mark.parametrize("scale", [0.5, 2.0, 3.0])
def test_a_profile_of_a_slower_machine_is_corrected(taken: DeviceProfile, scale: float) -> None:
    """Of the same kernels' times another machine's profile makes the same predictions."""
    tasks = reference_tasks(taken)
    other = scaled(taken, factors(taken, {(d, p): scale for d in KINDS for p in PHASES}))
    seconds = [1e-3 * (i + 1) for i in range(len(tasks))]
    first, second = (CostModel(scaled(p, factors_of(p, tasks, seconds))) for p in (taken, other))
    for device in KINDS:
        sizes = (TOKENS[TOKENS <= 256][:, None], ROWS, 1024)
        np.testing.assert_allclose(
            first.matmul_s(device, W4, *sizes).seconds, second.matmul_s(device, W4, *sizes).seconds
        )


class Disturbed(Workload):
    """Another program has our core in all samples but one in `clean` (0: in all). What is then seen
    of a launch is far too short.
    """

    clean = 4
    count = 0

    def timed(self, runner: Any) -> tuple[float, float]:
        seconds, _ = super().timed(runner)
        self.count += 1
        if self.clean and self.count % self.clean == 0:
            return seconds, 0.0
        return 0.3 * seconds, 0.2 * seconds


class Busy(Disturbed):
    clean = 0


def test_disturbed_timings_do_not_count(taken: DeviceProfile) -> None:
    workload, tasks = other_machine(ManualClock(), kind=Disturbed), reference_tasks(taken)
    seconds = time_references(workload, prepare_references(workload, tasks), 1.2, 1.8)
    for (device, phase, _), factor in factors_of(taken, tasks, seconds).items():
        assert factor == pytest.approx(SLOWER[device, phase], rel=0.02)


def test_a_machine_that_is_busy_is_not_measured(taken: DeviceProfile) -> None:
    workload = other_machine(ManualClock(), kind=Busy)
    runners = prepare_references(workload, reference_tasks(taken))
    start_s = workload.clock.now()
    with pytest.raises(ProfileError, match="other programs keep the cores busy"):
        time_references(workload, runners, 1.2, 1.8)
    assert workload.clock.now() - start_s == pytest.approx(1.8, abs=0.1)


class LongBatchesDisturbed(Workload):
    """The program that has our core leaves it for a fraction of a batch now and then."""

    def timed(self, runner: Any) -> tuple[float, float]:
        seconds, _ = super().timed(runner)
        return (seconds, 0.0) if runner.batch <= 3 else (0.3 * seconds, 0.2 * seconds)


def test_where_batches_are_disturbed_shorter_ones_are_timed(taken: DeviceProfile) -> None:
    workload, tasks = (
        other_machine(ManualClock(), kind=LongBatchesDisturbed),
        reference_tasks(taken),
    )
    runners = prepare_references(workload, tasks)
    assert max(runner.batch for runner in runners) > 3
    start_s = workload.clock.now()
    seconds = time_references(workload, runners, 1.2, 1.8)
    assert 1.2 < workload.clock.now() - start_s < 1.5
    for (device, phase, _), factor in factors_of(taken, tasks, seconds).items():
        assert factor == pytest.approx(SLOWER[device, phase], rel=0.02)


def test_a_device_that_is_far_too_slow_is_not_measured(taken: DeviceProfile) -> None:
    workload = other_machine(ManualClock(), gpu=lambda op, m: 0.8)
    runners = prepare_references(workload, reference_tasks(taken))
    assert workload.clock.now() < 10  # of 0.8 s for each launch
    with pytest.raises(ProfileError, match=r"kernels are slow \(too few timings in 1.8 s\)"):
        time_references(workload, runners, 1.2, 1.8)


def test_a_device_that_fails_says_so(taken: DeviceProfile) -> None:
    workload = other_machine(ManualClock())
    runners = prepare_references(workload, reference_tasks(taken))
    workload.devices["npu"].close()
    with pytest.raises(DeviceError):
        time_references(workload, runners, 1.2, 1.8)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_times_that_cannot_be(taken: DeviceProfile, seconds: float) -> None:
    (task, *_) = reference_tasks(taken)
    with pytest.raises(ProfileError, match="a reference kernel of the"):
        factors_of(taken, [task], [seconds])


def test_medians_are_compared_with_medians(taken: DeviceProfile) -> None:
    """A profile's seconds are means: where its kernels are now and then late, so are they here."""
    skewed = taken.model_copy(
        update={"matmuls": tuple(r.model_copy(update={"skew": 1.05}) for r in taken.matmuls)}
    )
    tasks = reference_tasks(taken)
    plain, late = (factors_of(p, tasks, [1e-3] * len(tasks)) for p in (taken, skewed))
    assert late == pytest.approx({kind: 1.05 * factor for kind, factor in plain.items()})
