"""fp16 arithmetic of the GPU kernels, emulated: no device here has `cl_khr_fp16`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hetero.backends.memory import new_tensor
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.ops import MatMul, WeightFormat
from hetero.backends.registry import open_device
from hetero.backends.weights import pack

FORMATS = (WeightFormat.W4A16, WeightFormat.W8A16, WeightFormat.F16)


@pytest.fixture(scope="module")
def gpu(device: OpenCLDevice) -> Iterator[OpenCLDevice]:
    with open_device("opencl", family="other") as opened:
        assert isinstance(opened, OpenCLDevice)
        opened.half = 2
        yield opened


def error(device: OpenCLDevice, weight_format: WeightFormat, m: int, n: int, k: int) -> float:
    random = np.random.default_rng()
    weight = pack(random.standard_normal((n, k), dtype=np.float32), weight_format.storage)
    x, y = new_tensor((m, k)), new_tensor((m, n))
    x.array[:] = random.standard_normal((m, k))
    y.array[:] = np.nan
    op = MatMul(n=n, k=k, weight_format=weight_format)
    device.prepare(op, {"weight": weight}).bind({"x": x, "y": y}, m).run()
    expected = x.array.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    return float(np.linalg.norm(y.array - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 512), (3, 33, 172), (40, 70, 96), (65, 64, 256)])
def test_fp16_products_stay_within_fp16_error(
    gpu: OpenCLDevice, weight_format: WeightFormat, m: int, n: int, k: int
) -> None:
    found = error(gpu, weight_format, m, n, k)
    assert 1e-5 < found < 1.5e-3, "rounded to fp16, and no worse than sums of 8 in fp16"


def test_formats_that_promise_more_stay_in_float32(gpu: OpenCLDevice) -> None:
    assert error(gpu, WeightFormat.F32, 5, 64, 256) < 1e-6
