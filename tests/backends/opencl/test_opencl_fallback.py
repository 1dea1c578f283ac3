"""A model whose kernels a driver's compiler cannot build runs on the other device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("pyopencl")

from hetero import LLM
from hetero.backends.errors import DeviceUnavailableError, KernelBuildError
from hetero.backends.opencl.platform import cache_root
from hetero.backends.opencl.reports import PREPARING
from hetero.backends.opencl.self_test import supervisor
from hetero.backends.opencl.self_test.kernel_store import KernelStore
from hetero.backends.opencl.self_test.program_compiler import Remote
from hetero.errors import FallbackWarning

START = (sys.executable, "-P", "-m", "hetero.start")


@pytest.mark.parametrize("device", ["gpu", "hetero"])
def test_a_compiler_that_dies_costs_a_warning(
    device: Literal["gpu", "hetero"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is in the store, and the child that is asked instead ends at once."""
    with LLM("demo", device="npu") as llm:
        wanted = llm.generate("Once upon a time", max_tokens=12).text
    monkeypatch.setattr(KernelStore, "get", lambda *_: None)
    monkeypatch.setattr(Remote, "_restore", _ask_always)
    monkeypatch.setattr(supervisor, "worker_command", lambda: ("false",))
    with pytest.warns(FallbackWarning, match="running on npu .* alone because opencl: building"):
        llm = LLM("demo", device=device)
    with llm:
        assert llm.devices.mode == "npu"
        result = llm.generate("Once upon a time", max_tokens=12)
        assert result.text == wanted
        assert "the driver's compiler crashed (exit code 1)" in result.stats.placement["fallback"]


def test_nothing_else_to_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KernelBuildError("opencl", "building a kernel", "refused")

    def missing(*_: object, **__: object) -> Any:
        raise DeviceUnavailableError("ort-cpu", "opening", "not installed")

    monkeypatch.setattr(Remote, "program", refuse)
    monkeypatch.setattr(Remote, "known", lambda *_: None)  # of what an earlier start has built
    monkeypatch.setattr("hetero.placement.device_set.open_device", _only_opencl(missing))
    with pytest.raises(DeviceUnavailableError, match="not installed"):
        LLM("demo", device="gpu")


def _ask_always(self: Remote, _entry: str, source: Any, variant: Any) -> None:
    self._builder.build(source, variant)


def _only_opencl(missing: Any) -> Any:
    from hetero.backends.registry import open_device

    def opened(name: str, **options: Any) -> Any:
        return open_device(name, **options) if name == "opencl" else missing()

    return opened


@pytest.mark.full
def test_a_cache_with_every_file_damaged_gives_the_same_text(tmp_path: Path) -> None:
    """Cut, emptied, flipped, zeroed: nothing of it is read; the next start is like the first, which
    finds what all tests share.
    """
    for path in cache_root().rglob("*"):
        if path.suffix in (".kernels", ".json") and "runs" not in path.parts:
            copy = tmp_path / "hetero" / "opencl" / path.relative_to(cache_root())
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    command = (*START, "generate", "demo", "Once upon a time", "--raw", "--max-tokens", "12")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HETERO_SCALE": "off"}
    damages: tuple[Callable[[bytes], bytes], ...] = (
        lambda good: good[: len(good) // 2],
        lambda _: b"",
        lambda good: good[:-9] + bytes([good[-9] ^ 4]) + good[-8:],
        lambda good: good[:60] + bytes(len(good) - 60),
    )
    texts = []
    for turn in range(3):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        texts.append((done.stdout, [x for x in done.stderr.splitlines() if PREPARING not in x]))
        files = sorted(x for x in tmp_path.rglob("*") if x.is_file() and x.suffix != ".lock")
        for i, path in enumerate(files if turn == 0 else ()):
            path.write_bytes(damages[i % len(damages)](path.read_bytes()))
    assert len(files) > 30
    assert texts[1] == texts[2] == texts[0]
