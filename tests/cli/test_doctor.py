"""`hetero doctor` and `hetero devices` print every line, whatever a check raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.backends import opencl, registry, snapdragon
from hetero.backends.errors import DeviceUnavailableError, UserError
from hetero.backends.qnn import hexagon, npu_driver
from hetero.cli.app import main
from hetero.cli.doctor import next_step, print_findings
from hetero.measuring import device_checks
from hetero.placement.device_set import backend_name

SURROUNDINGS = ["chip", "NPU driver", "FastRPC", "Hexagon skeleton", "shared memory"]


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("hetero.backends.qnn.library", exc_type=ImportError)


@pytest.fixture
def snapdragon_here(library: Any, tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    """A Snapdragon under Linux with `[qnn]` installed, and the root of its device tree: nothing of
    its NPU is there yet.
    """
    monkeypatch.setenv("ADSP_LIBRARY_PATH", "")
    for module in (snapdragon, library):
        monkeypatch.setattr(module, "is_snapdragon", lambda: True)
    for module in (snapdragon, npu_driver):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(snapdragon, "MACHINE_FILE", tmp_path / "machine")
    (tmp_path / "machine").write_text("SM8650\n")
    (tmp_path / "dev").mkdir()
    library._load.cache_clear()
    yield tmp_path
    library._load.cache_clear()


@pytest.mark.full
def test_a_snapdragon_without_a_device_node_has_every_line(
    snapdragon_here: Path, capsys: Any
) -> None:
    (snapdragon_here / "proc/device-tree").mkdir(parents=True)
    (snapdragon_here / "proc/device-tree/compatible").write_bytes(b"lenovo,t14s\0qcom,x1e80100\0")
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    named = [line.split(maxsplit=2)[2] for line in lines if line.startswith(("PASS", "FAIL"))]
    for name in ("opencl ", "opencl:pocl", "ort-cpu", "qnn", *SURROUNDINGS):
        assert any(line.startswith(name) for line in named), (name, lines)
    (qnn,) = [line for line in lines if " qnn " in line and line.startswith("FAIL")]
    assert "NO_NPU: there is no /dev/fastrpc-cdsp*" in qnn
    assert lines[-1].startswith("next: qnn: use a kernel with the fastrpc driver")


@pytest.mark.parametrize(
    ("tree", "code"), [({}, 0), ({"sys/devices/soc0/family": "Snapdragon"}, 1)]
)
def test_an_arm_machine_that_is_no_snapdragon_passes(
    snapdragon_here: Path, capsys: Any, tree: dict[str, str], code: int
) -> None:
    """On a Raspberry Pi or a server nothing is at fault if there is no Hexagon."""
    for name, text in tree.items():
        (snapdragon_here / name).parent.mkdir(parents=True)
        (snapdragon_here / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    assert ended.value.code == code
    (qnn,) = [f for f in json.loads(capsys.readouterr().out) if f["name"] == "qnn"]
    assert (qnn["ok"], qnn["needed"]) == (False, bool(code))


def raising(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), OSError(5, "Input/output error"), UserError("x: unset it")]
)
@pytest.mark.parametrize(
    ("owner", "name", "failed"),
    [
        (opencl, "driver_reports", device_checks.DRIVERS),
        (device_checks, "_check_matmul", "ort-cpu"),
        (device_checks, "_check_together", "opencl + ort-cpu"),
        (hexagon, "elsewhere_state", "Hexagon"),
    ],
)
def test_what_a_check_raises_is_its_line(
    monkeypatch: Any, owner: object, name: str, failed: str, error: Exception
) -> None:
    monkeypatch.setattr(snapdragon, "is_snapdragon", lambda: False)
    monkeypatch.setattr(hexagon, "expected", lambda: False)
    monkeypatch.setattr(owner, name, raising(error))
    findings = {finding.name: finding for finding in device_checks.diagnose()}
    assert {"opencl", "ort-cpu", "Hexagon"} <= set(findings)
    assert not findings[failed].ok
    assert str(error) in findings[failed].detail
    assert (findings[failed].remedy == device_checks.REPORT) != isinstance(error, UserError)
    assert next_step(list(findings.values())).startswith("next: ")


@pytest.mark.parametrize("check", SURROUNDINGS)
def test_each_check_around_the_hexagon_stands_alone(
    snapdragon_here: Path, monkeypatch: Any, check: str
) -> None:
    monkeypatch.setattr(device_checks, "real_backends", lambda: ("ort-cpu",))
    owner, name = {
        "chip": (hexagon, "chip_state"),
        "NPU driver": (npu_driver, "state"),
        "FastRPC": (hexagon, "fastrpc_state"),
        "Hexagon skeleton": (hexagon, "skeleton_state"),
        "shared memory": (hexagon, "shared_memory_state"),
    }[check]
    monkeypatch.setattr(owner, name, raising(LookupError("odd")))
    findings = {finding.name: finding for finding in device_checks.diagnose()}
    assert list(findings) == ["ort-cpu", *SURROUNDINGS]
    assert findings[check].detail == "the check raised LookupError: odd"


def test_devices_lists_the_others_too(monkeypatch: Any) -> None:
    monkeypatch.setattr(opencl, "driver_reports", raising(RuntimeError("boom")))
    names = [finding.name for finding in device_checks.list_devices()]
    assert names == ["opencl", device_checks.DRIVERS, "ort-cpu", "qnn"]


def test_lines_are_printed_as_they_are_made(capsys: Any) -> None:
    """A driver that ends the process takes back no line that was printed."""

    def findings() -> Iterator[device_checks.Finding]:
        yield device_checks.Finding("first", "gpu", True, "well")
        assert "first" in capsys.readouterr().out
        yield device_checks.Finding("second", "npu", True, "well")

    assert len(print_findings(findings(), False, ("PASS", "FAIL"))) == 2


def test_the_skeletons_are_compared_without_loading_the_library(
    library: Any, snapdragon_here: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(library, "load", raising(AssertionError("loaded")))
    state = hexagon.installed_skeleton_state()
    assert "libQnnHtpV75Skel.so" in state.detail


@pytest.mark.parametrize("error", [ImportError("libfoo.so: GLIBC_2.99"), OSError("no such")])
def test_a_vendor_package_that_cannot_be_imported_is_no_device(
    monkeypatch: Any, error: Exception
) -> None:
    monkeypatch.setattr(registry.importlib, "import_module", raising(error))
    with pytest.raises(DeviceUnavailableError, match="importing onnxruntime"):
        registry.open_device("ort-cpu")
    with pytest.raises(type(error)):  # ours, not a vendor's
        registry.open_device("null")


@pytest.mark.parametrize(
    ("node", "mode", "fastrpc", "chosen"),
    [
        (None, 0, True, "ort-cpu"),
        ("fastrpc-cdsp", 0o600, True, "qnn"),
        ("fastrpc-cdsp-secure", 0o600, True, "qnn"),
        ("fastrpc-adsp", 0o600, True, "ort-cpu"),
        ("fastrpc-cdsp", 0o600, False, "ort-cpu"),
        ("fastrpc-cdsp", 0o000, True, "ort-cpu"),
    ],
)
def test_auto_takes_a_hexagon_that_can_be_reached(
    library: Any, snapdragon_here: Path, monkeypatch: Any, node: str | None, mode: int,
    fastrpc: bool, chosen: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(library, "fastrpc", lambda: object() if fastrpc else None)
    if node is not None:
        (snapdragon_here / "dev" / node).touch()
        allowed = mode != 0
        monkeypatch.setattr(os, "access", lambda *_: allowed)  # root may open everything
    assert backend_name("npu", "auto") == chosen


def test_the_provider_warns_nothing_of_the_search_path_on_a_snapdragon(
    library: Any, snapdragon_here: Path, monkeypatch: Any
) -> None:
    """It logs by ONNX Runtime's default logger, whatever a session's severity is."""
    severities: list[int] = []
    monkeypatch.setattr(library.ort, "set_default_logger_severity", severities.append)
    with pytest.raises(DeviceUnavailableError, match="NO_NPU"):
        library.load()
    assert severities == [library.ERRORS]


PRINTS = """
import ctypes
from hetero.backends.qnn.library import quiet_stdout
with quiet_stdout():
    ctypes.CDLL(None).puts(b" # LIBNATIVE: using the default")
