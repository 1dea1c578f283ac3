"""The oracle against independent implementations, and its misbehaviour on demand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetero.backends import ops, registry
from hetero.backends.errors import DeviceError, DeviceLostError, WaitTimeoutError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import ManualClock
from hetero.backends.memory import Tensor
from hetero.backends.protocol import BoundCall, Device
from hetero.backends.reference.compute import quantized_activations, static_codes
from hetero.backends.weights import PackedWeight
from tests.backends.cases import execute, make_tensors, make_weights
from tests.support.helpers import assert_close

torch = pytest.importorskip("torch")
ADD = ops.Add(d=8)


def run(
    op: ops.Op, m: int, *, position: int = 0, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, object]]:
    rng = np.random.default_rng(seed)
    weights = make_weights(op, rng)
    tensors = make_tensors(op, m, rng, position=position)
    with registry.open_device("reference") as device:
        execute(device, device.prepare(op, weights).bind(tensors, m))
    return tensors, dict(weights)


def as_torch(tensor: Tensor) -> torch.Tensor:
    return torch.from_numpy(tensor.array.astype(np.float64))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("relu", torch.nn.functional.relu),
    ],
)
def test_gated_act_is_torchs(activation: ops.Activation, function: object) -> None:
    tensors, _ = run(ops.GatedAct(f=33, activation=activation), 5)
    gate, up = as_torch(tensors["x"]).split(33, dim=1)
    assert_close(tensors["y"].array, (function(gate) * up).numpy(), 1e-6)  # type: ignore[operator]


def test_norms_are_torchs() -> None:
    tensors, weights = run(ops.RMSNorm(d=33, eps=1e-3, add=True), 5)
    total = as_torch(tensors["x"]) + as_torch(tensors["residual"])
    weight = torch.from_numpy(weights["weight"]).double()
    wanted = torch.nn.functional.rms_norm(total, (33,), weight, 1e-3)
    assert_close(tensors["sum"].array, total.numpy(), 1e-6)
    assert_close(tensors["y"].array, wanted.numpy(), 1e-6)
    tensors, weights = run(ops.LayerNorm(d=33, eps=1e-3), 5)
    weight, bias = (torch.from_numpy(weights[name]).double() for name in ("weight", "bias"))
    wanted = torch.nn.functional.layer_norm(as_torch(tensors["x"]), (33,), weight, bias, 1e-3)
    assert_close(tensors["y"].array, wanted.numpy(), 1e-6)


def test_positions_are_torchs() -> None:
    tensors, weights = run(ops.AddPositions(d=5, rows=20, offset=2), 4, position=3)
    table = torch.from_numpy(weights["table"]).double().reshape(20, 5)
    wanted = as_torch(tensors["x"]) + torch.nn.functional.embedding(torch.arange(5, 9), table)
    assert_close(tensors["y"].array, wanted.numpy(), 1e-6)


def test_a_soft_cap_bends_and_bounds() -> None:
    op = ops.MatMul(n=17, k=45, weight_format=WeightFormat.F32, softcap=2.0)
    tensors, weights = run(op, 3)
    product = tensors["x"].array @ weights["weight"].dequantize().astype(np.float64).T  # type: ignore[attr-defined]
    assert_close(tensors["y"].array, 2.0 * np.tanh(product / 2.0), 1e-6)
    assert np.abs(tensors["y"].array).max() <= 2.0 < np.abs(product).max()


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("m", "position"), [(7, 0), (1, 9), (5, 4)])
def test_attention_is_torchs(m: int, position: int, window: int) -> None:
    op = ops.Attention(heads=4, kv_heads=2, head_dim=8, capacity=16, window=window)
    tensors, _ = run(op, m, position=position)
    end = position + m
    queries = as_torch(tensors["qkv"])[:, :32].reshape(m, 4, 8).transpose(0, 1)
    keys, values = (as_torch(tensors[c])[:, :end].repeat_interleave(2, 0) for c in op.ports[2:4])
    query, key = torch.arange(position, end)[:, None], torch.arange(end)[None]
    mask = (key <= query) & ((key > query - window) if window else (key >= 0))
    wanted = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask)
    assert_close(tensors["out"].array, wanted.transpose(0, 1).reshape(m, 32).numpy(), 1e-6)


def test_rope_rotates_pairs_of_half_a_head_apart() -> None:
    op = ops.Rope(heads=1, kv_heads=1, head_dim=4, theta=100.0, max_position=32)
    tensors, _ = run(op, 2, position=3)
    x, out = tensors["qkv"].array.astype(np.float64), tensors["out"].array
    for token, position in ((0, 3), (1, 4)):
        for head in (0, 1):
            for i, frequency in ((0, 1.0), (1, 0.1)):
                pair = x[token, head * 4 + i] + 1j * x[token, head * 4 + i + 2]
                turned = pair * np.exp(1j * position * frequency)
                assert out[token, head * 4 + i] == pytest.approx(turned.real, rel=1e-6)
                assert out[token, head * 4 + i + 2] == pytest.approx(turned.imag, rel=1e-6)
    np.testing.assert_array_equal(out[:, 8:], tensors["qkv"].array[:, 8:])


@pytest.mark.parametrize("weight_format", [f for f in WeightFormat if f.activations.are_floats])
def test_matmul_uses_the_stored_weight(weight_format: WeightFormat) -> None:
    tensors, weights = run(ops.MatMul(n=17, k=45, weight_format=weight_format, bias=True), 3)
    stored = weights["weight"].dequantize().astype(np.float64)  # type: ignore[attr-defined]
    wanted = tensors["x"].array @ stored.T + weights["bias"]
    assert_close(tensors["y"].array, wanted, 1e-6)


def test_w8a8_sums_codes_of_one_scale() -> None:
    """Row by row and feature by feature in whole numbers, against what the format promises."""
    op = ops.MatMul(n=17, k=45, weight_format=WeightFormat.W8A8)
    tensors, weights = run(op, 3)
    packed, x_scale = weights["weight"], weights["x_scale"]
    assert isinstance(packed, PackedWeight)
    assert isinstance(x_scale, np.ndarray)
    assert packed.scales is not None
    codes, scales = packed.codes().tolist(), packed.scales.reshape(-1)
    for token, x in enumerate(tensors["x"].array):
        q = [int(min(max(np.rint(v / x_scale[0]), -128), 127)) for v in x]
        assert max(map(abs, q)) > 40
        for row in range(op.n):
            total = sum(a * b for a, b in zip(q, codes[row], strict=True))
            wanted = np.float32(total) * (x_scale[0] * scales[row])
            assert tensors["y"].array[token, row] == wanted


def test_codes_of_a_static_scale_end_at_int8() -> None:
    x = np.array([[-1e9, -127.6, -0.5, 0.5, 1.5, 127.4, 128.0, 1e9]], dtype=np.float32)
    assert static_codes(x, 1.0).tolist() == [[-128, -128, 0, 0, 2, 127, 127, 127]]


def test_activations_are_quantised_by_block_and_token() -> None:
    x = np.zeros((2, 40), dtype=np.float32)
    x[0, :3] = 127.0, 1.4, -0.6
    x[0, 32:34] = 12.7, 0.16
    x[1, 0] = -1.0
    seen = quantized_activations(x)
    np.testing.assert_allclose(seen[0, :3], [127.0, 1.0, -1.0])
    np.testing.assert_allclose(seen[0, 32:34], [12.7, 0.2], rtol=1e-6)
    np.testing.assert_allclose(seen[1], x[1], rtol=1e-6)


# --- misbehaviour on demand ---------------------------------------------------------------------


def bound_add(device: Device) -> tuple[BoundCall, dict[str, Tensor]]:
    tensors = make_tensors(ADD, 2, np.random.default_rng(0))
    return device.prepare(ADD, {}).bind(tensors, 2), tensors


def test_nothing_is_written_before_the_host_knows() -> None:
    clock = ManualClock()
    device = registry.open_device("reference", asynchronous=True, delay_s=2.0, clock=clock)
    call, tensors = bound_add(device)
    completion = call.submit()
    assert not completion.done()
    clock.sleep(1.9)
    assert not completion.done()
    assert np.isnan(tensors["y"].array).all()
    completion.wait()
    assert clock.now() == 2.0
    assert completion.done()
    assert np.isfinite(tensors["y"].array).all()


def test_launches_queue_behind_each_other() -> None:
    clock = ManualClock()
    device = registry.open_device("reference", asynchronous=True, delay_s=2.0, clock=clock)
    call, _ = bound_add(device)
    first, second = call.submit(), call.submit()
    second.wait()
    assert clock.now() == 4.0
    assert first.done()


@pytest.mark.parametrize("delay_s", [2.0, math.inf])
def test_wait_gives_up_at_its_deadline(delay_s: float) -> None:
    clock = ManualClock()
    device = registry.open_device("reference", asynchronous=True, delay_s=delay_s, clock=clock)
    completion = bound_add(device)[0].submit()
    with pytest.raises(WaitTimeoutError) as caught:
        completion.wait(0.5)
    assert str(caught.value) == (
        "reference: waiting for Add(d=8) m=2 failed: not complete after 0.5 s; the driver may "
        "have hung: close the model and open it again; if the machine is only slow, set "
        "HETERO_TIMEOUT_SCALE=4"
    )
    assert clock.now() == 0.5
    assert caught.value.kernel == "Add(d=8) m=2"


def test_wait_gives_up_in_real_time() -> None:
    device = registry.open_device("reference", asynchronous=True, delay_s=30.0)
    with pytest.raises(WaitTimeoutError):
        bound_add(device)[0].submit().wait(0.01)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_injected_failure_loses_the_device(asynchronous: bool) -> None:
    device = registry.open_device("reference", asynchronous=asynchronous, fail_launch=2)
    call, _ = bound_add(device)
    execute(device, call)
    execute(device, call)
    with pytest.raises(DeviceError, match="INJECTED_FAILURE"):
        execute(device, call)
    for attempt in (lambda: execute(device, call), lambda: device.prepare(ADD, {})):
        with pytest.raises(DeviceLostError, match=r"INJECTED_FAILURE in Add\(d=8\) m=2"):
            attempt()


def test_a_failure_is_raised_by_done_and_by_wait() -> None:
    device = registry.open_device("reference", asynchronous=True, fail_launch=0)
    completion = bound_add(device)[0].submit()
    for ask in (completion.done, completion.wait):
        with pytest.raises(DeviceError, match="INJECTED_FAILURE"):
            ask()


def test_positions_beyond_the_table_are_refused() -> None:
    op = ops.Rope(heads=1, kv_heads=1, head_dim=4, theta=100.0, max_position=8)
    with pytest.raises(DeviceError, match="2 tokens at position 7 do not fit 8"):
        run(op, 2, position=7)
