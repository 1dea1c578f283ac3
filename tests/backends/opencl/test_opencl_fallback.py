"""A model whose kernels a driver's compiler cannot build runs on the other device."""

from __future__ import annotations

from typing import Any, Literal

import pytest

pytest.importorskip("pyopencl")

from hetero import LLM
from hetero.backends.errors import DeviceUnavailableError, KernelBuildError
from hetero.backends.opencl.proving import supervisor
from hetero.backends.opencl.proving.compiler import Remote
from hetero.backends.opencl.proving.store import KernelStore
from hetero.errors import FallbackWarning


@pytest.mark.parametrize("device", ["gpu", "hetero"])
def test_a_compiler_that_dies_costs_a_warning(
    device: Literal["gpu", "hetero"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is in the store, and the child that is asked instead ends at once."""
    with LLM("demo", device="npu") as llm:
        wanted = llm.generate("Once upon a time", max_tokens=12).text
    monkeypatch.setattr(KernelStore, "get", lambda *_: None)
    monkeypatch.setattr(Remote, "_bring", _ask_always)
    monkeypatch.setattr(supervisor, "COMMAND", ("false",))
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
    monkeypatch.setattr("hetero.device_set.open_device", _only_opencl(missing))
    with pytest.raises(DeviceUnavailableError, match="not installed"):
        LLM("demo", device="gpu")


def _ask_always(self: Remote, _entry: str, source: Any, variant: Any) -> None:
    self._builder.build(source, variant)


def _only_opencl(missing: Any) -> Any:
    from hetero.backends.registry import open_device

    def opened(name: str, **options: Any) -> Any:
        return open_device(name, **options) if name == "opencl" else missing()

    return opened
