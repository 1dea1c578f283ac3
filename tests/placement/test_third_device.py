"""A CPU as third device: chosen where a profile has it and it gains, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.backends.host import affinity
from hetero.backends.host.affinity import spare_cores
from hetero.models import model_spec
from hetero.placement.by_profile import seconds_of
from hetero.placement.choice import Choice, PlacementRequest
from hetero.placement.choosing import choose
from hetero.profiler.records import DeviceProfile

MODEL = "qwen3-4b"
REQUEST = PlacementRequest(mode="hetero", gpu="reference", npu="reference", seq_lens=(512,))


@pytest.fixture(scope="module")
def chip() -> DeviceProfile:
    """A fitted chip whose CPU is said to be measured on ONNX Runtime."""
    profile = DeviceProfile.load("snapdragon-x-elite")
    cpu = profile.devices["cpu"].model_copy(update={"backend": "ort-cpu"})
    return profile.model_copy(update={"devices": {**profile.devices, "cpu": cpu}})


def chosen(chip: DeviceProfile, **options: object) -> Choice:
    return choose(model_spec(MODEL), replace(REQUEST, profile=chip, **options))  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["hetero", "auto"])
def test_three_devices_are_chosen_where_they_gain(chip: DeviceProfile, mode: str) -> None:
    choice = chosen(chip, mode=mode)
    assert choice.plan is not None
    assert choice.plan.devices() == {"gpu", "npu"}
    assert choice.third is not None
    assert choice.third.devices() == {"gpu", "npu", "cpu"}
    assert choice.third.graph_sizes == choice.plan.graph_sizes
    assert choice.cpu == "ort-cpu"
    assert "; prompts with rows on the cpu, 1." in choice.reason
    three_s, two_s = seconds_of(choice.third), seconds_of(choice.plan)
    assert three_s.prompts_s < 0.97 * two_s.prompts_s
    assert three_s.answers_s == pytest.approx(two_s.answers_s, rel=0.01)
    solver = choice.solver_on(("gpu", "npu", "cpu"))
    assert solver is choice.third_solver is not None
    slow = solver.drifted({("cpu", "prefill"): 1e3})
    assert "cpu" not in slow.plan_for(512).devices()
    assert "cpu" in solver.plan_for(512).devices()
    assert choice.solver_on(("gpu", "npu")) is choice.solver


@pytest.mark.full
def test_two_devices_are_chosen_where_no_third_may_be_opened(chip: DeviceProfile) -> None:
    shipped = DeviceProfile.load("snapdragon-x-elite")
    for choice in (chosen(chip, cpu="none"), chosen(shipped), chosen(chip, cpu="reference")):
        assert choice.plan is not None
        assert (choice.third, choice.cpu) == (None, None)


@pytest.mark.full
def test_a_slow_cpu_is_left_out(chip: DeviceProfile) -> None:
    predictors = []
    for known in chip.predictors:
        slow = known
        if known.device == "cpu" and known.knots is not None:
            seconds = tuple(tuple(30 * x for x in y) for y in known.knots.coefficients)
            knots = known.knots.model_copy(update={"coefficients": seconds})
            slow = known.model_copy(update={"knots": knots})
        predictors.append(slow)
    changed = chip.model_copy(update={"predictors": tuple(predictors)})
    assert chosen(changed).third is None


def test_cores_of_a_third_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, count, taken, spare in (
        ([0, 1, 2, 3], 4, {0, 3}, (1, 2)),
        ([0, 1, 2, 3], 4, {3}, (0, 1, 2)),
        ([0, 1, 2, 3], 3, {0, 3}, (1,)),  # a quota of three cores
        ([4, 5], 2, {4, 5}, (4,)),
        ([4, 5], 2, {5}, (4,)),
        ([7], 1, {7}, ()),
    ):
        monkeypatch.setattr(affinity, "allowed_cores", lambda own=cores: own)
        monkeypatch.setattr(affinity, "core_count", lambda own=count: own)
        assert spare_cores(taken) == spare
