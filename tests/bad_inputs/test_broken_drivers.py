"""Broken OpenCL drivers and a full cache: the work is done, and the lack is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "hetero.cli.app", "generate", "demo", "hi", "--max-tokens", "1")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="drivers are found by .icd files")
def test_a_broken_driver_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "driver.so").write_text("not a library", encoding="utf-8")
    (tmp_path / "bad.icd").write_text(str(tmp_path / "driver.so"), encoding="utf-8")
    started = {
        reason: subprocess.Popen(
            [*COMMAND, "--device", "gpu"],
            env={**os.environ, name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, value, reason in (
            ("OCL_ICD_VENDORS", str(tmp_path / "bad.icd"), "CL_PLATFORM_NOT_FOUND_KHR"),
            ("POCL_DEVICES", "nosuch", "CL_DEVICE_NOT_FOUND"),
        )
    }
    for reason, process in started.items():
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, bool(out.strip())) == (0, True), errors
        (warning,) = errors.splitlines()
        assert warning.startswith("hetero: warning: running on npu (ort-cpu) alone because opencl")
        assert reason in warning
        assert "install" in warning


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="limits by ulimit")
def test_a_full_cache_is_at_most_a_warning(tmp_path: Path) -> None:
    """No file may grow, as on a full disk: PoCL cannot even compile its programs."""
    started = [
        subprocess.Popen(
            ["sh", "-c", 'ulimit -f 0; trap "" XFSZ; exec "$@"', "sh", *COMMAND, "--device", name],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("gpu", "npu")
    ]
    for process in started:
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, bool(out.strip())) == (0, True), errors
        assert len(errors.splitlines()) <= 1, errors
        assert not errors or errors.startswith("hetero: warning: running on npu (ort-cpu) alone")
