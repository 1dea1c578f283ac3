"""`hetero warm`: a first start's work, done before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import Command, own_cache

pytest.importorskip("pyopencl")


def hetero(cache: Path, *words: str) -> str:
    """Return the output of a command in a process of its own, with that cache."""
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "HETERO_NOTICES": "off"}
    env.pop("HETERO_WAIT_FOR_PLAN", None)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hetero", *words],
        capture_output=True, text=True, check=False, env=env, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def warm(cache: Path, *words: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(hetero(cache, "warm", *words, "--json"))
    return document


@pytest.mark.full
def test_a_second_warm_says_that_all_is_ready(tmp_path: Path) -> None:
    cache = own_cache(tmp_path, alone=True)
    first = warm(cache, "demo", "--device", "npu")
    assert not first["ready"]
    assert {x["kind"]: x["files"] for x in first["made"]}["decisions"] == 1
    folder = Path(first["made"][0]["path"])
    assert folder.is_relative_to(cache / "hetero")
    second = warm(cache, "demo", "--device", "npu")
    assert (second["ready"], second["made"]) == (True, [])
    assert (second["model"], second["npu"], second["gpu"]) == ("demo", "ort-cpu", None)
    assert "all is ready" in hetero(cache, "warm", "demo", "--device", "npu")


@pytest.mark.full
@pytest.mark.parametrize("device", ["auto", "hetero"])
def test_a_start_after_it_prepares_nothing(tmp_path: Path, device: str) -> None:
    """Neither another process, nor a kernel, nor the modules that plan where the choice is kept."""
    cache = own_cache(tmp_path, alone=True)
    made = {x["kind"] for x in warm(cache, "demo", "--device", device)["made"]}
    assert {"decisions", "first-starts"} <= made
    kernels = set((cache / "hetero" / "opencl").rglob("*.bc"))
    words = ("generate", "demo", "Once upon a time", "--device", device, "--max-tokens", "20")
    assert hetero(cache, *words).strip()  # nothing on standard error
    assert set((cache / "hetero" / "opencl").rglob("*.bc")) == kernels
    assert warm(cache, "demo", "--device", device)["ready"]


def test_a_cache_that_cannot_be_written_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.placement.decisions.folder", lambda: Path(os.devnull) / "none")
    result = command("warm", "demo")
    assert result.returncode == 2
    assert "cannot be written" in result.stderr
    assert "XDG_CACHE_HOME" in result.stderr
