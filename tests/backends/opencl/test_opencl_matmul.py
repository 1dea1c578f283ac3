"""MatMul on every tuning family against float64 products of the dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends.memory import HostBuffer, Tensor, new_tensor
from hetero.backends.opencl import matmul
from hetero.backends.opencl import open as open_opencl
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.matmul_tuning import CpuTuning, matmul_tuning
from hetero.backends.ops import MatMul, StorageFormat, WeightFormat
from hetero.backends.protocol import Kernel, WeightValue
from hetero.backends.reference.compute import quantized_activations
from hetero.backends.weights import PackedWeight, pack

CPU_FAMILIES = ("pocl-avx512-vnni", "pocl-avx512", "pocl")
TOLERANCE = 2e-6  # of float32 arithmetic; 1e-5 is promised for the 4 and 8 bit formats
Array = npt.NDArray[Any]

# Token counts on both sides of every tile's limit; k with and without a rest of 32; odd n.
SHAPES = (
    (1, 16, 32),
    (1, 17, 172),
    (2, 33, 96),
    (3, 48, 80),
    (4, 100, 64),
    (5, 1, 1),
    (8, 47, 35),
    (9, 65, 1000),
    (37, 129, 111),
    (70, 31, 2048),
)


@pytest.fixture(scope="module", params=(*CPU_FAMILIES, "other"))
def family_device(request: pytest.FixtureRequest, device: OpenCLDevice) -> Iterator[OpenCLDevice]:
    families = ("other", *reversed(CPU_FAMILIES))  # each runs what those before it do
    own = device.tuning.family
    if own in families and families.index(request.param) > families.index(own):
        pytest.skip(f"needs the instructions of {request.param}, this processor has {own}'s")
    if own not in families and request.param != "other":
        pytest.skip("needs PoCL")
    with open_opencl(family=request.param) as opened:
        yield opened


def random_weight(rng: np.random.Generator, storage: StorageFormat, n: int, k: int) -> PackedWeight:
    return pack(rng.standard_normal((n, k), dtype=np.float32), storage)


def tensor_of(rows: Array) -> Tensor:
    """The rows in shared memory, between two rows of NaN that nobody may read or write."""
    whole = new_tensor((rows.shape[0] + 2, rows.shape[1]))
    whole.array[:] = np.nan
    tensor = whole.rows(1, 1 + rows.shape[0])
    tensor.array[:] = rows
    return tensor


def product(op: MatMul, x: Array, weight: PackedWeight, bias: Array | None) -> Array:
    """float64 oracle; `w4a8` on the int8 codes that the kernel must compute with."""
    result = _activations(op, x) @ weight.dequantize().astype(np.float64).T
    return result if bias is None else result + bias


def error_of(
    got: Array, op: MatMul, x: Array, weight: PackedWeight, bias: Array | None = None
) -> float:
    """Norm of the error over that of what random signs would give: root(sum of (x w)²) + |bias|.

    (A single output may be next to zero by cancellation; its error is not.)
    """
    squares = _activations(op, x) ** 2 @ (weight.dequantize().astype(np.float64) ** 2).T
    size = np.sqrt(squares) + (0.0 if bias is None else np.abs(bias))
    difference = np.nan_to_num(got - product(op, x, weight, bias), nan=np.inf)
    return float(np.linalg.norm(difference) / np.linalg.norm(size))


def _activations(op: MatMul, x: Array) -> Array:
    wide = quantized_activations(x) if op.weight_format is WeightFormat.W4A8 else x
    return np.asarray(wide, dtype=np.float64)


def run(kernel: Kernel, x: Array, n: int) -> Array:
    """y of one call on fresh tensors; checks that nothing around it was written."""
    m = x.shape[0]
    whole = new_tensor((m + 2, n))
    whole.array[:] = np.nan
    kernel.bind({"x": tensor_of(x), "y": whole.rows(1, m + 1)}, m).run()
    assert np.isnan(whole.array[[0, -1]]).all()
    return np.array(whole.array[1:-1])


def check(
    device: OpenCLDevice,
    weight_format: WeightFormat,
    shape: tuple[int, int, int],
    *,
    bias: bool = False,
    seed: int = 0,
) -> None:
    m, n, k = shape
    rng = np.random.default_rng((seed, *shape))
    op = MatMul(n=n, k=k, weight_format=weight_format, bias=bias)
    weight = random_weight(rng, weight_format.storage, n, k)
    weights: dict[str, WeightValue] = {"weight": weight}
    if bias:
        weights["bias"] = rng.standard_normal(n, dtype=np.float32)
    x = rng.standard_normal((m, k), dtype=np.float32)
    got = run(device.prepare(op, weights), x, n)
    error = error_of(got, op, x, weight, np.asarray(weights["bias"]) if bias else None)
    assert error < TOLERANCE, f"{op} m={m}: relative error {error:.2e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_shapes(
    family_device: OpenCLDevice, weight_format: WeightFormat, shape: tuple[int, int, int]
) -> None:
    check(family_device, weight_format, shape)


@settings(max_examples=150, deadline=None)
@given(
    weight_format=st.sampled_from(WeightFormat),
    m=st.integers(1, 40),
    n=st.integers(1, 100),
    k=st.integers(1, 300),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_random_shapes(
    family_device: OpenCLDevice,
    weight_format: WeightFormat,
    m: int,
    n: int,
    k: int,
    bias: bool,
    seed: int,
) -> None:
    check(family_device, weight_format, (m, n, k), bias=bias, seed=seed)


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_bias(family_device: OpenCLDevice, weight_format: WeightFormat, m: int) -> None:
    check(family_device, weight_format, (m, 37, 100), bias=True)


@pytest.mark.parametrize(
    "shape",
    [(1, 20, 8192), (600, 20, 4128), (130, 70, 8224), (11, 17, 32800)],
    ids=str,
)
@pytest.mark.parametrize("weight_format", [WeightFormat.F32, WeightFormat.W4A8])
def test_long_rows(
    device: OpenCLDevice, weight_format: WeightFormat, shape: tuple[int, int, int]
) -> None:
    """Panels of tokens and of features, and the error of long sums."""
    check(device, weight_format, shape, bias=True)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_several_threads(
    device: OpenCLDevice, weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows shared by several work-items, and x packed by a launch of its own."""
    monkeypatch.setattr(matmul, "work_items", lambda device: 4)
    for m in (1, 3, 20):
        check(device, weight_format, (m, 209, 100), bias=True)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_segments_equal_slices(family_device: OpenCLDevice, weight_format: WeightFormat) -> None:
    """Row segments at every cut, bit for bit, on a few tokens and on many."""
    n, k = 100, 96
    rng = np.random.default_rng(3)
    weight = random_weight(rng, weight_format.storage, n, k)
    for m in (1, 4, 20):
        x = rng.standard_normal((m, k), dtype=np.float32)
        op = MatMul(n=n, k=k, weight_format=weight_format)
        whole = run(family_device.prepare(op, {"weight": weight}), x, n)
        for start, stop in ((0, 16), (16, 48), (48, 100), (96, 100), (32, 61)):
            part = MatMul(n=stop - start, k=k, weight_format=weight_format)
            kernel = family_device.prepare(part, {"weight": weight.rows(start, stop)})
            np.testing.assert_array_equal(run(kernel, x, part.n), whole[:, start:stop])


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_bindings_are_reusable(family_device: OpenCLDevice, weight_format: WeightFormat) -> None:
    """Several token counts on one kernel, run in turn on new inputs, share nothing."""
    n, k = 50, 72
    rng = np.random.default_rng(4)
    weight = random_weight(rng, weight_format.storage, n, k)
    op = MatMul(n=n, k=k, weight_format=weight_format)
    kernel = family_device.prepare(op, {"weight": weight})
    bound = []
    for m in (1, 13, 2, 64):
        x, y = new_tensor((m, k)), new_tensor((m, n))
        bound.append((x, y, kernel.bind({"x": x, "y": y}, m)))
    for _ in range(3):
        for x, _, _ in bound:
            x.array[:] = rng.standard_normal(x.shape)
        for _, y, call in bound:
            y.array[:] = np.nan
            call.run()
        for x, y, _ in bound:
            assert error_of(y.array, op, x.array, weight) < TOLERANCE


