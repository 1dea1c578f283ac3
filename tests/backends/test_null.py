"""The null device keeps exact time on a manual clock, and computes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.backends import ops, registry
from hetero.backends.errors import WaitTimeoutError
from hetero.backends.formats import WeightFormat
from hetero.backends.host.clock import ManualClock, SystemClock
from hetero.backends.memory import Tensor
from hetero.backends.null import NullDevice
from hetero.backends.null import open as open_null
from hetero.backends.ops import Op
from hetero.backends.protocol import BoundCall, Device
from tests.backends.cases import make_tensors

ADD = ops.Add(d=8)


def bound_add(device: Device, m: int = 2) -> tuple[BoundCall, dict[str, Tensor]]:
    tensors = make_tensors(ADD, m, np.random.default_rng(0))
    return device.prepare(ADD, {}).bind(tensors, m), tensors


def test_blocking_launches_take_their_cost() -> None:
    device = open_null(cost=lambda op, m: 0.25 * m)
    call, _ = bound_add(device, 3)
    call.run()
    call.run()
    assert device.clock.now() == 1.5
    assert [(r.op, r.m, r.start_s, r.end_s) for r in device.launches] == [
        (ADD, 3, 0.0, 0.75),
        (ADD, 3, 0.75, 1.5),
    ]


def test_asynchronous_launches_run_one_after_another() -> None:
    clock = ManualClock()
    device = open_null(asynchronous=True, kind="gpu", cost=lambda op, m: 1.0, clock=clock)
    call, _ = bound_add(device)
    first = call.submit()
    clock.sleep(0.25)
    second = call.submit()
    assert (first.done(), second.done()) == (False, False)
    first.wait()
    assert clock.now() == 1.0
    second.wait()
    assert clock.now() == 2.0
    assert [(r.submitted_s, r.start_s) for r in device.launches] == [(0.0, 0.0), (0.25, 1.0)]


def test_two_devices_share_a_clock() -> None:
    """The GPU works while the NPU blocks the host: the scheduler's overlap, with exact numbers."""
    clock = ManualClock()
    gpu = open_null(kind="gpu", asynchronous=True, cost=lambda op, m: 3.0, clock=clock)
    npu = open_null(cost=lambda op, m: 2.0, clock=clock)
    completion = bound_add(gpu)[0].submit()
    bound_add(npu)[0].run()
    assert clock.now() == 2.0
    completion.wait()
    assert clock.now() == 3.0


def test_deadline() -> None:
    device = open_null(asynchronous=True, cost=lambda op, m: 9.0)
    with pytest.raises(WaitTimeoutError, match="not complete after 2 s"):
        bound_add(device)[0].submit().wait(2.0)
    assert device.clock.now() == 2.0


@pytest.mark.parametrize("poison", [False, True])
def test_outputs_are_left_or_poisoned(poison: bool) -> None:
    call, tensors = bound_add(open_null(poison=poison))
    for tensor in tensors.values():
        tensor.array[:] = 1.0
    call.run()
    assert np.isnan(tensors["y"].array).all() == poison
    assert (tensors["x"].array == 1.0).all()


def test_declared_formats() -> None:
    device = open_null(weight_formats=(WeightFormat.W4A8,), row_alignment=256, token_alignment=32)
    refused = device.accepts(ops.MatMul(n=8, k=32, weight_format=WeightFormat.F32))
    assert refused.reason.startswith("weight format f32 is not one of")
    assert device.capabilities.row_alignment == 256
    assert device.capabilities.token_alignment == 32


def test_cost_sees_the_operation() -> None:
    seen: list[tuple[Op, int]] = []

    def cost(op: Op, m: int) -> float:
        seen.append((op, m))
        return 0.0

    device = registry.open_device("null", cost=cost)
    assert isinstance(device, NullDevice)
    bound_add(device, 5)[0].run()
    assert seen == [(ADD, 5)]


def test_manual_clock_does_not_sleep_forever() -> None:
    clock = ManualClock(5.0)
    clock.sleep(-1.0)
    assert clock.now() == 5.0
    with pytest.raises(ValueError, match="cannot sleep forever"):
        clock.sleep(float("inf"))


def test_system_clock_moves() -> None:
    clock = SystemClock()
    start = clock.now()
    clock.sleep(0.001)
    clock.sleep(-1.0)
    assert clock.now() - start >= 0.001
