"""MatMul on every tuning family against float64 products of the dequantised weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.memory import HostBuffer, Tensor, new_tensor
from hetero.backends.opencl import matmul
from hetero.backends.opencl import open as open_opencl
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.drivers import levels
from hetero.backends.opencl.matmul_tuning import (
    _CPU,
    INF,
    CpuTuning,
    WorkTile,
    kind_of,
    matmul_tuning,
)
from hetero.backends.ops import MatMul
from hetero.backends.protocol import Kernel, WeightValue
from hetero.backends.reference.compute import quantized_activations, static_codes
from hetero.backends.weights import PackedWeight, pack
from tests.support.selection import examples, exhaustive

CPU_FAMILIES = ("pocl-avx512-vnni", "pocl-avx512", "pocl")
_OWN = f"pocl-{levels.processor_levels()[0].name}"
HERE = CPU_FAMILIES[CPU_FAMILIES.index(_OWN) if _OWN in CPU_FAMILIES else -1 :]
TOLERANCE = 2e-6  # of float32 arithmetic; 1e-5 is promised for the 4 and 8 bit formats
STATIC = -1  # codes of the scale X_SCALE
X_SCALE = np.full(1, 0.03, np.float32)
SIXTEEN_BITS = 32639  # largest code of two planes of int8: 127 * 256 + 127
# What PoCL says of 16 lanes without AVX-512, which only tests ask for.
WIDE_ARGUMENTS = "ignore::pyopencl.CompilerWarning"
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


@pytest.fixture(scope="module")
def opened_family(device: OpenCLDevice) -> Iterator[Callable[[str], OpenCLDevice]]:
    """Opens each family once; skips those whose instructions this processor lacks."""
    opened: dict[str, OpenCLDevice] = {}
    order = ("other", *reversed(CPU_FAMILIES))  # each runs what those before it do
    own = device.tuning.family
    with ExitStack() as stack:

        def find(family: str) -> OpenCLDevice:
            if own in order and order.index(family) > order.index(own):
                pytest.skip(f"needs the instructions of {family}, this processor has {own}'s")
            if own not in order and family != "other":
                pytest.skip("needs PoCL")
            if family not in opened:
                opened[family] = stack.enter_context(open_opencl(family=family))
            return opened[family]

        yield find


@pytest.fixture(
    params=[*(pytest.param(x, marks=[pytest.mark.full] * (x != HERE[0])) for x in HERE), "other"]
)
def any_family(
    request: pytest.FixtureRequest, opened_family: Callable[[str], OpenCLDevice]
) -> OpenCLDevice:
    return opened_family(request.param)


@pytest.fixture(params=(*HERE, "other") if exhaustive() else ("own", "other"))
def family_device(
    request: pytest.FixtureRequest, device: OpenCLDevice, opened_family: Any
) -> OpenCLDevice:
    """This processor's family, or that of GPUs, whose kernels have nothing to do with each other.
    Families below this processor's own run what is of `any_family`, and in the gate the contract at
    their levels.
    """
    own = device.tuning.family
    if request.param == "own" and own not in CPU_FAMILIES:
        pytest.skip("needs PoCL")
    found: OpenCLDevice = opened_family(own if request.param == "own" else request.param)
    return found


def random_weight(rng: np.random.Generator, storage: StorageFormat, n: int, k: int) -> PackedWeight:
    return pack(rng.standard_normal((n, k), dtype=np.float32), storage)


def inputs_of(weight: PackedWeight) -> dict[str, WeightValue]:
    """Weights of a matmul without a bias."""
    return {"weight": weight} | ({"x_scale": X_SCALE} if weight.storage.scales == "row" else {})


def tensor_of(rows: Array) -> Tensor:
    """The rows in shared memory, between two rows of NaN that must not be read or written."""
    whole = new_tensor((rows.shape[0] + 2, rows.shape[1]))
    whole.array[:] = np.nan
    tensor = whole.rows(1, 1 + rows.shape[0])
    tensor.array[:] = rows
    return tensor


Codes: TypeAlias = Callable[[StorageFormat], int]


def floats(_: StorageFormat) -> int:
    """Of activations that stay floats."""
    return 0


def error_of(
    got: Array, x: Array, weight: PackedWeight, bias: Array | None = None, *, codes: Codes = floats
) -> float:
    """Norm of the error over that of what random signs would give: root(sum of (x w)²) + |bias|.

    (A single output may be next to zero by cancellation; its error is not.) The oracle is float64,
    on the integer codes that the kernel must compute with, if it does (`codes_of`).
    """
    wanted, size = np.zeros(got.shape), np.zeros(got.shape)
    for first, part in weight.spans():
        activations, largest = x.astype(np.float64), codes(part.storage)
        if largest == STATIC:
            activations = static_codes(x, X_SCALE[0]) * X_SCALE.astype(np.float64)
        elif largest:
            activations = quantized_activations(x, largest)
        rows, columns = part.dequantize().astype(np.float64).T, slice(first, first + part.n)
        wanted[:, columns] = activations @ rows
        size[:, columns] = np.sqrt(activations**2 @ rows**2)
    offset = 0.0 if bias is None else bias
    difference = np.nan_to_num(got - wanted - offset, nan=np.inf)
    wrong, right = np.linalg.norm(difference), np.linalg.norm(size + np.abs(offset))
    if right == 0:  # all codes are zero: so must be what was computed
        return 0.0 if wrong == 0 else math.inf
    return float(wrong / right)


def codes_of(device: OpenCLDevice, weight_format: WeightFormat, m: int) -> Codes:
    """Of rows in a storage: the largest integer code of activations, 0 where they stay floats, or
    `STATIC`.
    """
    tuning = matmul_tuning(device.tuning.family)

    def largest(storage: StorageFormat) -> int:
        kind = kind_of(weight_format, storage)
        if kind.activations.static:
            return STATIC
        if not isinstance(tuning, CpuTuning):
            return 0 if kind.activations.are_floats else 127
        return (0, 127, SIXTEEN_BITS)[tuning.planes(kind, tuning.tile(kind, m))]

    return largest


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
    weights = inputs_of(weight)
    if bias:
        weights["bias"] = rng.standard_normal(n, dtype=np.float32)
    x = rng.standard_normal((m, k), dtype=np.float32)
    got = run(device.prepare(op, weights), x, n)
    offset = np.asarray(weights["bias"]) if bias else None
    error = error_of(got, x, weight, offset, codes=codes_of(device, weight_format, m))
    assert error < TOLERANCE, f"{op} m={m}: relative error {error:.2e}"


# A file has several storages, each of which compiles kernels of its own: the gate runs some shapes.
OF_FILES = SHAPES if exhaustive() else SHAPES[1::3]
CASES = [
    # By default each format has every third shape, and each shape some formats.
    pytest.param((x, shape), id=f"{x.value}-{shape}", marks=[pytest.mark.full] * ((i + j) % 3 > 0))
    for i, x in enumerate(WeightFormat)
    for j, shape in enumerate(OF_FILES if x.of_file else SHAPES)
]


# By default the contract and some shapes run what has kernels for each storage of a file.
FORMATS = [pytest.param(x, marks=[pytest.mark.full] * x.of_file, id=x.value) for x in WeightFormat]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_shapes(any_family: OpenCLDevice, case: tuple[WeightFormat, tuple[int, int, int]]) -> None:
    """Each shape in each format; in the gate on one of the families, in turn."""
    check(any_family, *case)


@pytest.mark.full  # more shapes than those above
@settings(
    max_examples=examples(10, 150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_bias(family_device: OpenCLDevice, weight_format: WeightFormat, m: int) -> None:
    check(family_device, weight_format, (m, 37, 100), bias=True)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "shape",
    [(1, 20, 8192), (600, 20, 4128), (130, 70, 8224), (11, 17, 32800)],
    ids=str,
)
@pytest.mark.parametrize("weight_format", [WeightFormat.F32, WeightFormat.W4A8, WeightFormat.W8A8])
def test_long_rows(
    device: OpenCLDevice, weight_format: WeightFormat, shape: tuple[int, int, int]
) -> None:
    """Panels of tokens and of features, and the error of long sums."""
    check(device, weight_format, shape, bias=True)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_several_threads(
    device: OpenCLDevice, weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows shared by several work-items; x packed by each, or by a launch of its own."""
    monkeypatch.setattr(matmul, "work_items", lambda *_: 4)
    for m in (1, 3, 20):
        check(device, weight_format, (m, 209, 100), bias=True)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_segments_equal_slices(family_device: OpenCLDevice, weight_format: WeightFormat) -> None:
    """Row segments at every cut, bit for bit, on a few tokens and on many."""
    n, k = 100, 96
    rng = np.random.default_rng(3)
    weight = random_weight(rng, weight_format.storage, n, k)
    for m in (1, 4, 20):
        x = rng.standard_normal((m, k), dtype=np.float32)
        op = MatMul(n=n, k=k, weight_format=weight_format)
        whole = run(family_device.prepare(op, inputs_of(weight)), x, n)
        for start, stop in ((0, 16), (16, 48), (48, 100), (96, 100), (32, 61)):
            part = MatMul(n=stop - start, k=k, weight_format=weight_format)
            kernel = family_device.prepare(part, inputs_of(weight.rows(start, stop)))
            np.testing.assert_array_equal(run(kernel, x, part.n), whole[:, start:stop])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_bindings_are_reusable(family_device: OpenCLDevice, weight_format: WeightFormat) -> None:
    """Several token counts on one kernel, run in turn on new inputs, share nothing."""
    n, k = 50, 72
    rng = np.random.default_rng(4)
    weight = random_weight(rng, weight_format.storage, n, k)
    op = MatMul(n=n, k=k, weight_format=weight_format)
    kernel = family_device.prepare(op, inputs_of(weight))
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
            codes = codes_of(family_device, weight_format, len(x.array))
            assert error_of(y.array, x.array, weight, codes=codes) < TOLERANCE


