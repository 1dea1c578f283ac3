"""Machines without a profile: which shipped one they start from, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.backends import snapdragon
from hetero.backends.opencl.drivers.levels import LEVELS
from hetero.backends.qnn import npu_driver
from hetero.models import model_spec
from hetero.placement.choice import PlacementRequest
from hetero.placement.choosing import choose
from hetero.placement.planning import find_profile, locate_profile
from hetero.profiler import nearest_profile, profile_files
from hetero.profiler.nearest_profile import Nearest, nearest_shipped

Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Play a machine: what its kernel, its device tree and Windows say of its chip."""

    def played(
        machine: str = "", tree: str = "", windows: str = "", *, arm: bool = True, dsp: bool = True
    ) -> None:
        for name, text in (("MACHINE_FILE", machine), ("DEVICE_TREE", tree)):
            (tmp_path / name).write_text(text)
            monkeypatch.setattr(snapdragon, name, tmp_path / name)
        monkeypatch.setattr(snapdragon, "registered_processor", lambda: windows)
        monkeypatch.setattr(snapdragon, "is_snapdragon", lambda: arm)
        monkeypatch.setattr(npu_driver, "names_qualcomm", lambda: dsp)
        monkeypatch.setattr(profile_files, "taken_profile_path", lambda: tmp_path / "none.json")

    return played


@pytest.mark.full
@pytest.mark.parametrize(
    ("machine", "tree", "windows", "name", "why"),
    [
        ("SM8750\n", "", "", "snapdragon-8-elite", "it is of this chip, Snapdragon 8 Elite (sm8"),
        ("CANOE", "", "", "snapdragon-8-elite-gen-5", "it is of this chip"),
        ("", "lenovo,thinkpad\0qcom,x1e78100\0qcom,x1e80100\0", "", "snapdragon-x-elite", "it is"),
        ("", "", "Snapdragon(R) X2 Elite - X2E80100 - Qualcomm(R)", "snapdragon-x2-elite", "it is"),
        ("", "qcom,qcs9075-iq-9075-evk\0qcom,qcs9075", "", "iq-9075", "it is of this chip, IQ-90"),
        ("", "", "Snapdragon(R) X Plus - X1P42100", "snapdragon-x-elite",
         "the nearest to this chip, Snapdragon(R) X Plus - X1P42100, is Snapdragon X Elite"),
        ("SM8550", "", "", "snapdragon-8-gen-3",
         "the nearest to this chip, Snapdragon 8 Gen 2, is Snapdragon 8 Gen 3"),
        ("SM7675", "", "", "snapdragon-8-gen-3", "the nearest to this chip, SM7675, is Snapd"),
        ("", "", "", "snapdragon-8-gen-3", "the nearest to this chip, a Snapdragon without a name"),
    ],
)  # fmt: skip
def test_a_snapdragon_starts_from_its_chips_profile_or_the_nearest(
    play: Play, machine: str, tree: str, windows: str, name: str, why: str
) -> None:
    play(machine, tree, windows)
    nearest = nearest_shipped()
    assert nearest is not None
    assert nearest.name == name
    assert nearest.why.startswith(why)
    assert {kind: x.backend for kind, x in nearest.load().devices.items()} == {
        "gpu": "opencl", "npu": "qnn"}  # fmt: skip


def test_the_notice_names_the_profile_and_why(
    play: Play, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETERO_NOTICES", "always")
    play(machine="SM8750")
    profile = find_profile(None)
    assert profile.name == "snapdragon-8-elite"
    assert (
        "so the shipped profile `snapdragon-8-elite` is used (it is of this chip, Snapdragon 8 "
        "Elite (sm8750, Hexagon v79)), its times not scaled to this machine because"
    ) in capsys.readouterr().err


def test_auto_plans_on_a_snapdragon_by_its_chips_profile(play: Play) -> None:
    play(machine="X1E80100")
    asked = PlacementRequest(mode="auto", gpu="opencl", npu="qnn", seq_lens=(256,))
    chosen = choose(model_spec("llama-3.2-1b"), asked)
    assert "says nothing of" not in chosen.reason
    assert chosen.reason.endswith("(profile snapdragon-x-elite)")
    assert "`snapdragon-x-elite` is used (it is of this chip" in chosen.notes[0]


@pytest.mark.parametrize(("dsp", "npu"), [(True, "ort-cpu"), (False, None)])
def test_arm64_without_a_hexagon_starts_from_a_pcs_devices(
    play: Play, monkeypatch: pytest.MonkeyPatch, dsp: bool, npu: str | None
) -> None:
    play(machine="SM8750" if dsp else "", dsp=dsp)
    monkeypatch.setattr(profile_files, "shipped_host", lambda: "host-avx2")
    profile, notice = locate_profile(None, npu)
    assert profile.devices["npu"].backend == "ort-cpu"
    assert (
        "`host-avx2` is used (no 64-bit Arm one is shipped, and a PC's devices are the same)"
    ) in notice


@pytest.mark.parametrize(
    ("level", "flags", "name", "why"),
    [
        ("avx512-vnni", "", "host", "a PC with AVX-512 VNNI, as this machine"),
        ("avx512-vnni", "amx_int8", "host-amx", "a PC with AMX, as this machine"),
        ("avx2", "", "host-avx2", "a PC with AVX2, as this machine"),
        ("avx512", "", "host-avx2", "a PC with AVX2, as this machine"),
        ("x86-64", "", "host-avx2", "a PC with AVX2: the nearest to this one"),
    ],
)
def test_a_pc_starts_from_one_with_its_instructions(
    play: Play, monkeypatch: pytest.MonkeyPatch, level: str, flags: str, name: str, why: str
) -> None:
    play(arm=False)
    for module in (profile_files, nearest_profile):
        monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags.split()))
        monkeypatch.setattr(module, "processor_levels", lambda: (LEVELS[level],))
        monkeypatch.setattr(module, "chosen_level", lambda: None)
    assert nearest_shipped() == Nearest(name, why)
    assert nearest_shipped("ort-cpu") == Nearest(name, why)


def test_without_a_shipped_profile_there_is_none(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_files, "shipped_names", lambda: ())
    for machine in ({"arm": False}, {"machine": "SM8750"}, {"dsp": False}):
        play(**machine)
        assert nearest_shipped() is None
