"""Kernels that a profile lacks are measured later, and fit what it has."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.backends.host.clock import ManualClock
from hetero.backends.ops import MatMul, Op
from hetero.backends.protocol import DeviceKind
from hetero.profiler.complete import completed, lacking
from hetero.profiler.device_overheads import DeviceOverheads
from hetero.profiler.errors import ProfileError
from hetero.profiler.non_matmul_ops import BLOCKS, reference_ops
from hetero.profiler.predict import op_name, other_s
from hetero.profiler.records import DECODE_TOKENS, DeviceProfile, Quarantine
from hetero.profiler.session import profile_devices
from tests.profiler.fakes import W4, devices, gpu_cost, options

NARROW = {"Attention+f16", "Attention+q8"}


def by_cache(op: Op, m: int) -> float:
    """A narrow cache takes other times than its bytes."""
    if isinstance(op, MatMul):
        return gpu_cost(op, m)
    return {"Attention+f16": 30e-6, "Attention+q8": 50e-6}.get(op_name(op), 10e-6)


@pytest.fixture(scope="module")
def whole() -> DeviceProfile:
    """One that has all."""
    clock = ManualClock()
    return profile_devices(devices(clock, gpu=by_cache), options(), clock=clock)


def without(profile: DeviceProfile, names: set[str], **changes: Any) -> DeviceProfile:
    kept = tuple(x for x in profile.other_predictors if x.op not in names)
    return profile.model_copy(update={"other_predictors": kept, **changes})


@pytest.mark.full
def test_what_is_added_is_as_it_would_have_been_then(whole: DeviceProfile) -> None:
    """On a day when all takes twice as long, and prompts four times."""
    clock = ManualClock()
    slow = devices(clock, gpu=lambda op, m: (2 if m <= DECODE_TOKENS else 4) * by_cache(op, m))
    old = without(whole, NARROW)
    found = completed(old, slow, options(), clock=clock)
    assert {(x.device, x.op) for x in found.other_predictors} == {
        (x.device, x.op) for x in whole.other_predictors
    }
    assert found.other_predictors[: len(old.other_predictors)] == old.other_predictors
    own = {x.op: x for x in found.other_predictors if x.device == "gpu"}
    for op in reference_ops(BLOCKS[0], W4):
        if op_name(op) in NARROW:
            for m, context in ((1, 0), (8, 1000), (256, 0)):
                wanted = by_cache(op, m)
                assert other_s(own[op_name(op)], op, m, context) == pytest.approx(wanted, rel=0.02)
    assert [note.partition(" was")[0] for note in found.notes[len(old.notes) :]] == [
        f"{name} of the {kind}" for kind in ("gpu", "npu") for name in sorted(NARROW)
    ]
    assert "times 0.50 for few tokens and 0.25 for many, so that Attention" in found.notes[-4]
    assert lacking(found, slow) == []
    assert completed(found, slow, options(), clock=clock) is found


@pytest.mark.full
def test_routed_experts_are_added_to_a_profile_of_before(whole: DeviceProfile) -> None:
    """They resemble nothing; attention says how fast the machine is."""
    clock = ManualClock()
    slow = devices(clock, gpu=lambda op, m: 2 * by_cache(op, m))
    experts = {x.op for x in whole.other_predictors if x.op.startswith("Experts")}
    assert experts
    before = {
        kind: x.model_copy(
            update={"capabilities": x.capabilities.model_copy(update={"experts": False})}
        )
        for kind, x in whole.devices.items()
    }
    old = without(whole, experts | {"Add"}, devices=before)
    found = completed(old, slow, options(), clock=clock, only="Experts")
    new = found.other_predictors[len(old.other_predictors) :]
    assert {(x.device, x.op) for x in new} == {(x, op) for x in ("gpu", "npu") for op in experts}
    assert all(x.capabilities.experts for x in found.devices.values())
    own = next(x for x in new if x.device == "gpu")
    op = next(x for x in reference_ops(BLOCKS[0], W4) if op_name(x) in experts)
    assert other_s(own, op, 64, 0) == pytest.approx(by_cache(op, 64), rel=0.05)
    assert "so that Attention takes what it took" in found.notes[-1]


@pytest.mark.full
def test_only_what_was_measured_here_is_completed(whole: DeviceProfile) -> None:
    here = devices(ManualClock())
    chip = DeviceProfile.load("snapdragon-8-gen-3")
    with pytest.raises(ProfileError, match=r"is simulated, not measured: nothing can be added"):
        lacking(chip, here)
    other = whole.devices["gpu"].model_copy(update={"fingerprint": "another"})
    moved = whole.model_copy(update={"devices": {**whole.devices, "gpu": other}})
    with pytest.raises(
        ProfileError, match=r"of other devices \(gpu: another; here .* without --add"
    ):
        lacking(moved, here)
    alone = without(whole, NARROW | {"Attention"})
    assert not lacking(alone, here), "nothing to hold them against"


def wrong(kind: DeviceKind, name: str) -> Quarantine:
    return Quarantine(device=kind, op=name, tolerance=1e-5, detail="off by 7")


def test_a_kernel_that_computes_wrongly_is_no_measure(whole: DeviceProfile) -> None:
    lost = tuple(wrong(kind, "Attention") for kind in whole.devices)
    old = without(whole, NARROW | {"Attention"}, quarantined=lost)
    assert not lacking(old, devices(ManualClock()))


@pytest.mark.full
@pytest.mark.parametrize("name", ["Attention+q8", "Attention"])
def test_a_kernel_that_computes_wrongly_is_not_added(
    whole: DeviceProfile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And said; a known one that does so now is the end of the profile."""

    def good(_self: Any, meter: Any, wanted: Any, quarantined: list[Quarantine]) -> set[Op]:
        kind = meter.device.capabilities.kind
        right = {op for op in wanted if (kind, op_name(op)) != ("gpu", name)}
        if right != set(wanted):
            quarantined.append(wrong("gpu", name))
        return right

    monkeypatch.setattr(DeviceOverheads, "_good", good)
    clock = ManualClock()
    old, here = without(whole, {"Attention+q8"}), devices(clock, gpu=by_cache)
    if name == "Attention":
        old = without(whole, NARROW)
        with pytest.raises(ProfileError, match="Attention of the gpu, which computes wrongly"):
            completed(old, here, options(), clock=clock)
        return
    found = completed(old, here, options(), clock=clock)
    assert found.quarantined == (wrong("gpu", name),)
    assert ("gpu", name) not in {(x.device, x.op) for x in found.other_predictors}
    assert "Attention+q8 of the gpu computes wrongly here: off by 7" in found.notes
    assert lacking(found, here) == []