@pytest.mark.parametrize("offset", [0, 64, 192])
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_mapped_weights(
    family_device: OpenCLDevice, tmp_path: Path, weight_format: WeightFormat, offset: int
) -> None:
    """Weights in a file that is mapped read-only, at any multiple of 64 bytes."""
    n, k, m = 40, 96, 3
    rng = np.random.default_rng(5)
    weight = random_weight(rng, weight_format.storage, n, k)
    mapped = PackedWeight(
        weight.storage,
        n,
        k,
        _mapped(tmp_path / "data", weight.data, offset),
        None if weight.scales is None else _mapped(tmp_path / "scales", weight.scales, offset),
    )
    op = MatMul(n=n, k=k, weight_format=weight_format)
    x = rng.standard_normal((m, k), dtype=np.float32)
    got = run(family_device.prepare(op, {"weight": mapped}), x, n)
    assert error_of(got, op, x, weight) < TOLERANCE


def _mapped(path: Path, array: Array, offset: int) -> Array:
    path.write_bytes(bytes(offset) + array.tobytes())
    return np.memmap(path, dtype=array.dtype, mode="r", offset=offset, shape=array.shape)


def test_weights_are_not_copied(device: OpenCLDevice) -> None:
    """On unified memory a kernel sees a change of the packed array (which nobody else makes)."""
    if not device.capabilities.unified_memory:
        pytest.skip("needs unified memory")
    weight = random_weight(np.random.default_rng(6), StorageFormat.F32, 16, 32)
    buffer = HostBuffer(weight.nbytes)
    data = buffer.array(np.float32, weight.data.shape)
    data[:] = weight.data
    op = MatMul(n=16, k=32, weight_format=WeightFormat.F32)
    shared = PackedWeight(StorageFormat.F32, 16, 32, data)
    kernel = device.prepare(op, {"weight": shared})
    data *= 2
    x = np.ones((1, 32), dtype=np.float32)
    assert error_of(run(kernel, x, 16) / 2, op, x, weight) < TOLERANCE
    assert kernel.nbytes == 0


