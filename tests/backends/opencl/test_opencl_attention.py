"""Attention against the full score matrix in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero.backends.formats import CacheFormat
from hetero.backends.memory import Tensor
from hetero.backends.opencl import attention
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.ops import Attention
from tests.backends.cases import make_weights
from tests.backends.opencl.oracles import expected, relative_error, tensors_for

TOLERANCE = 1e-5

LLAMA = Attention(heads=8, kv_heads=2, head_dim=64, capacity=333)
OPS = {
    "llama": LLAMA,
    "seven_in_a_group": Attention(heads=14, kv_heads=2, head_dim=16, capacity=300),
    "window": Attention(heads=4, kv_heads=4, head_dim=80, capacity=300, window=33),
    "window_of_one": Attention(heads=2, kv_heads=2, head_dim=8, capacity=128, window=1),
    "twelve": Attention(heads=6, kv_heads=2, head_dim=12, capacity=200, scale=0.3),
    "odd": Attention(heads=3, kv_heads=1, head_dim=7, capacity=101),
    "capped": Attention(heads=4, kv_heads=2, head_dim=32, capacity=150, softcap=20.0),
    "wide": Attention(heads=2, kv_heads=1, head_dim=128, capacity=150),
    "halves": replace(LLAMA, kv=CacheFormat.F16),
    "odd_halves": Attention(heads=3, kv_heads=1, head_dim=7, capacity=101, kv=CacheFormat.F16),
    "codes": replace(LLAMA, kv=CacheFormat.Q8),
    "odd_codes": Attention(heads=3, kv_heads=1, head_dim=7, capacity=101, kv=CacheFormat.Q8),
    "twelve_codes": Attention(
        heads=6, kv_heads=2, head_dim=12, capacity=200, window=40, kv=CacheFormat.Q8
    ),
    "sinks": Attention(heads=14, kv_heads=2, head_dim=16, capacity=300, window=40, sinks=True),
    "twelve_halves": Attention(
        heads=6, kv_heads=2, head_dim=12, capacity=200, window=40, kv=CacheFormat.F16
    ),
}
CALLS = [(0, 1), (0, 70), (17, 2), (60, 1), (64, 33), (92, 9), (95, 5)]


def run_and_compare(
    device: OpenCLDevice, op: Attention, tensors: dict[str, Tensor], m: int
) -> None:
    before = {port: tensor.array.copy() for port, tensor in tensors.items()}
    weights = make_weights(op, np.random.default_rng(5))
    wanted = expected(op, before, weights, m)
    device.prepare(op, weights).bind(tensors, m).run()
    for cache in ("k_cache", "v_cache"):  # appended bit for bit, NaN beyond
        np.testing.assert_array_equal(tensors[cache].array, wanted[cache])
    error = relative_error(tensors["out"].array, wanted["out"])
    assert error <= TOLERANCE, f"{op} m={m}: relative error {error:.2e}"


# Every shape compiles its own kernels, about a second each: few of them on the forced variants.
PAIRS = [
    *(("default", name) for name in OPS),
    *(
        ("lanes", name)
        for name in (
            "llama",
            "window",
            "odd",
            "capped",
            "sinks",
            "halves",
            "odd_halves",
            "codes",
            "odd_codes",
        )
    ),
    *(("narrow", name) for name in ("llama", "twelve", "capped", "sinks", "halves", "codes")),
    ("copies", "llama"),
    ("mapped", "llama"),
]


@pytest.mark.pairwise
@pytest.mark.parametrize(("variant", "name"), PAIRS, indirect=["variant"])
@pytest.mark.parametrize(("position", "m"), CALLS)
def test_attention(variant: OpenCLDevice, name: str, position: int, m: int) -> None:
    rng = np.random.default_rng(position * 1000 + m)
    op = OPS[name]
    run_and_compare(variant, op, tensors_for(op, m, rng, position=position), m)


@pytest.mark.parametrize(
    "name", ["llama", "window_of_one", "capped", "sinks", "odd_codes", "twelve_halves"]
)
def test_contexts_in_parts(
    device: OpenCLDevice, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device of many cores: more parts than there are keys, and less."""
    monkeypatch.setattr(attention, "splits", lambda *_: 3)
    op, rng = OPS[name], np.random.default_rng(7)
    for position, m in ((0, 1), (1, 4), (17, 2), (60, 1), (95, 4)):
        run_and_compare(device, op, tensors_for(op, m, rng, position=position), m)


