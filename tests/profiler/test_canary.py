"""Kernels that compute wrongly are found, named and kept out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.backends import reference
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import SystemClock
from hetero.backends.memory import Tensor
from hetero.backends.ops import MatMul, Op, RMSNorm
from hetero.backends.protocol import BoundCall, Device, Kernel, WeightValue
from hetero.backends.registry import find, open_device
from hetero.profiler import canary
from hetero.profiler.cost import CostModel
from hetero.profiler.grid import Task
from hetero.profiler.measure import MeasureSettings
from hetero.profiler.non_matmul_ops import NonMatmulMeter
from hetero.profiler.options import Options
from hetero.profiler.session import profile_devices
from hetero.profiler.workload import Workload

W4 = WeightFormat.W4A16
SHAPES = [(1, 200, 96), (40, 96, 300), (33, 256, 64)]


@pytest.mark.parametrize("weight_format", ["gguf-a16", "gguf-a8"])
@pytest.mark.parametrize("name", ["opencl", "ort-cpu"])
def test_formats_of_files_are_measured_on_weights_that_compute_right(
    name: str, weight_format: str
) -> None:
    kind = find(name).kind
    with open_device(name) as device:
        workload = Workload({kind: device}, clock=SystemClock(), cold=0)
        for m, n, k in ((1, 208, 96), (64, 96, 544)):
            task = Task(kind, WeightFormat(weight_format), "plain", m, n, k)
            assert canary.check_matmul(task, workload.runner(task)) is None


class Tampered:
    """A reference device whose `spoil` changes the outputs of what it computes."""

    def __init__(self, spoil: Any) -> None:
        self.device: Device = reference.open(kind="npu")
        self.spoil = spoil
        self.info, self.capabilities = self.device.info, self.device.capabilities
        for name in ("allocate", "map", "accepts", "close"):
            setattr(self, name, getattr(self.device, name))

    def prepare(self, op: Op, weights: Mapping[str, WeightValue]) -> Any:
        return _Kernel(self, self.device.prepare(op, weights))


class _Kernel:
    nbytes = 0

    def __init__(self, device: Tampered, inner: Kernel) -> None:
        self.device, self.inner, self.op = device, inner, inner.op

    def bind(self, tensors: Mapping[str, Tensor], m: int) -> Any:
        return _Call(self, self.inner.bind(tensors, m), tensors, m)


class _Call:
    def __init__(
        self, kernel: _Kernel, inner: BoundCall, tensors: Mapping[str, Tensor], m: int
    ) -> None:
        self.kernel, self.inner, self.tensors, self.m = kernel, inner, tensors, m

    def run(self) -> None:
        self.inner.run()
        self.kernel.device.spoil(self.kernel.op, self.m, self.tensors["y"].array[: self.m])


def check(spoil: Any, shape: tuple[int, int, int], fmt: WeightFormat = W4) -> Any:
    workload = Workload({"npu": Tampered(spoil)}, clock=SystemClock(), cold=0)  # type: ignore[dict-item]
    task = Task("npu", fmt, "plain", *shape)
    return canary.check_matmul(task, workload.runner(task))


@pytest.mark.parametrize("fmt", [x for x in WeightFormat if not x.of_file])
@pytest.mark.parametrize("shape", SHAPES)
def test_right_kernels_pass(shape: tuple[int, int, int], fmt: WeightFormat) -> None:
    assert check(lambda *_: None, shape, fmt) is None


def scale(op: Op, m: int, y: Any) -> None:
    y *= 1.01


def last_row(op: Op, m: int, y: Any) -> None:
    y[:, -1] = 0


def last_token(op: Op, m: int, y: Any) -> None:
    y[-1] = 0


def not_finite(op: Op, m: int, y: Any) -> None:
    y[0, 0] = np.nan


@pytest.mark.parametrize("spoil", [scale, last_row, last_token, not_finite])
@pytest.mark.parametrize("shape", SHAPES)
def test_wrong_kernels_are_found(spoil: Any, shape: tuple[int, int, int]) -> None:
    found = check(spoil, shape)
    assert found is not None
    assert found.tolerance == W4.tolerance
    assert f"MatMul w4a16 (plain) of {shape[0]}×{shape[1]}×{shape[2]}" in found.detail
    assert ("not finite" in found.detail) == (spoil is not_finite)


def test_a_kernel_that_fails_is_quarantined_with_its_reason() -> None:
    def fail(op: Op, m: int, y: Any) -> None:
        raise DeviceError("npu", "running", "CL_OUT_OF_RESOURCES", "use less")

    found = check(fail, SHAPES[0])
    assert found is not None
    assert "CL_OUT_OF_RESOURCES" in found.detail


def test_all_of_a_small_dimension_is_checked_and_both_ends_of_a_large_one() -> None:
    assert canary.checked(100, 48) == [slice(0, 100)]
    parts = canary.checked(1000, 48)
    assert parts[0].start == 0
    assert all(part.start % 16 == 0 for part in parts)
    assert 1000 - 48 >= parts[-1].start >= 1000 - 64


def test_other_kernels_are_checked_against_the_reference() -> None:
    def spoil(op: Op, m: int, y: Any) -> None:
        if isinstance(op, RMSNorm):
            y += 0.1

    meter = NonMatmulMeter("npu", Tampered(spoil), SystemClock())  # type: ignore[arg-type]
    found = meter.check(RMSNorm(d=64, eps=1e-5))
    assert found is not None
    assert found.op == "RMSNorm"
    clean = NonMatmulMeter("npu", reference.open(), SystemClock())
    assert clean.check(RMSNorm(d=64, eps=1e-5, add=True)) is None


@pytest.mark.full
def test_a_profile_keeps_a_wrong_kernel_from_the_solver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tall weights in prefill are wrong: they are not timed, and `allowed` says why."""

    def spoil(op: Op, m: int, y: Any) -> None:
        if isinstance(op, MatMul) and op.k >= 2 * op.n and m > 8:
            y *= 2

    monkeypatch.setattr(
        "hetero.profiler.measure.REFERENCE_SIZES", {"decode": (1, 64, 64), "prefill": (16, 64, 64)}
    )
    monkeypatch.setattr(
        "hetero.profiler.bandwidth.SIZES", {"decode": (1, 64, 64), "prefill": (16, 64, 64)}
    )
    monkeypatch.setattr("hetero.profiler.workload.cold_bytes", lambda _: 1 << 20)
    options = Options(
        quick=True,
        budget_s=60,
        pairs=((64, 64), (128, 64), (64, 128), (96, 96)),
        tokens=(1, 16, 32),
        blocks=(),
        settings=MeasureSettings(least=3, most=3, task_s=1.0),
    )
    out = tmp_path / "p.json"
    profile = profile_devices({"npu": Tampered(spoil)}, options, out=out)  # type: ignore[dict-item]
    assert [(q.op, q.shape_class) for q in profile.quarantined] == [("MatMul", "prefill-tall")]
    assert not [row for row in profile.matmuls if row.k >= 2 * row.n and row.m > 8]
    assert [row for row in profile.matmuls if row.k >= 2 * row.n]
    model = CostModel(profile)
    assert "is off by" in model.allowed("npu", W4, 16, 64, 128).reason
    assert model.allowed("npu", W4, 1, 64, 128)
