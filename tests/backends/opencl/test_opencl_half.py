"""fp16 arithmetic of the GPU kernels, emulated: no device here has `cl_khr_fp16`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hetero.backends.formats import WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.ops import MatMul
from hetero.backends.reference.compute import program
from hetero.backends.registry import open_device
from hetero.backends.weights import pack
from tests.backends.cases import make_weights
from tests.support.helpers import assert_close

FORMATS = (WeightFormat.W4A16, WeightFormat.W8A16, WeightFormat.F16)


@pytest.fixture(scope="module")
def gpu(device: OpenCLDevice) -> Iterator[OpenCLDevice]:
    with open_device("opencl", family="other") as opened:
        assert isinstance(opened, OpenCLDevice)
        opened.half = 2
        yield opened


def error(
    device: OpenCLDevice, weight_format: WeightFormat, m: int, n: int, k: int, size: float = 1.0
) -> float:
    random = np.random.default_rng()
    weight = pack(random.standard_normal((n, k), dtype=np.float32), weight_format.storage)
    x, y = new_tensor((m, k)), new_tensor((m, n))
    x.array[:] = size * random.standard_normal((m, k))
    y.array[:] = np.nan
    op = MatMul(n=n, k=k, weight_format=weight_format)
    device.prepare(op, {"weight": weight}).bind({"x": x, "y": y}, m).run()
    expected = x.array.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    return float(np.linalg.norm(y.array - expected) / np.linalg.norm(expected))


@pytest.mark.full
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 512), (3, 33, 172), (40, 70, 96), (65, 64, 256)])
def test_fp16_products_stay_within_fp16_error(
    gpu: OpenCLDevice, weight_format: WeightFormat, m: int, n: int, k: int
) -> None:
    found = error(gpu, weight_format, m, n, k)
    assert 1e-5 < found < 1.5e-3, "rounded to fp16, and no worse than sums of 8 in fp16"


FEW = (WeightFormat.W4A16, WeightFormat.W4A8)  # the others run with `--full`
OUTLIERS = (500.0, 1000.0, 4000.0, 1e4, 6e4, 7e4, 1e6, 1e30)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "weight_format",
    # Storages of files compile for minutes; the contract has them, with a bias.
    [
        pytest.param(
            x,
            marks=[pytest.mark.exhaustive if x.of_file else pytest.mark.full] * (x not in FEW),
            id=x.value,
        )
        for x in WeightFormat
    ],
)
@pytest.mark.parametrize("m", [1, 2, pytest.param(8, marks=pytest.mark.full), 40])
def test_outliers_overflow_nothing(gpu: OpenCLDevice, weight_format: WeightFormat, m: int) -> None:
    """One activation of thousands, as in the models that people use; others stay as they were."""
    random = np.random.default_rng(m)
    n, k = 64, 256
    x, y = new_tensor((m, k)), new_tensor((m, n))
    op = MatMul(n=n, k=k, weight_format=weight_format)
    weights = make_weights(op, random)
    values = 0.02 * random.standard_normal((n, k), dtype=np.float32)
    weights["weight"] = pack(values, weight_format.storage)
    call = gpu.prepare(op, weights).bind({"x": x, "y": y}, m)
    for outlier in OUTLIERS:
        x.array[:] = random.standard_normal((m, k))
        x.array[0, 77] = outlier
        y.array[:] = np.nan
        call.run()
        expected = program(op, weights)[0]
        wanted = {"x": x.array, "y": np.empty((m, n), np.float32)}
        expected(wanted)
        for row in range(m):
            assert_close(y.array[row], wanted["y"][row], 1.5e-3, f"{outlier} row {row}")


@pytest.mark.parametrize(
    "weight_format",  # whose scaling is one: each compiles for seconds
    [
        pytest.param(x, marks=[pytest.mark.full] * (x is not FORMATS[0]), id=x.value)
        for x in FORMATS
    ],
)
@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e-3, 1e4, 1e20])
def test_activations_of_any_size_are_as_exact(
    gpu: OpenCLDevice, weight_format: WeightFormat, m: int, size: float
) -> None:
    """fp16 alone ends at 65504, and has no bits left below 6e-8."""
    assert error(gpu, weight_format, m, 64, 256, size) < 1.5e-3


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(gpu: OpenCLDevice, m: int, bad: float) -> None:
    """It is found where the logits are looked at, not hidden by the scaling."""
    weight = pack(np.ones((32, 64), np.float32), WeightFormat.W4A16.storage)
    x, y = new_tensor((m, 64)), new_tensor((m, 32))
    x.array[:], x.array[0, 5] = 1.0, bad
    op = MatMul(n=32, k=64, weight_format=WeightFormat.W4A16)
    gpu.prepare(op, {"weight": weight}).bind({"x": x, "y": y}, m).run()
    assert not np.isfinite(y.array[0]).any()
    assert np.isfinite(y.array[1:]).all()


def test_a_cpu_computes_in_float32(device: OpenCLDevice) -> None:
    if "cpu" not in device.info.details:
        pytest.skip("needs PoCL")
    assert device.half == 0


def test_formats_that_promise_more_stay_in_float32(gpu: OpenCLDevice) -> None:
    assert error(gpu, WeightFormat.F32, 5, 64, 256) < 1e-6
