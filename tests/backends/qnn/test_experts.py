"""Routed experts as graphs: which graphs there are, what they refuse, how rows are put into them.

Their numbers are judged by the contract suite.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends import ops
from hetero.backends.errors import DeviceError
from hetero.backends.formats import WeightFormat
from hetero.backends.weights import StorageFormat, pack
from tests.backends.cases import make_tensors, make_weights
from tests.support.selection import examples

qnn = pytest.importorskip("hetero.backends.qnn.opening", exc_type=ImportError)
catalog = pytest.importorskip("hetero.backends.qnn.catalog", exc_type=ImportError)
kernel_module = pytest.importorskip("hetero.backends.qnn.expert_kernel", exc_type=ImportError)

EXPERTS = ops.Experts(experts=4, chosen=2, d=32, f=16, weight_format=WeightFormat.F16)


@pytest.mark.full
@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=6, unique=True),
    st.integers(1, 2000),
    st.data(),
)
def test_rows_go_into_the_smallest_graphs_of_a_call(
    sizes: list[int], m: int, data: st.DataObject
) -> None:
    """Whatever share of a call's tokens chose an expert, in graphs that the call has opened."""
    made = catalog.expert_sizes(EXPERTS, sizes, m)
    count = data.draw(st.integers(1, m))
    runs = kernel_module.pieces(count, made)
    assert max(made) <= catalog.SIZES.rows
    assert [start for start, _ in runs] == list(range(0, count, made[-1]))
    for start, rows in runs:
        left = min(count - start, made[-1])
        assert rows in made
        assert left <= rows
        assert all(size < left or size >= rows for size in made)


def test_wide_experts_have_graphs_of_half_as_many_tokens() -> None:
    wide = ops.Experts(
        experts=4, chosen=2, d=64, f=catalog.SIZES.large_k, weight_format=WeightFormat.F16
    )
    assert catalog.expert_sizes(wide, (1, 32, 256), 256) == (1, 32, catalog.SIZES.rows // 2)
    assert catalog.expert_sizes(EXPERTS, (1, 32, 256), 1) == (1,)
    assert catalog.expert_sizes(EXPERTS, (1, 32, 256), 33) == (1, 32, 256)


@pytest.mark.full
def test_graphs_are_made_when_a_call_is_bound_and_found_again(tmp_path: Path) -> None:
    """Graphs have the sizes of the call, for every expert; a second device compiles none."""
    rng = np.random.default_rng(0)
    weights = make_weights(EXPERTS, rng)
    tensors = make_tensors(EXPERTS, 8, rng)
    for compiled in (8, 0):
        with qnn.open(graph_sizes=(1, 8), cache=tmp_path) as device:
            kernel = device.prepare(EXPERTS, weights)
            assert device.store.counts.compiled == 0
            kernel.bind({x: t.rows(0, 1) for x, t in tensors.items()}, 1)
            assert device.store.counts.compiled == compiled // 2
            call = kernel.bind(tensors, 8)
            assert device.store.counts.compiled == compiled
            call.run()
            assert device.store.counts.compiled == compiled
            assert kernel.nbytes == sum(x.nbytes for x in weights.values())
            assert device.store.counts.rebuilt == []


@pytest.mark.parametrize("where", ["x", "experts_gate", "experts_down"])
def test_what_leaves_half_precision_is_an_error(where: str) -> None:
    """Also between an expert's matmuls, where it would saturate without a word."""
    rng = np.random.default_rng(0)
    weights = make_weights(EXPERTS, rng)
    tensors = make_tensors(EXPERTS, 1, rng)
    tensors["x"].array[:] = 1e5 if where == "x" else 100.0
    for name, matmul in EXPERTS.matmuls.items():
        value = 60.0 if name == where else 1.0 if where == "experts_down" else 1e-3
        rows = np.full((EXPERTS.experts * matmul.n, matmul.k), value, np.float32)
        weights[name] = pack(rows, StorageFormat.F16)
    with qnn.open(graph_sizes=(1,), cache=None) as device:
        call = device.prepare(EXPERTS, weights).bind(tensors, 1)
        with pytest.raises(DeviceError, match="FP16_OVERFLOW"):
            call.run()


def test_what_is_refused_is_said() -> None:
    router = ops.Router(experts=4, chosen=2, d=32)
    static = ops.Experts(experts=4, chosen=2, d=32, f=16, weight_format=WeightFormat.W8A8)
    with qnn.open(graph_sizes=(1,), cache=None) as device:
        assert device.capabilities.experts
        assert device.accepts(EXPERTS)
        assert "would choose other experts" in device.accepts(router).reason
        assert "gate of a shared expert" in device.accepts(ops.GatedAdd(d=32)).reason
        assert "no kernels of routed experts" in device.accepts(static).reason
    with qnn.open(graph_sizes=(1,), cache=None, activations="int16") as device:
        assert not device.capabilities.experts
        assert "have float16 activations, not int16" in device.accepts(EXPERTS).reason
