"""Waits hold until they are signalled; what is behind them sees what was stored before."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hetero.backends.errors import DeviceError
from hetero.backends.memory import Tensor
from hetero.backends.opencl import stream_signal
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.flag import Flag
from hetero.backends.opencl.stream_signal import OpenCLStreamSignal, find_stream_signal
from hetero.backends.ops import Add
from hetero.backends.protocol import BoundCall, Completion

WIDTH = 1000


@pytest.fixture
def signal(device: OpenCLDevice) -> OpenCLStreamSignal:
    found = device.stream_signal()
    if found is None:
        pytest.skip("no stream signal works on this device")
    found.reset()
    return found


def adder(device: OpenCLDevice) -> tuple[BoundCall, Tensor, Tensor]:
    """A call, its input x and its output y = x + x."""
    buffer = device.allocate(8 * WIDTH)
    x = Tensor(buffer, (1, WIDTH))
    y = Tensor(buffer, (1, WIDTH), offset_bytes=4 * WIDTH)
    kernel = device.prepare(Add(d=WIDTH), {})
    return kernel.bind({"x": x, "residual": x, "y": y}, 1), x, y


def until(completion: Completion) -> None:
    give_up_s = time.perf_counter() + 20
    while not completion.done():
        assert time.perf_counter() < give_up_s


def test_nothing_passes_a_wait_and_nothing_is_stale(
    device: OpenCLDevice, signal: OpenCLStreamSignal
) -> None:
    """Always one group ahead, as a decode step has them."""
    call, x, y = adder(device)
    y.array[:] = np.nan
    signal.wait_value.submit()
    for i in range(300):
        call.submit()
        following = signal.wait_value.submit()
        assert np.isnan(y.array).all()
        x.array[:] = i
        signal.signal()
        until(following)
        assert (y.array == 2 * i).all()
        y.array[:] = np.nan
    signal.signal()
    device.finish()
    signal.check()


def test_release_passes_all_waits_and_numbers_start_again(
    device: OpenCLDevice, signal: OpenCLStreamSignal
) -> None:
    call, x, y = adder(device)
    for rung in range(3):
        for _ in range(3):
            signal.wait_value.submit()
            end = call.submit()
        for _ in range(rung):
            signal.signal()
        signal.release()
        end.wait(20)
        signal.signal()  # one too many, as an interruption may leave it
        signal.reset()
        y.array[:] = np.nan
        reached, end = signal.wait_value.submit(), call.submit()
        until(reached)
        assert np.isnan(y.array).all()
        x.array[:] = rung
        signal.signal()
        end.wait(20)
        assert (y.array == 2 * rung).all()


def test_a_wait_gives_up_and_says_so(device: OpenCLDevice, signal: OpenCLStreamSignal) -> None:
    patient, signal.wait_value._call = signal.wait_value._call, signal.wait_value._bound(1000)  # type: ignore[attr-defined]
    signal.wait_value.submit().wait(20)
    signal.wait_value._call = patient  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="opencl: waiting for the control thread's signal"):
        signal.check()
    signal.reset()
    signal.check()


def test_numbers_go_round(device: OpenCLDevice, signal: OpenCLStreamSignal) -> None:
    call, x, y = adder(device)
    start = 2**32 - 2
    signal._words[:] = 0
    signal._words[[0, 16]] = start
    signal._signalled = signal._wait_value.submissions = start
    for i in range(4):
        signal.wait_value.submit()
        end = call.submit()
        x.array[:] = i
        signal.signal()
        end.wait(20)
        assert (y.array == 2 * i).all()
    signal.reset()
    signal.check()


def test_processors_that_reorder_have_signals(
    device: OpenCLDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(stream_signal, "_probe", lambda *_: True)  # a busy machine is late for it
    assert find_stream_signal(device, Flag(device)) is not None