@pytest.mark.parametrize("offset", [0, 64, 192])
@pytest.mark.parametrize("weight_format", [x for x in WeightFormat if not x.of_file])
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
    got = run(family_device.prepare(op, inputs_of(mapped)), x, n)
    codes = codes_of(family_device, weight_format, m)
    assert error_of(got, x, weight, codes=codes) < TOLERANCE


def _mapped(path: Path, array: Array, offset: int) -> Array:
    path.write_bytes(bytes(offset) + array.tobytes())
    return np.memmap(path, dtype=array.dtype, mode="r", offset=offset, shape=array.shape)


def test_weights_are_not_copied(device: OpenCLDevice) -> None:
    """On unified memory a kernel sees a change of the packed array (which only this test makes)."""
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
    assert error_of(run(kernel, x, 16) / 2, x, weight) < TOLERANCE
    assert kernel.nbytes == 0


@pytest.mark.full
@pytest.mark.parametrize("m", [1, 6, 33])
def test_zeros_are_exact(any_family: OpenCLDevice, m: int) -> None:
    """A group of zero activations has scale 0: the result is the bias, not NaN."""
    rng = np.random.default_rng(7)
    bias = rng.standard_normal(48, dtype=np.float32)
    weight = random_weight(rng, StorageFormat.Q4, 48, 64)
    op = MatMul(n=48, k=64, weight_format=WeightFormat.W4A8, bias=True)
    kernel = any_family.prepare(op, {"weight": weight, "bias": bias})
    got = run(kernel, np.zeros((m, 64), dtype=np.float32), 48)
    np.testing.assert_array_equal(got, np.tile(bias, (m, 1)))


