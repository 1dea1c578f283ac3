"""Flags and signals are in order with the data on processors that reorder, such as Arm's."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyopencl")

from hetero.backends.host import fence as fences
from hetero.backends.opencl import flag, stream_signal
from hetero.backends.opencl.flag import FlagCompletion
from hetero.backends.opencl.stream_signal import SIGNALLED, WORDS, OpenCLStreamSignal


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    fences.keeps_order.cache_clear()
    yield
    fences.keeps_order.cache_clear()


def on(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("x86_64", []),
        ("AMD64", []),
        ("aarch64", ["acquire", "release", "acquire"]),
        ("ARM64", ["acquire", "release", "acquire"]),
        ("riscv64", ["acquire", "release", "acquire"]),
    ],
)
def test_a_fence_is_a_release_before_an_acquisition(
    machine: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machine, monkeypatch)
    steps: list[str] = []

    def step(name: str) -> Callable[[], None]:
        return lambda: steps.append(name)

    lock = SimpleNamespace(acquire=step("acquire"), release=step("release"))
    monkeypatch.setattr(threading, "Lock", lambda: lock)
    fences.fence()
    assert steps == expected


def test_a_flag_is_read_before_the_data_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    word = np.array([0], np.int32)
    monkeypatch.setattr(flag, "fence", lambda: called.append(int(word[0])))
    event: Any = SimpleNamespace(done=lambda: False)
    completion = FlagCompletion(SimpleNamespace(word=word, submissions=1), event)
    assert not completion.done()
    assert called == []
    word[0] = 1
    assert completion.done()
    assert called == [1]


def signal_over(words: np.ndarray[Any, np.dtype[np.uint32]]) -> OpenCLStreamSignal:
    signal = object.__new__(OpenCLStreamSignal)
    signal._words, signal._signalled = words, 0
    signal._wait_value = SimpleNamespace(submissions=7)  # type: ignore[assignment]
    return signal


@pytest.mark.parametrize(("method", "number"), [("signal", 1), ("release", 7)])
def test_data_is_stored_before_the_number_of_a_signal(
    method: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = np.zeros(WORDS, np.uint32)
    called: list[int] = []
    monkeypatch.setattr(stream_signal, "fence", lambda: called.append(int(words[SIGNALLED])))
    getattr(signal_over(words), method)()
    assert called == [0]
    assert words[SIGNALLED] == number