print('{"json": 1}')
"""


@pytest.mark.skipif(os.name != "posix", reason="names the C library as POSIX does")
@pytest.mark.usefixtures("library")
def test_what_a_library_prints_is_not_written_later_either() -> None:
    """It stays in the buffer of a pipe until the process ends, after the JSON."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True
    )
    assert done.stdout == '{"json": 1}\n'


@pytest.mark.parametrize("backend", ["qnn", "ort_cpu"])
def test_onnx_runtime_is_loaded_without_telemetry(backend: str) -> None:
    """It would warn of a home that cannot be written, on standard error."""
    if backend == "qnn":
        pytest.importorskip("onnxruntime_qnn")
    code = f"import hetero.backends.{backend}, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    env = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout == "1\n"


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="closes a descriptor")
@pytest.mark.parametrize("command", ["doctor", "devices"])
def test_a_closed_output_is_no_fault(command: str) -> None:
    """A service has none; with QNN, whose library prints."""
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m hetero.cli.app {command} >&-"],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_the_next_step_is_the_first_remedy_that_a_model_needs() -> None:
    well = device_checks.Finding("ort-cpu", "npu", True, "here")
    driver = device_checks.Finding("opencl:x", "gpu", False, "gone", "delete it", needed=False)
    failed = device_checks.Finding("opencl", "gpu", False, "no driver", "install one")
    bare = device_checks.Finding("qnn", "npu", False, "no node")
    assert next_step([well, driver]) == 'next: hetero generate demo "Once upon a time"'
    assert next_step([well, driver, failed, bare]) == "next: opencl: install one"
    assert next_step([bare]) == "next: qnn: no node"
