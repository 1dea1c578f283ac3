"""Every kernel against its float64 twin, on each variant of the device."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from hetero.backends.frequency_scaling import RopeScaling
from hetero.backends.memory import Tensor
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.weights import pack
from tests.backends.opencl.oracles import expected, relative_error, tensors_for

TOLERANCE = 2e-6


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def run_and_compare(
    device: OpenCLDevice,
    op: ops.Op,
    weights: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    m: int,
) -> None:
    """Run a binding and compare every output; rows beyond m and inputs must stay as they are."""
    before = {port: tensor.array.copy() for port, tensor in tensors.items()}
    wanted = expected(op, before, weights, m)
    device.prepare(op, weights).bind(tensors, m).run()
    for port, tensor in tensors.items():
        if port not in wanted:
            np.testing.assert_array_equal(tensor.array, before[port], err_msg=port)
            continue
        rows = len(wanted[port])
        np.testing.assert_array_equal(tensor.array[rows:], before[port][rows:], err_msg=port)
        error = relative_error(tensor.array[:rows], wanted[port])
        assert error <= TOLERANCE, f"{ops.describe(op)} m={m} {port}: relative error {error:.2e}"


def vector(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(n).astype(np.float32)


@pytest.mark.parametrize(("d", "m"), [(1, 1), (37, 5), (2048, 3)])
def test_add(variant: OpenCLDevice, rng: np.random.Generator, d: int, m: int) -> None:
    op = ops.Add(d=d)
    run_and_compare(variant, op, {}, tensors_for(op, m, rng, extra_rows=2), m)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("f", "m"), [(129, 1), (512, 4)])
def test_gated_act(
    variant: OpenCLDevice, rng: np.random.Generator, activation: ops.Activation, f: int, m: int
) -> None:
    op = ops.GatedAct(f=f, activation=activation)
    tensors = tensors_for(op, m, rng, extra_rows=1)
    tensors["x"].array[0, :100] = np.linspace(-30, 30, 100)
    run_and_compare(variant, op, {}, tensors, m)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activation_survives_extremes(
    variant: OpenCLDevice, rng: np.random.Generator, activation: ops.Activation
) -> None:
    op = ops.GatedAct(f=16, activation=activation)
    tensors = tensors_for(op, 1, rng)
    tensors["x"].array[0] = [*np.tile([-1e4, -100.0, 100.0, 1e4], 4), *np.ones(16)]
    variant.prepare(op, {}).bind(tensors, 1).run()
    np.testing.assert_allclose(tensors["y"].array[0], np.tile([0, 0, 100, 1e4], 4), atol=1e-30)


@pytest.mark.parametrize("more", [{"gated": True}, {"activation": "silu", "taps": 4, "bias": True}])
@pytest.mark.parametrize(("d", "m", "position"), [(37, 1, 5), (64, 2, 0), (200, 70, 1)])
def test_short_conv(
    variant: OpenCLDevice, rng: np.random.Generator, more: dict[str, Any], d: int, m: int,
    position: int,
) -> None:  # fmt: skip
    op = ops.ShortConv(**{"d": d, "taps": 3, "width": 700, **more})
    weights = {"taps": vector(rng, op.taps * d)} | ({"bias": vector(rng, d)} if op.bias else {})
    tensors = tensors_for(op, m, rng, position=position, extra_rows=2)
    run_and_compare(variant, op, weights, tensors, m)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(8, 16), (12, 20), (128, 128), (200, 64)])
@pytest.mark.parametrize(("m", "position"), [(1, 5), (2, 0), (70, 1)])
def test_gated_delta(
    variant: OpenCLDevice, rng: np.random.Generator, k_dim: int, v_dim: int, m: int, position: int
) -> None:
    op = ops.GatedDelta(k_heads=2, v_heads=4, k_dim=k_dim, v_dim=v_dim, eps=1e-6, width=700)
    decay = -np.array([0.01, 0.7, 8, 60], np.float32)  # the last forgets all from token to token
    weights = {"decay": decay, "dt_bias": vector(rng, 4)}
    weights["norm"] = vector(rng, v_dim)
    tensors = tensors_for(op, m, rng, position=position, extra_rows=2)
    run_and_compare(variant, op, weights, tensors, m)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("d", "m"), [(5, 2), (64, 1), (100, 7), (1000, 3)])
def test_rms_norm(
    variant: OpenCLDevice, rng: np.random.Generator, add: bool, d: int, m: int
) -> None:
    op = ops.RMSNorm(d=d, eps=1e-5, add=add)
    weights = {"weight": vector(rng, d)}
    run_and_compare(variant, op, weights, tensors_for(op, m, rng, extra_rows=2), m)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("d", "m"), [(5, 2), (1000, 3)])
def test_layer_norm(
    variant: OpenCLDevice, rng: np.random.Generator, add: bool, d: int, m: int
) -> None:
    op = ops.LayerNorm(d=d, eps=1e-5, add=add)
    weights = {"weight": vector(rng, d), "bias": vector(rng, d)}
    tensors = tensors_for(op, m, rng)
    tensors["x"].array[:] += 5  # a mean that a one-pass variance would lose digits to
    run_and_compare(variant, op, weights, tensors, m)


ROPES = {
    "llama": {"heads": 8, "kv_heads": 2, "head_dim": 64},
    "partial": {"heads": 4, "kv_heads": 4, "head_dim": 80, "rotary_dim": 20},
    "odd": {"heads": 2, "kv_heads": 1, "head_dim": 12, "rotary_dim": 6},
    "qk_norm": {"heads": 4, "kv_heads": 2, "head_dim": 32, "qk_norm_eps": 1e-6},
    "qk_norm_partial": {
        "heads": 2, "kv_heads": 1, "head_dim": 24, "rotary_dim": 16, "qk_norm_eps": 1e-6,
    },
    "yarn": {
        "heads": 2, "kv_heads": 1, "head_dim": 32,
        "scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position=64),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("position", "m"), [(0, 1), (200, 9)])
def test_rope(
    variant: OpenCLDevice, rng: np.random.Generator, name: str, position: int, m: int
) -> None:
    op = ops.Rope(theta=10000.0, max_position=256, **ROPES[name])  # type: ignore[arg-type]
    weights = {port: vector(rng, op.head_dim) for port in ops.weight_names(op)}
    tensors = tensors_for(op, m, rng, position=position, extra_rows=1)
    run_and_compare(variant, op, weights, tensors, m)


def test_rope_tables_are_shared_between_layers(
    device: OpenCLDevice, rng: np.random.Generator
) -> None:
    op = ops.Rope(heads=2, kv_heads=1, head_dim=16, theta=5e5, max_position=99, qk_norm_eps=1e-6)
    before = len(device.rope_tables)
    for _ in range(2):
        device.prepare(op, {"q_norm": vector(rng, 16), "k_norm": vector(rng, 16)})
    assert len(device.rope_tables) == before + 1


FORMATS = [WeightFormat.W4A16, WeightFormat.W8A16, WeightFormat.F16, WeightFormat.F32]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("d", "m"), [(64, 5), (45, 3)])
def test_embed(
    variant: OpenCLDevice, rng: np.random.Generator, weight_format: WeightFormat, d: int, m: int
) -> None:
    op = ops.Embed(vocab=83, d=d, weight_format=weight_format, scale=1.5)
    weights = {"weight": pack(rng.standard_normal((83, d)), weight_format.storage)}
    tensors = tensors_for(op, m, rng, extra_rows=1)
    tensors["tokens"].array[:2] = [0, 82]
    run_and_compare(variant, op, weights, tensors, m)
