"""The emulated arm64 machine of `bench/arm64.py`: its packages, and what is said without it."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


@pytest.fixture
def arm64_root(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("parts.arm64_root")


def test_requirements_are_those_of_arm64(arm64_root: Any) -> None:
    asked = {x.name: x for x in map(Requirement, arm64_root.requirements())}
    assert {"numpy", "onnxruntime", "onnxruntime-qnn", "pyopencl", "fastapi", "pytest"} <= set(
        asked
    )
    assert not asked["pyopencl"].extras  # pip's PoCL is for x86-64
    assert not {"atheris", "psutil", "torch"} & set(asked)


@pytest.mark.full
@pytest.mark.parametrize("command", ["slice", "whole", "run -- true"])
def test_without_a_root_one_line_names_the_command(command: str, tmp_path: Path) -> None:
    name, *rest = command.split()
    done = subprocess.run(
        [sys.executable, str(BENCH / "arm64.py"), name, "--folder", str(tmp_path), *rest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr == (
        f"skipped: there is no arm64 root in {tmp_path}: `python bench/arm64.py make` makes one\n"
    )


def test_a_root_that_does_not_run_is_skipped_with_a_line(arm64_root: Any, tmp_path: Path) -> None:
    """As on an older kernel, or where user namespaces are forbidden."""
    if shutil.which("unshare") is None:
        pytest.skip("this system has no user namespaces")
    (tmp_path / "root").mkdir()
    (tmp_path / "qemu-aarch64").write_text("not an emulator", encoding="utf-8")
    with pytest.raises(arm64_root.UnavailableError) as caught:
        arm64_root.Machine(tmp_path, {}).check()
    assert "runs no arm64 programs in a user namespace (Linux 6.7" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lacking", ["apt-get", "dpkg"])
def test_a_system_without_apt_is_refused(
    arm64_root: Any, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == lacking else name)
    with pytest.raises(arm64_root.UnavailableError, match=f"{lacking} is missing: make the root"):
        arm64_root.make(tmp_path / "root", "")
    assert not (tmp_path / "root").exists()