@pytest.mark.parametrize(
    "name", ["llama", "window", "capped", "seven_in_a_group", "halves", "codes", "twelve_codes"]
)
def test_few_tokens_are_to_the_bit_what_each_is_alone(
    device: OpenCLDevice, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of keys is read once for all of them; what is verified is what would be decoded."""
    monkeypatch.setattr(attention, "splits", lambda *_: 1)  # else parts follow the call's start
    if device.tuning.lanes > 1:
        pytest.skip("a GPU's rows are computed by other work-groups")
    op, m = OPS[name], attention.FEW_TOKENS
    kernel = device.prepare(op, {})
    together, apart = (tensors_for(op, m, np.random.default_rng(9), position=87) for _ in range(2))
    kernel.bind(together, m).run()
    for i in range(m):
        apart["position"].array[:] = 87 + i
        one = {**apart, "qkv": apart["qkv"].rows(i, i + 1), "out": apart["out"].rows(i, i + 1)}
        kernel.bind(one, 1).run()
    for port in ("k_cache", "v_cache", "out"):
        np.testing.assert_array_equal(together[port].array, apart[port].array)


def test_workers_have_as_much_to_do() -> None:
    found = [
        attention.splits(*x) for x in ((8, 1), (8, 2), (1, 2), (3, 2), (8, 6), (9, 2), (1, 64))
    ]
    assert found == [1, 1, 2, 2, 3, 1, 16]


@pytest.mark.parametrize(("position", "m"), [(332, 1), (300, 33), (0, 333)])
def test_full_cache(variant: OpenCLDevice, position: int, m: int) -> None:
    rng = np.random.default_rng(m)
    run_and_compare(variant, LLAMA, tensors_for(LLAMA, m, rng, position=position), m)


@pytest.mark.parametrize("m", [1, 20])
def test_large_scores_do_not_overflow(variant: OpenCLDevice, m: int) -> None:
    tensors = tensors_for(LLAMA, m, np.random.default_rng(3), position=100)
    tensors["qkv"].array[:] *= 60  # scores of thousands: one key takes all the weight
    before = {port: tensor.array.copy() for port, tensor in tensors.items()}
    wanted = expected(LLAMA, before, {}, m)["out"]
    variant.prepare(LLAMA, {}).bind(tensors, m).run()
    assert relative_error(tensors["out"].array, wanted) < 1e-3  # float32 scores of 5000


def test_position_is_read_at_run_time(variant: OpenCLDevice) -> None:
    """One binding decodes token after token."""
    rng = np.random.default_rng(5)
    tensors = tensors_for(LLAMA, 1, rng)
    call = variant.prepare(LLAMA, {}).bind(tensors, 1)
    for position in range(40):
        tensors["position"].array[:] = position
        tensors["qkv"].array[:] = rng.standard_normal(LLAMA.width)
        before = {port: tensor.array.copy() for port, tensor in tensors.items()}
        call.run()
        wanted = expected(LLAMA, before, {}, 1)["out"]
        assert relative_error(tensors["out"].array, wanted) <= TOLERANCE


def test_prefill_in_pieces_equals_prefill_at_once(variant: OpenCLDevice) -> None:
    rng = np.random.default_rng(6)
    whole = tensors_for(LLAMA, 90, rng)
    kernel = variant.prepare(LLAMA, {})
    kernel.bind(whole, 90).run()
    pieces = tensors_for(LLAMA, 90, rng)
    pieces["qkv"].array[:] = whole["qkv"].array
    for start, stop in ((0, 50), (50, 51), (51, 87), (87, 90)):
        pieces["position"].array[:] = start
        part = {**pieces, "qkv": pieces["qkv"].rows(start, stop)}
        part["out"] = pieces["out"].rows(start, stop)
        kernel.bind(part, stop - start).run()
    assert relative_error(pieces["out"].array, whole["out"].array) <= 2 * TOLERANCE


@pytest.mark.full  # more shapes than those above
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.integers(1, 40),
    window=st.integers(0, 70),
    position=st.integers(0, 80),
    m=st.integers(1, 40),
)
def test_random_shapes(
    *,
    device: OpenCLDevice,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int,
    position: int,
    m: int,
) -> None:
    op = Attention(
        heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, capacity=128, window=window
    )
    rng = np.random.default_rng(m)
    run_and_compare(device, op, tensors_for(op, m, rng, position=position), m)
