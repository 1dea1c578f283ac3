"""w8a8 on QNN: codes of one given scale, whatever the device's own activations are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.reference.compute import static_codes
from hetero.backends.weights import PackedWeight, pack

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
catalog = pytest.importorskip("hetero.backends.qnn.catalog", exc_type=ImportError)

N, K, M = 96, 172, 64
SIZES = (1, 32, M)
X_SCALE = np.full(1, 0.03, np.float32)
MAX_OFF = 0.56  # of a step of the result's code: docs/explanation/qnn.md
REACH = 2.0


def make_weight() -> PackedWeight:
    random = np.random.default_rng(0)
    values = random.standard_normal((N, K)) * random.uniform(0.1, 4, (N, 1))
    return pack(values.astype(np.float32), WeightFormat.W8A8.storage)


def product(
    device: Any, weight: PackedWeight, x: npt.NDArray[np.float32], x_scale: Any = X_SCALE
) -> npt.NDArray[np.float32]:
    op = ops.MatMul(n=weight.n, k=K, weight_format=WeightFormat.W8A8)
    tensors = {"x": new_tensor(x.shape), "y": new_tensor((len(x), weight.n))}
    tensors["x"].array[:], tensors["y"].array[:] = x, np.nan
    device.prepare(op, {"weight": weight, "x_scale": x_scale}).bind(tensors, len(x)).run()
    found: npt.NDArray[np.float32] = tensors["y"].array.copy()
    return found


def steps_of(weight: PackedWeight) -> npt.NDArray[np.float64]:
    """A step of the result's code in each feature: REACH of the power of two above its norm."""
    norms = np.linalg.norm(weight.dequantize().astype(np.float64), axis=1)
    return REACH * float(X_SCALE[0]) * np.exp2(np.floor(np.log2(norms)) + 1)


@pytest.mark.parametrize("activations", ["float16", "int16", "int8"])
def test_results_are_off_by_their_rounding_alone(activations: str) -> None:
    weight, random = make_weight(), np.random.default_rng(1)
    x = random.standard_normal((M, K)).astype(np.float32)
    x[3], x[5, ::7] = 0, 1e4  # beyond the codes: clipped
    with qnn.open(graph_sizes=SIZES, cache=None, activations=activations) as device:
        found = product(device, weight, x)
    codes = static_codes(x, X_SCALE[0]).astype(np.float64)
    exact = codes * float(X_SCALE[0]) @ weight.dequantize().astype(np.float64).T
    off = np.abs(found - exact) / steps_of(weight)
    fits = np.abs(exact) < 126 * steps_of(weight)
    assert fits.mean() > 0.9
    assert off[fits].max() < MAX_OFF
    assert not found[3].any()


@pytest.mark.full
def test_no_bit_depends_on_the_call_or_the_cache(tmp_path: Path) -> None:
    weight = make_weight()
    x = np.random.default_rng(2).standard_normal((M, K)).astype(np.float32)
    x[40] = 2000 * np.sign(weight.dequantize()[35])  # as large a result as there is
    with qnn.open(graph_sizes=SIZES, cache=None) as device:
        whole = product(device, weight, x)
        assert np.isfinite(whole).all()
        for first, last in ((0, 32), (32, M), (7, 8), (40, 41)):
            np.testing.assert_array_equal(product(device, weight, x[first:last]), whole[first:last])
        for first, last in ((0, 32), (32, 33), (32, N)):
            part = product(device, weight.rows(first, last), x)
            np.testing.assert_array_equal(part, whole[:, first:last])
    for _ in range(2):  # compiled into the cache, then opened from it
        with qnn.open(graph_sizes=SIZES, cache=tmp_path) as device:
            np.testing.assert_array_equal(product(device, weight, x), whole)


def test_graphs_compiled_ahead_are_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call longer than a graph too: pieces of 512 tokens."""
    weight, sizes = make_weight(), (1, 600)
    op = ops.MatMul(n=N, k=K, weight_format=WeightFormat.W8A8)
    ahead = catalog.all_graphs(op, sizes, {"weight": weight, "x_scale": X_SCALE}, "")
    ran = []
    with qnn.open(graph_sizes=sizes, cache=None) as device:
        own = device.store.session

        def session(identity: Any, build: Any) -> Any:
            ran.append(identity)
            return own(identity, build)

        monkeypatch.setattr(device.store, "session", session)
        for m in sizes:
            product(device, weight, np.ones((m, K), np.float32))
    assert {graph.identity for graph in ahead} == set(ran)
    assert sorted(identity.tokens for identity in ran) == [1, 88, 512]


@pytest.mark.full
def test_one_graph_serves_every_scale_of_activations(tmp_path: Path) -> None:
    """The scale is the host's: twice of it and of x gives twice the result, and no new graph."""
    weight = make_weight()
    x = np.random.default_rng(3).standard_normal((32, K)).astype(np.float32)
    with qnn.open(graph_sizes=SIZES, cache=tmp_path) as device:
        first = product(device, weight, x)
        entries = sorted(tmp_path.iterdir())
        np.testing.assert_array_equal(product(device, weight, 2 * x, 2 * X_SCALE), 2 * first)
        assert sorted(tmp_path.iterdir()) == entries
