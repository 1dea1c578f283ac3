"""Packed weights: what is packed is what comes back, whatever the shape, the values, the cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends.blocks import BLOCK_STORAGES, BlockParts
from hetero.backends.formats import E2M1, StorageFormat, WeightFormat
from hetero.backends.weights import (
    GROUP_SIZE,
    PackedWeight,
    data_dtype,
    data_shape,
    pack,
    pack_blocks,
    pack_q4,
    pack_q8,
    pack_q8r,
    padded,
    scales_shape,
    stacked,
)
from tests.support.selection import examples

FLOAT = (StorageFormat.F16, StorageFormat.F32)
QUANTISED = (StorageFormat.Q4, StorageFormat.Q8, StorageFormat.Q8R, *BLOCK_STORAGES)

sizes = st.integers(1, 70)
scales_of_values = st.sampled_from([1e-3, 1.0, 300.0])


def weights(n: int, k: int, size: float, seed: int) -> npt.NDArray[np.float32]:
    return size * np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)


@st.composite
def cases(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    n, k, seed = draw(sizes), draw(sizes), draw(st.integers(0, 9999))
    weight = weights(n, k, draw(scales_of_values), seed)
    if draw(st.booleans()):
        weight[:, : k // 2] = 0
    return weight


@given(cases(), st.sampled_from(list(StorageFormat)))
@settings(deadline=None)
def test_shapes(weight: npt.NDArray[np.float32], storage: StorageFormat) -> None:
    packed = pack(weight, storage)
    n, k = weight.shape
    if packed.parts:
        assert packed.dequantize().shape == (n, k)
        return
    assert packed.data.shape == data_shape(storage, n, k)
    assert packed.data.dtype == data_dtype(storage)
    assert packed.data.flags["C_CONTIGUOUS"]
    assert packed.dequantize().shape == (n, k)
    if storage in QUANTISED:
        assert packed.scales is not None
        assert packed.scales.shape == scales_shape(storage, n, k)
    else:
        assert packed.scales is None


@given(cases(), st.sampled_from(FLOAT))
@settings(deadline=None)
def test_floats_are_kept(weight: npt.NDArray[np.float32], storage: StorageFormat) -> None:
    kept = weight.astype(data_dtype(storage)).astype(np.float32)
    np.testing.assert_array_equal(pack(weight, storage).dequantize(), kept)


@given(cases(), st.sampled_from([x for x in QUANTISED if x.scales != "block"]))
@settings(deadline=None)
def test_rounding_error_is_within_a_step(
    weight: npt.NDArray[np.float32], storage: StorageFormat
) -> None:
    """q4: at most one step (the end of the range opposite the largest value), q8 and q8r: half a
    step of the group's or the row's.
    """
    back = pack(weight, storage).dequantize()
    n, k = weight.shape
    full = np.zeros((n, padded(k, GROUP_SIZE)), dtype=np.float32)
    full[:, :k] = weight
    largest = np.abs(full).reshape(n, -1, GROUP_SIZE).max(axis=-1).repeat(GROUP_SIZE, 1)[:, :k]
    if storage is StorageFormat.Q8R:
        largest = np.abs(full).max(axis=-1, keepdims=True)
    steps = largest / 8 if storage is StorageFormat.Q4 else largest / 127 / 2
    # The scale is fp16: relative error 2⁻¹¹ of the value, or half its smallest step.
    slack = 1e-3 * largest + (8 if storage is StorageFormat.Q4 else 127) * 2.0**-24
    assert (np.abs(back - weight) <= steps + slack).all()


@given(st.integers(1, 40), st.integers(1, 80), st.integers(0, 9999))
@settings(deadline=None)
def test_codes_and_scales_come_back_exactly(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, groups = padded(n, 16), padded(k, 32) // 32
    scales = rng.standard_normal((rows, groups)).astype(np.float16)
    codes4 = rng.integers(0, 16, (rows, groups, 32), dtype=np.uint8)
    codes8 = rng.integers(-127, 128, (rows, groups, 32), dtype=np.int8)
    wide = scales.astype(np.float32)[..., None]
    by_row = scales[:, 0].astype(np.float32)
    whole = pack_q8r(codes8.reshape(rows, -1), by_row, n, k)
    dense = codes8.reshape(rows, -1) * by_row[:, None]
    np.testing.assert_array_equal(whole.dequantize(), dense[:n, :k])
    np.testing.assert_array_equal(whole.codes(), codes8.reshape(rows, -1)[:n, :k])
    for packed, values in (
        (pack_q4(codes4, scales, n, k), codes4.astype(np.float32) - 8),
        (pack_q8(codes8, scales, n, k), codes8.astype(np.float32)),
    ):
        wanted = (values * wide).reshape(rows, -1)[:n, :k]
        np.testing.assert_array_equal(packed.dequantize(), wanted)


@given(cases(), st.sampled_from(list(StorageFormat)), st.data())
@settings(deadline=None)
def test_a_segment_is_those_rows(
    weight: npt.NDArray[np.float32], storage: StorageFormat, data: st.DataObject
) -> None:
    packed = pack(weight, storage)
    start = 16 * data.draw(st.integers(0, (len(weight) - 1) // 16))
    stop = data.draw(st.integers(start + 1, len(weight)))
    segment = packed.rows(start, stop)
    np.testing.assert_array_equal(segment.dequantize(), packed.dequantize()[start:stop])
    sources = [part.data for _, part in packed.spans()]
    for _, part in segment.spans():
        assert any(np.shares_memory(part.data, source) for source in sources)


def test_q4_is_llama_cpps_q4_0() -> None:
    """The scale carries the sign of the largest value, which becomes exactly code 0."""
    group = np.linspace(-0.5, 1.0, 32, dtype=np.float32)[None, :]
    packed = pack(group, StorageFormat.Q4)
    assert packed.scales is not None
    assert packed.scales[0, 0, 0] == np.float16(-0.125)
    assert packed.dequantize()[0, -1] == 1.0
    assert packed.data[0, 0, 3, 0] >> 28 == 0


def test_layout_of_words() -> None:
    """Feature 8·w + i of row r is nibble i of word [r // 16, g, w, r % 16]."""
    codes = np.full((32, 2, 32), 8, dtype=np.uint8)
    codes[17, 1, 13] = 3
    packed = pack_q4(codes, np.ones((32, 2), np.float16), 32, 64)
    assert (packed.data[1, 1, 1, 1] >> 20) & 15 == 3
    assert packed.dequantize()[17, 45] == -5
    assert np.count_nonzero(packed.dequantize()) == 1


@pytest.mark.parametrize("storage", StorageFormat)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(storage: StorageFormat, bad: float) -> None:
    weight = np.ones((3, 5), np.float32)
    weight[1, 2] = bad
    with pytest.raises(ValueError, match=r"shape \(3, 5\) holds values that are not finite"):
        pack(weight, storage)


@pytest.mark.parametrize(("start", "stop"), [(8, 20), (0, 0), (16, 41), (-16, 16)])
def test_wrong_segments_are_refused(start: int, stop: int) -> None:
    packed = pack(np.ones((40, 32)), StorageFormat.Q4)
    with pytest.raises(ValueError, match="starts at a multiple of 16"):
        packed.rows(start, stop)


def test_wrong_parts_are_refused() -> None:
    good = pack(np.ones((16, 32)), StorageFormat.Q4)
    with pytest.raises(ValueError, match="have scales exactly if they are quantised"):
        PackedWeight(StorageFormat.Q4, 16, 32, good.data)
    with pytest.raises(ValueError, match="has shape"):
        PackedWeight(StorageFormat.Q4, 33, 32, good.data, good.scales)


@given(st.sampled_from(BLOCK_STORAGES), st.integers(1, 40), st.integers(1, 600), st.integers(0, 99))
@settings(deadline=None, max_examples=examples(30))
def test_blocks_come_back_exactly(storage: StorageFormat, n: int, k: int, seed: int) -> None:
    """Every code and scale there may be, against the formula, one weight at a time."""
    rng, of = np.random.default_rng(seed), storage.blocks
    rows, groups = padded(n, 16), padded(k, 32) // 32
    count = -(-groups // of.groups)

    def small(width: int) -> npt.NDArray[np.int8]:
        return rng.integers(-128, 128, (rows, width), dtype=np.int8)

    codes = rng.integers(0, 1 << of.bits, (rows, groups, 32), dtype=np.uint8)
    d, e = (rng.standard_normal((rows, count)).astype(np.float16) for _ in range(2))
    s, t = small(groups * of.halves), small(groups)
    both = BlockParts(codes, d, s, *((e, t) if of.minimum else (None, None)))
    found = pack_blocks(both, storage, n, k).dequantize()
    for row, feature in zip(rng.integers(0, n, 9), rng.integers(0, k, 9), strict=True):
        group, inside = divmod(int(feature), 32)
        scale = float(d[row, group // of.groups]) * float(s[row, int(feature) * of.halves // 32])
        code = int(codes[row, group, inside])
        integer = E2M1[code] if of.e2m1 else code
        wanted = np.float32(scale * (integer - of.zero))
        if of.minimum:
            least = float(e[row, group // of.groups]) * float(t[row, group])
            wanted = np.float32(wanted - np.float32(least))
        assert found[row, feature] == wanted


@pytest.mark.parametrize("storage", BLOCK_STORAGES)
def test_rounded_blocks_are_near(storage: StorageFormat) -> None:
    weight = weights(37, 300, 1.0, 1)
    error = np.linalg.norm(pack(weight, storage).dequantize() - weight) / np.linalg.norm(weight)
    assert error < (0.1 if storage.bits == 4 else 0.025)


def test_parts_have_all_rows_from_whole_blocks_on() -> None:
    part = pack(np.ones((20, 32)), StorageFormat.Q4)
    with pytest.raises(ValueError, match="from multiples of 16 on"):
        stacked([part, part])
    assert [first for first, _ in stacked([part.rows(0, 16), part]).spans()] == [0, 16]


@pytest.mark.parametrize("weight_format", [x for x in WeightFormat if not x.of_file])
def test_storage_of_formats(weight_format: WeightFormat) -> None:
    storage = weight_format.storage.value.replace("q", "w").removesuffix("r")
    assert weight_format.value.startswith((storage, "f"))
