"""Padding, cutting tokens or features, and the cache change no bit, in any form of a matmul."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hetero.backends import ops
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.weights import PackedWeight, pack
from tests.backends.cases import make_tensors

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)

N, K, M = 96, 172, 64
SIZES = (1, 32, M)
STORAGES = {
    WeightFormat.F16: StorageFormat.F16,
    WeightFormat.W4A16: StorageFormat.Q4,
    WeightFormat.W8A16: StorageFormat.Q8,
}
FORMS = [
    *[("float16", form, "groups") for form in STORAGES],
    *[("int16", form, scales) for form in list(STORAGES)[1:] for scales in ("groups", "rows")],
    *[("int8", WeightFormat.W8A16, scales) for scales in ("rows", "whole")],
]


@dataclass
class Devices:
    """Devices by the type of activations: graphs compiled in this process, and from a cache."""

    folder: Path
    opened: dict[tuple[str, bool], Any]

    def find(self, activations: str, *, cached: bool = False) -> Any:
        key = (activations, cached)
        if key not in self.opened:
            folder = self.folder if cached else None
            self.opened[key] = qnn.open(graph_sizes=SIZES, cache=folder, activations=activations)
        return self.opened[key]

    def forget(self, activations: str) -> None:
        self.opened.pop((activations, True)).close()


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    found = Devices(tmp_path_factory.mktemp("cache"), {})
    yield found
    for device in found.opened.values():
        device.close()


def make_weight(form: WeightFormat, scales: str) -> PackedWeight:
    """Rows of different sizes, but for `whole`, where the weight has one scale."""
    random = np.random.default_rng(0)
    values = random.uniform(-1, 1, (N, K)).astype(np.float32)
    if scales != "groups":
        values[:, ::32] = -1  # the largest of each group
    if scales == "whole":
        values[::3, 1::32] = values[::3, 2::32] = 0
        values[::3] *= np.where(values[::3] == -1, 1, 0.3)  # smaller norms under the same scale
    else:
        values *= random.uniform(0.1, 4, (N, 1)).astype(np.float32)
        values[::2] *= -1  # 4-bit weights have a negative scale where the largest is positive
    return pack(values, STORAGES[form])


def make_x(weight: PackedWeight) -> npt.NDArray[np.float32]:
    """Ordinary tokens among which some are zero, large, tiny, or give results beyond a code."""
    x = np.random.default_rng(1).standard_normal((M, K)).astype(np.float32)
    x[3] = 0
    x[5] *= 1e5
    x[9] *= 1e-6
    x[10, 1:] *= 1e-6
    x[40] = 2000 * np.sign(weight.dequantize()[35])
    return x


def product(
    device: Any, form: WeightFormat, weight: PackedWeight, x: npt.NDArray[np.float32], m: int
) -> npt.NDArray[np.float32]:
    """x, padded with zeros to m tokens, times the weight."""
    op = ops.MatMul(n=weight.n, k=K, weight_format=form)
    tensors = make_tensors(op, m, np.random.default_rng(2), device=device)
    tensors["x"].array[:] = 0
    tensors["x"].array[: len(x)] = x
    device.prepare(op, {"weight": weight}).bind(tensors, m).run()
    found: npt.NDArray[np.float32] = tensors["y"].array[: len(x)].copy()
    return found


@pytest.mark.full
@pytest.mark.few(2)
@pytest.mark.parametrize(("activations", "form", "scales"), FORMS)
def test_no_bit_depends_on_the_call(
    devices: Devices, activations: str, form: WeightFormat, scales: str
) -> None:
    weight = make_weight(form, scales)
    x = make_x(weight)
    device = devices.find(activations)
    whole = product(device, form, weight, x, M)
    assert np.abs(whole[40, 35]) > 65504  # beyond fp16, and beyond the codes of one call
    assert np.isfinite(whole).all()
    for first, last, m in ((0, 20, M), (0, 32, 32), (32, M, 32), (7, 8, 1), (40, 41, 1)):
        found = product(device, form, weight, x[first:last], m)
        np.testing.assert_array_equal(found, whole[first:last], f"tokens {first} to {last} of {m}")
    for first, last in ((0, 32), (32, 33), (32, N)):
        found = product(device, form, weight.rows(first, last), x, M)
        np.testing.assert_array_equal(found, whole[:, first:last], f"rows {first} to {last}")


@pytest.mark.few(2)
@pytest.mark.parametrize(("activations", "form", "scales"), FORMS)
def test_a_cached_graph_gives_the_same_bits(
    devices: Devices, activations: str, form: WeightFormat, scales: str
) -> None:
    weight = make_weight(form, scales)
    x = make_x(weight)
    fresh = product(devices.find(activations), form, weight, x[:32], 32)
    for _ in range(2):  # compiled into the cache, then opened from it
        cached = product(devices.find(activations, cached=True), form, weight, x[:32], 32)
        np.testing.assert_array_equal(cached, fresh)
        devices.forget(activations)
