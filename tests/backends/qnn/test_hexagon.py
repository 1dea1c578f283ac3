"""What is said about the Hexagon and its surroundings, here and on a Snapdragon."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from hetero.backends import snapdragon
from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.qnn import hexagon, npu_driver
from hetero.measuring.device_checks import _check_together, diagnose
from hetero.placement.device_set import backend_name

emulated = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="Qualcomm's emulator is for x86-64"
)


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
    assert snapdragon.is_snapdragon() == expected


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


@emulated
def test_a_bundle_for_another_chip_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    (tmp_path / "machine").write_text("SM8550")
    monkeypatch.setattr(snapdragon, "MACHINE_FILE", tmp_path / "machine")
    with pytest.raises(DeviceUnavailableError, match=r"WRONG_CHIP.*sm8550.*not a.*--soc sm8550"):
        qnn.open(soc="sm8650")
    with qnn.open(cache=None) as device:
        assert "sm8550" in device.info.name


def test_skeletons_next_to_the_library_are_shown_to_fastrpc(monkeypatch: Any) -> None:
    library = pytest.importorskip("hetero.backends.qnn.library", exc_type=ImportError)
    monkeypatch.setenv("ADSP_LIBRARY_PATH", "/dsp")
    for _ in range(2):
        library.show_skeletons(Path("/wheel"))
    assert os.environ["ADSP_LIBRARY_PATH"] == "/wheel;/dsp"


def test_a_skeleton_of_another_version_is_refused(tmp_path: Path) -> None:
    skeleton = tmp_path / "libQnnHtpV75Skel.so"
    skeleton.write_bytes(b"\x7fELF" + 9000 * b"\0" + b"AISW_VERSION: 2.40.0\0v2.40.0.260101")
    found = hexagon.skeleton_state([tmp_path], 75, "2.51.0")
    assert not found.ok
    assert "libQnnHtpV75Skel.so is of QAIRT 2.40.0, the library of 2.51.0" in found.detail
    assert hexagon.skeleton_state([tmp_path], 75, "2.40.0").detail.endswith("(QAIRT 2.40.0)")


@emulated
def test_the_version_of_the_installed_library_is_read() -> None:
    library = pytest.importorskip("hetero.backends.qnn.library", exc_type=ImportError).load()
    assert npu_driver.qairt_version(library.path) == library.sdk
    assert npu_driver.qairt_version(Path("/nowhere")) == ""


@pytest.mark.parametrize(
    ("node", "dsp", "ok", "detail"),
    [
        (True, "running", True, "/dev/fastrpc-cdsp-secure, firmware qcom/cdsp.mbn"),
        (True, None, True, "/dev/fastrpc-cdsp-secure"),
        (True, "offline", False, "the compute DSP is offline"),
        (False, "running", False, "gives no /dev/fastrpc-cdsp"),
    ],
)
def test_the_driver_of_linux(
    tmp_path: Path, monkeypatch: Any, node: bool, dsp: str | None, ok: bool, detail: str
) -> None:
    monkeypatch.setattr(npu_driver, "ROOT", tmp_path)
    (tmp_path / "dev").mkdir()
    if node:
        (tmp_path / "dev/fastrpc-cdsp-secure").touch()
    for i, (name, state) in enumerate([("adsp", "running"), *([("cdsp", dsp)] if dsp else [])]):
        folder = tmp_path / f"sys/class/remoteproc/remoteproc{i}"
        folder.mkdir(parents=True)
        for key, value in {"name": name, "state": state, "firmware": f"qcom/{name}.mbn"}.items():
            (folder / key).write_text(f"{value}\n")
    found = npu_driver.linux_state()
    assert (found.ok, bool(found.remedy)) == (ok, not ok)
    assert detail in found.detail


@pytest.mark.parametrize(
    ("drivers", "ok", "detail"),
    [
        (
            [
                {"DriverDesc": "Intel AI Boost", "ProviderName": "Intel"},
                {
                    "DriverDesc": "Snapdragon(R) X Elite - NPU",
                    "ProviderName": "Qualcomm Technologies Inc.",
                    "DriverVersion": "30.0.140.1000",
                    "DriverDate": "7-1-2026",
                },
            ],
            True,
            "NPU 30.0.140.1000 of 7-1-2026",
        ),
        ([{}], False, "no driver of Qualcomm"),
    ],
)
def test_the_driver_of_windows(
    monkeypatch: Any, drivers: list[dict[str, object]], ok: bool, detail: str
) -> None:
    monkeypatch.setattr(npu_driver, "_accelerators", lambda: drivers)
    found = npu_driver.windows_state()
    assert (found.ok, bool(found.remedy)) == (ok, not ok)
    assert detail in found.detail


@pytest.mark.parametrize(
    "image",
    [
        r"\SystemRoot\System32\DriverStore\npu_1\npu.sys",
        r"System32\DriverStore\npu_1\npu.sys",
        r"\??\C:\Windows\System32\DriverStore\npu_1\npu.sys",
    ],
)
def test_fastrpc_is_next_to_the_driver_of_windows(image: str) -> None:
    library = pytest.importorskip("hetero.backends.qnn.library", exc_type=ImportError)
    found = library.image_folder(image, r"C:\Windows")
    assert str(found) == r"C:\Windows\System32\DriverStore\npu_1"


def test_loaded_libraries_are_named_by_their_file() -> None:
    found = npu_driver.loaded_file(ctypes.CDLL("libc.so.6"))
    assert found.startswith("/")
    assert Path(found).name.startswith("libc")


def test_another_machine_says_that_it_has_no_hexagon(monkeypatch: Any) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    ((name, check),) = hexagon.other_checks()
    found = check()
    assert (name, found.ok) == ("Hexagon", True)
    assert "none on this machine (x86_64), so no driver, FastRPC" in found.detail


def test_missing_fastrpc_has_a_remedy(monkeypatch: Any) -> None:
    pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    monkeypatch.setattr("hetero.backends.qnn.library.fastrpc", lambda: None)
    found = hexagon.fastrpc_state()
    assert not found.ok
    assert "libcdsprpc.so" in found.detail


@pytest.mark.full
@emulated
def test_doctor_checks_the_emulated_hexagon_and_both_at_once() -> None:
    pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
    found = {finding.name: finding for finding in diagnose()}
    assert found["qnn"].ok
    assert "emulated" in found["qnn"].detail
    assert found["opencl + qnn"].ok


def test_a_device_that_computes_wrongly_next_to_another_is_detected(monkeypatch: Any) -> None:
    monkeypatch.setattr("hetero.measuring.device_checks.TOLERANCE", 0.0)
    (found,) = _check_together("opencl", "ort-cpu")
    assert not found.ok
    assert "off by" in found.detail
