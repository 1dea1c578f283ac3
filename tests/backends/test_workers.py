"""ONNX Runtime as a CPU besides GPU and NPU: pieces of calls on threads, their order, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.backends import ops
from hetero.backends.errors import DeviceError, DeviceLostError, WaitTimeoutError
from hetero.backends.formats import WeightFormat
from hetero.backends.ort_cpu import WorkerDevice
from hetero.backends.ort_cpu import open as open_ort_cpu
from hetero.backends.ort_cpu.workers import LEAST_TOKENS, PIECES, Order, pieces_of
from tests.backends.cases import check_op, expected, make_tensors, make_weights, snapshot
from tests.support.helpers import assert_close
from tests.support.selection import examples

THREADS = 3


def opened(threads: int = THREADS) -> WorkerDevice:
    device = open_ort_cpu(kind="cpu")
    assert isinstance(device, WorkerDevice)
    device._cores = (None,) * threads  # on any core: this machine may have fewer
    return device


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerDevice]:
    with opened() as device:
        yield device


@settings(deadline=None, max_examples=examples(15))
@given(
    m=st.integers(1, 200),
    n=st.sampled_from([16, 48, 96, 160]),
    weight_format=st.sampled_from([WeightFormat.W4A16, WeightFormat.W8A16, WeightFormat.F32]),
    seed=st.integers(0, 10**6),
)
def test_a_matmul_in_pieces_is_the_matmul(
    workers: WorkerDevice, m: int, n: int, weight_format: WeightFormat, seed: int
) -> None:
    op, rng = ops.MatMul(n=n, k=64, weight_format=weight_format), np.random.default_rng(seed)
    weights, tensors = make_weights(op, rng), make_tensors(op, m, rng)
    wanted = expected(op, weights, snapshot(tensors), m)["y"]
    tensors["y"].array[:] = np.nan
    workers.prepare(op, weights).bind(tensors, m).submit().wait()
    assert_close(tensors["y"].array[:m], wanted, 2e-3, f"{op} m={m}")


@pytest.mark.full
@pytest.mark.parametrize("weight_format", WeightFormat)
def test_all_formats_of_the_npu_are_the_cpus(
    workers: WorkerDevice, weight_format: WeightFormat
) -> None:
    op = ops.MatMul(n=96, k=256, weight_format=weight_format)
    check_op(workers, op, (1, 7, 100))


@given(m=st.integers(1, 5000), threads=st.integers(1, 16))
def test_pieces_are_the_tokens_in_order(m: int, threads: int) -> None:
    pieces = pieces_of(m, threads)
    assert [x for a, b in pieces for x in range(a, b)] == list(range(m))
    assert len(pieces) <= max(PIECES * threads, 1)
    assert len(pieces) == 1 or min(b - a for a, b in pieces) >= LEAST_TOKENS


@given(order=st.permutations(range(12)))
def test_a_call_is_complete_when_all_before_it_are(order: list[int]) -> None:
    calls = Order()
    assert [calls.begin() for _ in order] == sorted(order)
    ended: set[int] = set()
    for number in order:
        calls.end(number)
        ended.add(number)
        for x in order:
            assert calls.is_complete(x) == (set(range(x + 1)) <= ended)


def bound(device: WorkerDevice, m: int = 64) -> Any:
    op, rng = ops.MatMul(n=32, k=64, weight_format=WeightFormat.F32), np.random.default_rng(1)
    return device.prepare(op, make_weights(op, rng)).bind(make_tensors(op, m, rng), m)


def test_what_it_is_and_takes(workers: WorkerDevice) -> None:
    able = workers.capabilities
    assert (able.kind, able.asynchronous, able.static_shapes) == ("cpu", True, False)
    assert able.prepares_rows
    assert workers.accepts(ops.MatMul(n=32, k=64, weight_format=WeightFormat.W4A16))
    refused = workers.accepts(ops.Add(d=64))
    assert not refused
    assert "rows of matmuls only" in refused.reason
    with pytest.raises(ValueError, match="rows of matmuls only"):
        workers.prepare(ops.Add(d=64), {})


def test_a_call_that_fails_loses_the_device() -> None:
    with opened() as device:
        call, after = bound(device), bound(device)

        def failing() -> None:
            raise RuntimeError("no")

        call._pieces[-1].run = failing
        completion = call.submit()
        with pytest.raises(DeviceError, match="no"):
            completion.wait()
        with pytest.raises(DeviceError, match="no"):
            completion.done()
        with pytest.raises(DeviceLostError, match="no"):
            after.submit()
        assert "lost" in device.state()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupted_submission_does_not_hold_up_the_next_call(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as device:
        call = bound(device, m=400)
        assert len(call._pieces) > 3
        call.run()
        put, count = device._queue.put, iter(range(100))

        def interrupted(piece: Any) -> None:
            if next(count) == at:
                raise KeyboardInterrupt
            put(piece)

        stopped = SimpleNamespace(put=interrupted)
        with monkeypatch.context() as patch:
            patch.setattr(device, "_queue", stopped)
            with pytest.raises(KeyboardInterrupt):
                call.submit()
        call.submit().wait(10.0)
        device.drain(10.0)


def test_a_call_that_hangs_is_given_up() -> None:
    release = threading.Event()
    with opened(1) as device:
        call = bound(device)
        call._pieces[0].run = release.wait
        completion = call.submit()
        assert not completion.done()
        assert completion.span() is None
        with pytest.raises(WaitTimeoutError, match=r"ort-cpu"):
            completion.wait(0.01)
        with pytest.raises(WaitTimeoutError):
            device.drain(0.01)
        release.set()
        device.drain(10.0)
        assert completion.done()
        start_s, end_s = completion.span()
        assert start_s < end_s <= time.perf_counter()


def test_closing_ends_the_threads() -> None:
    device = opened()
    bound(device).run()
    threads = device._threads
    assert len(threads) == THREADS
    assert all(thread.is_alive() for thread in threads)
    device.close()
    device.close()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(DeviceLostError, match="closed"):
        bound(device)
