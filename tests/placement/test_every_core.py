"""What OpenCL on every core gains: measured in processes, and fitted."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.json_child import ChildDiedError
from hetero.backends.registry import open_device
from hetero.measuring import every_core
from hetero.measuring.every_core import (
    LAYERS,
    Stepper,
    can_use_every_core,
    measure_every_core,
)
from hetero.profiler.records import EveryCore

SMALL_S, LARGE_S = 2e-4, 3e-3  # steps on one core


def pretend(monkeypatch: pytest.MonkeyPatch, found: dict[str, dict[str, float]]) -> None:
    """Processes that measure these steps."""

    class Pretended:
        """Stand in for the process of a backend."""

        def __init__(self, backend: str, formats: Any, _cores: Any) -> None:
            self.times = dict.fromkeys(formats, found[backend])

        def round(self) -> Any:
            return self.times

    monkeypatch.setattr(every_core, "Stepper", lambda *about: nullcontext(Pretended(*about)))
    monkeypatch.setattr(every_core, "core_count", lambda: 4)


def steps(small_s: float, large_s: float) -> dict[str, float]:
    return {
        f"{size} {phase}": seconds * (10 if phase == "prefill" else 1)
        for size, seconds in (("small", small_s), ("large", large_s))
        for phase in ("prefill", "decode")
    }


def test_both_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = EveryCore(
        weight_format=WeightFormat.W4A8, phase="decode", cores=4, speedup=1.6, layer_s=2e-5
    )
    layers = every_core.model_spec(every_core.SMALL).layers
    every = steps(true.seconds(SMALL_S, layers), true.seconds(LARGE_S, LAYERS))
    pretend(monkeypatch, {"opencl": steps(SMALL_S, LARGE_S), "opencl-cores": every})
    found = measure_every_core((WeightFormat.W4A8, WeightFormat.F32))
    assert [(x.weight_format, x.phase) for x in found] == [
        (name, phase) for name in ("w4a8", "f32") for phase in ("prefill", "decode")
    ]
    decode = found[1]
    assert (decode.speedup, decode.layer_s) == pytest.approx((1.6, 2e-5))
    assert decode.cores == 4


@pytest.mark.parametrize("small_factor", [0.01, 100.0])
def test_times_that_no_two_numbers_explain(
    monkeypatch: pytest.MonkeyPatch, small_factor: float
) -> None:
    """The large model counts: nothing is negative."""
    every = steps(small_factor * SMALL_S, LARGE_S / 2)
    pretend(monkeypatch, {"opencl": steps(SMALL_S, LARGE_S), "opencl-cores": every})
    for found in measure_every_core((WeightFormat.W4A8,)):
        assert (found.speedup, found.layer_s) == (pytest.approx(2.0), 0.0)


def test_a_process_that_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(
        DeviceError, match=r"opencl-cores: measuring it .* failed: ended with exit code 3"
    ):
        measure_every_core((WeightFormat.W4A8,))


@pytest.mark.full
def test_a_process_says_what_failed_in_it() -> None:
    with pytest.raises(ChildDiedError, match="nope"), Stepper("nope", [WeightFormat.W4A8], [0]):
        pass


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_measured_here() -> None:
    with open_device("opencl") as device:
        if not can_use_every_core(device):
            pytest.skip("needs PoCL")
    for _ in range(3):  # another process on one of the cores takes all that it would gain
        prefill, decode = measure_every_core((WeightFormat.W4A8,), rounds=1)
        if prefill.speedup > 1.0:
            break
    assert prefill.cores == decode.cores == len(os.sched_getaffinity(0))
    assert prefill.speedup > 1.0  # 1.8 with two cores; that of decoding is the memory's
    assert 0.2 < decode.speedup < 2 * decode.cores


def test_other_devices_have_their_own_cores() -> None:
    with open_device("reference", kind="gpu") as device:
        assert not can_use_every_core(device)
