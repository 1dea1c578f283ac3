"""What is said about the Hexagon and its surroundings, here and on a Snapdragon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hetero import hexagon
from hetero.backends import snapdragon
from hetero.backends.errors import DeviceUnavailableError
from hetero.device_set import backend_name
from hetero.doctor import _check_together, diagnose


@pytest.mark.parametrize(
    ("machine", "system", "expected"),
    [
        ("x86_64", "Linux", False),
        ("aarch64", "Linux", True),
        ("ARM64", "Windows", True),
        ("arm64", "Darwin", False),
    ],
)
def test_where_a_hexagon_can_be(
    monkeypatch: Any, machine: str, system: str, expected: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.system", lambda: system)
    assert hexagon.is_snapdragon() == expected


def test_the_emulator_is_never_automatic(monkeypatch: Any) -> None:
    assert backend_name("npu", "auto") == "ort-cpu"
    assert backend_name("npu", "qnn") == "qnn"
    monkeypatch.setattr(hexagon, "present", lambda: True)
    assert backend_name("npu", "auto") == "qnn"


def test_skeletons_are_found_by_architecture(tmp_path: Path) -> None:
    missing = hexagon.skeleton_state([tmp_path])
    assert not missing.ok
    assert "ADSP_LIBRARY_PATH" in missing.remedy
    (tmp_path / "libQnnHtpV75Skel.so").touch()
    assert hexagon.skeleton_state([tmp_path]).ok
    assert hexagon.skeleton_state([tmp_path], 75).detail == "libQnnHtpV75Skel.so"
    assert "libQnnHtpV79Skel.so" in hexagon.skeleton_state([tmp_path], 79).detail


@pytest.mark.parametrize(
    ("machine", "chip"),
    [("SM8650\n", "sm8650"), ("X1E80100", "sc8380xp"), ("AMD EPYC", None), (None, None)],
)
def test_the_chip_is_named_by_the_kernel(
    tmp_path: Path, monkeypatch: Any, machine: str | None, chip: str | None
) -> None:
    file = tmp_path / "machine"
    if machine is not None:
        file.write_text(machine)
    monkeypatch.setattr(snapdragon, "MACHINE_FILE", file)
    found = snapdragon.chip_here()
    assert (found and found.name) == chip
    assert hexagon.chip_state(found).ok


def test_a_bundle_for_another_chip_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    qnn = pytest.importorskip("hetero.backends.qnn", exc_type=ImportError)
    (tmp_path / "machine").write_text("SM8550")
    monkeypatch.setattr(snapdragon, "MACHINE_FILE", tmp_path / "machine")
    with pytest.raises(DeviceUnavailableError, match=r"WRONG_CHIP.*sm8550.*not a.*--soc sm8550"):
        qnn.open(soc="sm8650")
    with qnn.open(cache=None) as device:
        assert "sm8550" in device.info.name


def test_skeletons_beside_the_library_are_shown_to_fastrpc(monkeypatch: Any) -> None:
    library = pytest.importorskip("hetero.backends.qnn.library", exc_type=ImportError)
    monkeypatch.setenv("ADSP_LIBRARY_PATH", "/dsp")
    for _ in range(2):
        library.show_skeletons(Path("/wheel"))
    assert os.environ["ADSP_LIBRARY_PATH"] == "/wheel;/dsp"


def test_missing_fastrpc_has_a_remedy(monkeypatch: Any) -> None:
    pytest.importorskip("hetero.backends.qnn", exc_type=ImportError)
    monkeypatch.setattr("hetero.backends.qnn.library.fastrpc", lambda: None)
    found = hexagon.fastrpc_state()
    assert not found.ok
    assert "libcdsprpc.so" in found.detail


def test_doctor_checks_the_emulated_hexagon_and_both_at_once() -> None:
    pytest.importorskip("hetero.backends.qnn", exc_type=ImportError)
    found = {finding.name: finding for finding in diagnose()}
    assert found["qnn"].ok
    assert "emulated" in found["qnn"].detail
    assert found["opencl + qnn"].ok


def test_a_device_that_computes_wrongly_beside_another_is_found(monkeypatch: Any) -> None:
    monkeypatch.setattr("hetero.doctor.TOLERANCE", 0.0)
    found = _check_together("opencl", "ort-cpu")
    assert not found.ok
    assert "off by" in found.detail
