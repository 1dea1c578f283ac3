"""The report of `hetero doctor --report`: complete, and without anything personal."""

from __future__ import annotations

import json
import platform
import re
import socket
import uuid
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from hetero.measuring.device_checks import Finding
from hetero.measuring.doctor_report import anonymous, personal_names, report_paths, write_report
from hetero.measuring.profile_checks import check_profile
from hetero.profiler import profile_files
from hetero.profiler.records import DeviceProfile

USER, HOST = "ghopper42", "hopper-laptop.lan"
PERSONAL = (USER, "Ghopper42", HOST, HOST.partition(".")[0])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user whose name stands in many texts."""
    home = tmp_path / USER
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", USER)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(platform, "node", lambda: HOST)
    profile = DeviceProfile.load("host")
    own = home / "host.json"
    notes = (f"taken by {USER} on {HOST}", f"from {home}/kernels", f"Ghopper42@{HOST}:/tmp")
    profile.model_copy(update={"notes": notes}).save(own)
    monkeypatch.setattr(profile_files, "taken_profile_path", lambda: own)
    return home


def findings(home: Path) -> list[Finding]:
    return [
        Finding("ort-cpu", "npu", True, f"loads, {home}/.venv/lib/onnxruntime.so (1.32.0)"),
        Finding("opencl", "gpu", False, f"no driver for {USER}", f"look into {home}/drivers"),
        Finding("NPU driver", "npu", True, "firmware CDSP.HT.2.9, driver 1.0", needed=False),
    ]


@pytest.mark.full
def test_a_report_has_everything_and_nothing_personal(home: Path, tmp_path: Path) -> None:
    written = write_report(tmp_path / "report", findings(home))
    assert [x.name for x in written] == ["report.json", "report.md"]
    texts = [x.read_text("utf-8") for x in written]
    document, page = json.loads(texts[0]), texts[1]
    for text in texts:
        for name in (*PERSONAL, str(home), str(Path.home())):
            assert name.lower() not in text.lower()
        files = map(Path, ("/etc/machine-id", "/sys/class/dmi/id/product_serial"))
        serials = [x.read_text("utf-8").strip() or "no serial" for x in files if x.exists()]
        assert not any(x in text for x in (f"{uuid.getnode():012x}", *serials))
        assert not re.search(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", text)  # an address of a card
        assert not re.search(r"[\w.]+@[\w.]+\.\w+", text)
    assert {x["name"] for x in document["checks"]} == {"ort-cpu", "opencl", "NPU driver"}
    assert document["checks"][0]["detail"] == "loads, ~/.venv/lib/onnxruntime.so (1.32.0)"
    assert document["versions"]["onnxruntime"]
    assert document["machine"]["cores"]
    assert {x["test"] for x in document["bench"]} == {
        f"{test} @ d{depth}" for test in ("pp128", "tg32") for depth in (0, 256)
    }
    for part in ("firmware CDSP.HT.2.9", "| FAIL | gpu | opencl |", "tg32 @ d256", "GFLOP/s"):
        assert part in page


@pytest.mark.full
def test_a_reports_profile_is_checked_as_a_profile_is(home: Path, tmp_path: Path) -> None:
    document, _ = write_report(tmp_path / "r.md", [])
    assert json.loads(document.read_text("utf-8"))["bench_problem"] == "no device works"
    assert all(finding.ok for finding in check_profile(document))


def test_without_a_profile_the_report_says_how_to_take_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_files, "taken_profile_path", lambda: home / "none.json")
    document, page = write_report(tmp_path / "r", [])
    assert json.loads(document.read_text("utf-8"))["profile"] is None
    assert "none was taken: run `hetero profile` first" in page.read_text("utf-8")


@pytest.mark.usefixtures("home")
def test_names_are_replaced_as_words_and_longer_ones_first(tmp_path: Path) -> None:
    value: Any = {
        USER: [f"{tmp_path / USER}/a", f"{USER}s", f"C:\\Users\\{USER.upper()}\\x", f"x_{HOST}"],
        "n": 1,
    }
    assert anonymous(value, personal_names()) == {
        USER: ["~/a", f"{USER}s", "C:\\Users\\USER\\x", "x_HOST"],
        "n": 1,
    }


@pytest.mark.parametrize("name", ["report.pdf", ".", "none/report.md"])
def test_a_report_that_cannot_be_written_is_refused_before_it_is_made(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UserError, match=r"--report .*"):
        report_paths(tmp_path / name)
