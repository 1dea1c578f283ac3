"""w8a8 on every device that computes its integers: the same bits, at every extreme.

y without a bias is float32(sum) · (x_scale · scale), and the sum has one right value.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends import registry
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.ops import Embed, MatMul
from hetero.backends.protocol import Device, WeightValue
from hetero.backends.weights import PackedWeight, pack, pack_q8r, padded
from tests.support.selection import examples

Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]
SIZES = (1, 2, 4, 8, 32, 64, 128)
KINDS = {
    "reference": {},
    "ort-cpu": {"graph_sizes": SIZES},
    "opencl": {},
    "opencl-work-groups": {"family": "other"},
}
# (largest code, smallest code) of weights and of activations.
EXTREMES = ((127, 127), (-127, -128), (127, -128), (-128, 127), (-128, -128), (-128, -1))


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device of each kind that computes with integers."""
    name = request.param.removesuffix("-work-groups")
    if name == "opencl":
        pytest.importorskip("pyopencl")
    with registry.open_device(name, **KINDS[request.param]) as opened:
        if WeightFormat.W8A8 not in opened.capabilities.weight_formats:
            pytest.skip(f"{name} has no exact 8-bit products here")
        yield opened


def packed_codes(codes: Codes, scales: Floats) -> PackedWeight:
    """A weight of these codes, -128 included, which quantisation never makes."""
    n, k = codes.shape
    full = np.zeros((padded(n, 16), padded(k, 32)), np.int8)
    full[:n, :k] = codes
    rows = np.zeros(padded(n, 16), np.float32)
    rows[:n] = scales
    return pack_q8r(full, rows, n, k)


def product(device: Device, x: Floats, weight: PackedWeight, x_scale: np.float32) -> Floats:
    """y of one call; it is NaN before."""
    m, op = len(x), MatMul(n=weight.n, k=weight.k, weight_format=WeightFormat.W8A8)
    tensors = {"x": new_tensor((m, op.k)), "y": new_tensor((m, op.n))}
    tensors["x"].array[:], tensors["y"].array[:] = x, np.nan
    weights: dict[str, WeightValue] = {"weight": weight, "x_scale": np.full(1, x_scale)}
    kernel = device.prepare(op, weights)
    kernel.bind(tensors, m).run()
    return np.array(tensors["y"].array)


def check(device: Device, x: Floats, codes: Codes, scales: Floats, x_scale: np.float32) -> None:
    """Bit for bit against sums in int64."""
    quotients = np.rint(x / x_scale).clip(-128, 127).astype(np.int64)
    sums = quotients @ codes.T.astype(np.int64)
    wanted = sums.astype(np.float32) * (x_scale * scales)
    np.testing.assert_array_equal(product(device, x, packed_codes(codes, scales), x_scale), wanted)


@pytest.mark.full
@pytest.mark.parametrize("k", [32, 33, 100, 1000, 2048, 8192, 14336])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 32])
def test_random_codes(device: Device, m: int, k: int) -> None:
    rng = np.random.default_rng((m, k))
    codes = rng.integers(-128, 128, (37, k)).astype(np.int8)
    scales = rng.uniform(1e-4, 1e-2, 37).astype(np.float32)
    x_scale = np.float32(rng.uniform(0.01, 0.03))
    check(device, rng.standard_normal((m, k), dtype=np.float32), codes, scales, x_scale)


@pytest.mark.parametrize(("w", "x"), EXTREMES)
@pytest.mark.parametrize("k", [32, 100, 14336])
@pytest.mark.parametrize("m", [1, 2, 64])
def test_extreme_codes_do_not_saturate(device: Device, m: int, k: int, w: int, x: int) -> None:
    """The largest sums that there are: 2²⁸ in size, pairs of products beyond 16 bits."""
    codes = np.full((33, k), w, np.int8)
    scales = np.linspace(0.5, 2.0, 33, dtype=np.float32)
    check(device, np.full((m, k), 3.0 * x, np.float32), codes, scales, np.float32(3.0))


@pytest.mark.parametrize("m", [1, 8, 64])
def test_activations_beyond_the_codes_are_clipped(device: Device, m: int) -> None:
    rng = np.random.default_rng(m)
    x = (1000 * rng.standard_normal((m, 96))).astype(np.float32)
    x[0, :4] = 2e38, -2e38, np.inf, -np.inf
    codes = rng.integers(-127, 128, (20, 96)).astype(np.int8)
    check(device, x, codes, np.ones(20, np.float32), np.float32(0.7))


@pytest.mark.parametrize("x_scale", [0.1, 1 / 3, 0.0123, 7e-5, 12345.678])
def test_quotients_are_rounded_as_division_is(device: Device, x_scale: float) -> None:
    """Activations on and next to the boundary between two codes, where a quotient that is an ulp
    off gives another code; read back through an identity.
    """
    scale = np.float32(x_scale)
    halves = (np.arange(-128, 127) + 0.5).astype(np.float32) * scale
    near = [halves]
    for _ in range(2):
        near = [np.nextafter(near[0], np.float32(-np.inf)), *near]
        near = [*near, np.nextafter(near[-1], np.float32(np.inf))]
    x = np.resize(np.concatenate(near), (64, 32))
    check(device, x, np.eye(32, dtype=np.int8), np.ones(32, np.float32), scale)


@pytest.mark.full
@settings(max_examples=examples(40), deadline=None)
@given(m=st.sampled_from(SIZES), n=st.integers(1, 90), k=st.integers(1, 400), seed=st.integers(0))
def test_random_shapes(device: Device, m: int, n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    scales = rng.uniform(0, 1, n).astype(np.float32)
    x = rng.standard_normal((m, k), dtype=np.float32)
    check(device, x, codes, scales, np.float32(rng.uniform(0.005, 0.05)))


@pytest.mark.parametrize("d", [64, 100])
def test_embedding_is_exact(device: Device, d: int) -> None:
    table = pack(np.random.default_rng(2).standard_normal((50, d)), StorageFormat.Q8R)
    op = Embed(vocab=50, d=d, weight_format=WeightFormat.W8A8)
    tokens, y = new_tensor((32,), np.int32), new_tensor((32, d))
    tokens.array[:] = np.arange(18, 50)
    device.prepare(op, {"weight": table}).bind({"tokens": tokens, "y": y}, 32).run()
    np.testing.assert_array_equal(y.array, table.dequantize()[18:])