def test_largest_integers_do_not_overflow(any_family: OpenCLDevice) -> None:
    """Every product of a group at its extreme: nibbles 0 and 15 against codes ±127."""
    check_extremes(any_family, WeightFormat.W4A8, 9, lower=0)


def check_extremes(device: OpenCLDevice, weight_format: WeightFormat, m: int, lower: int) -> None:
    """Codes of the largest size; in the lower of two planes `lower` in all features but one."""
    n, k = 32, 64
    rows = np.where(np.arange(n)[:, None] % 2, -8.0, 7.0) * np.ones((n, k))
    weight = pack(rows.astype(np.float32), StorageFormat.Q4)
    kernel = device.prepare(MatMul(n=n, k=k, weight_format=weight_format), {"weight": weight})
    largest = codes_of(device, weight_format, m)
    codes = largest(StorageFormat.Q4)
    for sign in (1.0, -1.0):
        whole = np.full((m, k), sign * codes)
        if lower:
            whole[:, np.arange(k) % 32 != 0] = sign * (126 * 256 + lower)
        x = (3.0 / codes * whole).astype(np.float32)  # of a step that is not exact
        assert error_of(run(kernel, x, n), x, weight, codes=largest) < TOLERANCE


@pytest.fixture(params=["own", "plain"])
def planes_device(
    any_family: OpenCLDevice, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> OpenCLDevice:
    """Two planes of int8 also where floats are faster; with the family's integer products, and with
    16 lanes of what every compiler has.
    """
    family = any_family.tuning.family
    tuning = matmul_tuning(family)
    if not isinstance(tuning, CpuTuning):
        pytest.skip("a kernel of processors")
    tiles = (WorkTile(1, 1, 1, 1024, planes=2), WorkTile(INF, 2, 2, planes=2))
    tuning = dataclasses.replace(tuning, special_tiles={WeightFormat.W4A16: tiles})
    if request.param == "plain":
        tuning = dataclasses.replace(tuning, rows=16, dot=0)
    monkeypatch.setitem(_CPU, family, tuning)
    return any_family


@pytest.mark.filterwarnings(WIDE_ARGUMENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_planes(planes_device: OpenCLDevice, shape: tuple[int, int, int]) -> None:
    found = codes_of(planes_device, WeightFormat.W4A16, shape[0])(StorageFormat.Q4)
    assert found == SIXTEEN_BITS
    check(planes_device, WeightFormat.W4A16, shape, bias=True)


@pytest.mark.full
@pytest.mark.filterwarnings(WIDE_ARGUMENTS)
@pytest.mark.parametrize("lower", [0, 127, -128])
@pytest.mark.parametrize("m", [1, 4])
def test_two_planes_do_not_overflow(planes_device: OpenCLDevice, m: int, lower: int) -> None:
    check_extremes(planes_device, WeightFormat.W4A16, m, lower)


@pytest.mark.filterwarnings(WIDE_ARGUMENTS)
def test_two_planes_lose_less_than_fp16_would(planes_device: OpenCLDevice) -> None:
    """Against x as it is, zeros and outliers within a block included."""
    n, k = 64, 2048
    rng = np.random.default_rng(8)
    weight = random_weight(rng, StorageFormat.Q4, n, k)
    kernel = planes_device.prepare(
        MatMul(n=n, k=k, weight_format=WeightFormat.W4A16), {"weight": weight}
    )
    x = rng.standard_normal((2, k), dtype=np.float32)
    x[1] *= rng.lognormal(0, 2, k)
    x[:, :64] = 0.0
    assert error_of(run(kernel, x, n), x, weight) < 5e-5
    np.testing.assert_array_equal(run(kernel, 0 * x, n), np.zeros((2, n), dtype=np.float32))


@pytest.mark.full
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