@pytest.mark.parametrize("m", [1, 6, 33])
def test_zeros_are_exact(family_device: OpenCLDevice, m: int) -> None:
    """A group of zero activations has scale 0: the result is the bias, not NaN."""
    rng = np.random.default_rng(7)
    bias = rng.standard_normal(48, dtype=np.float32)
    weight = random_weight(rng, StorageFormat.Q4, 48, 64)
    op = MatMul(n=48, k=64, weight_format=WeightFormat.W4A8, bias=True)
    kernel = family_device.prepare(op, {"weight": weight, "bias": bias})
    got = run(kernel, np.zeros((m, 64), dtype=np.float32), 48)
    np.testing.assert_array_equal(got, np.tile(bias, (m, 1)))


def test_largest_integers_do_not_overflow(family_device: OpenCLDevice) -> None:
    """Every product of a group at its extreme: nibbles 0 and 15 against codes ±127."""
    n, k = 32, 64
    rows = np.where(np.arange(n)[:, None] % 2, -8.0, 7.0) * np.ones((n, k))
    weight = pack(rows.astype(np.float32), StorageFormat.Q4)
    op = MatMul(n=n, k=k, weight_format=WeightFormat.W4A8)
    kernel = family_device.prepare(op, {"weight": weight})
    for sign in (1.0, -1.0):
        x = np.full((9, k), sign * 3.0, dtype=np.float32)
        assert error_of(run(kernel, x, n), op, x, weight) < TOLERANCE


def test_discrete_memory_copies(variant: OpenCLDevice) -> None:
    """The other ways of sharing memory that a device may have."""
    for weight_format in (WeightFormat.W4A8, WeightFormat.F16):
        for m in (1, 5, 20):
            check(variant, weight_format, (m, 40, 100), bias=True)


@pytest.mark.parametrize("family", CPU_FAMILIES)
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_tiles_and_panels(family: str, weight_format: WeightFormat) -> None:
    """What the kernel asks of its tile and panel sizes."""
    tuning = matmul_tuning(family)
    assert isinstance(tuning, CpuTuning)
    for m in (1, 2, 3, 8, 9, 135, 1024, 5000):
        tile = tuning.tile(weight_format, m)
        for k in (32, 2048, 8192, 20000):
            m_panel, k_panel = tuning.panels(weight_format, m, k, tile)
            assert k_panel >= k or k_panel % 64 == 0
            assert m_panel >= m or m_panel % tile.tokens == 0
            assert m_panel > 0
            assert k_panel > 0
            assert m <= tile.tokens or m_panel * k_panel <= tuning.x_panel_bytes
