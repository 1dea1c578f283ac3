"""Memory of an NPU's allocator, imported by its dma-buf. The drivers that do so are not here: their
part is played by a function that reads the structure they are given.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

cl = pytest.importorskip("pyopencl")
from hetero.backends import ops  # noqa: E402
from hetero.backends.memory import HostBuffer, Tensor  # noqa: E402
from hetero.backends.opencl import imported  # noqa: E402
from hetero.backends.opencl.device import OpenCLDevice  # noqa: E402
from hetero.backends.opencl.resources import DeviceMemory  # noqa: E402
from hetero.backends.registry import open_device  # noqa: E402

Driver = Callable[[Any, int, Any], DeviceMemory]


@pytest.fixture
def device() -> Iterator[OpenCLDevice]:
    with open_device("opencl") as opened:  # type: ignore[attr-defined]
        yield opened


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    shared = HostBuffer(1 << 16)
    shared.dma_buf = os.memfd_create("dma-buf")
    shared.bytes[:] = 3
    yield shared
    os.close(shared.dma_buf)


def is_sum_right(device: OpenCLDevice, buffer: HostBuffer) -> bool:
    x, residual, y = (Tensor(buffer, (2, 64), offset_bytes=4096 * i) for i in range(3))
    x.array[:], residual.array[:], y.array[:] = np.arange(128).reshape(2, 64), 0.5, np.nan
    device.prepare(ops.Add(d=64), {}).bind({"x": x, "residual": residual, "y": y}, 2).run()
    return bool(np.array_equal(y.array, x.array + 0.5))


def driver(
    monkeypatch: pytest.MonkeyPatch,
    device: OpenCLDevice,
    buffer: HostBuffer,
    takes: Callable[[int, int], int | None],
) -> list[tuple[int, int]]:
    """Import as `takes` says of (type, policy): by which flag on the memory, None: refuse."""
    asked: list[tuple[int, int]] = []

    def create(context: Any, flags: int, hostbuf: Any) -> DeviceMemory:
        assert flags == cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR | 1 << 29
        assert hostbuf.nbytes == buffer.nbytes
        kind, policy = np.ctypeslib.as_array(
            (ctypes.c_uint32 * 2).from_address(hostbuf.ctypes.data)
        )
        file = ctypes.c_int.from_address(hostbuf.ctypes.data + 8).value
        place = ctypes.c_void_p.from_address(hostbuf.ctypes.data + 16).value
        assert (file, place) == (buffer.dma_buf, buffer.address)
        asked.append((int(kind), int(policy)))
        flag = takes(*asked[-1])
        if flag is None:
            return DeviceMemory(context, flags, hostbuf=hostbuf)  # this driver refuses the flag
        return DeviceMemory(context, cl.mem_flags.READ_WRITE | flag, hostbuf=buffer.bytes)

    monkeypatch.setattr(imported, "DeviceMemory", create)
    monkeypatch.setattr(imported, "EXTENSION", device.native.extensions.split()[0])
    return asked


def test_a_driver_without_the_extension_maps_the_pages(
    device: OpenCLDevice, buffer: HostBuffer
) -> None:
    assert imported.EXTENSION not in device.native.extensions.split()
    assert device.imported(buffer) is None
    assert is_sum_right(device, buffer)


def test_a_driver_that_refuses_every_way_maps_the_pages(
    device: OpenCLDevice, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one knows no such flag."""
    monkeypatch.setattr(imported, "EXTENSION", device.native.extensions.split()[0])
    assert imported.find_import(device, buffer) is None
    assert (buffer.bytes == 3).all()
    assert is_sum_right(device, buffer)


def test_the_first_way_that_hands_values_over_is_taken(
    device: OpenCLDevice, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is refused, one gives the GPU a copy of its own, the next one works."""
    ways = {
        (imported.ION, imported.IO_COHERENT): cl.mem_flags.COPY_HOST_PTR,
        (imported.DMA_BUF, imported.UNCACHED): cl.mem_flags.USE_HOST_PTR,
    }
    asked = driver(monkeypatch, device, buffer, lambda *way: ways.get(way))
    assert is_sum_right(device, buffer)
    assert asked == [*imported.IMPORTS[:3], imported.IMPORTS[2]]
    assert device.imported(HostBuffer(4096)) is None  # no descriptor: nothing to import


def test_where_every_way_gives_copies_the_pages_are_mapped(
    device: OpenCLDevice, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = driver(monkeypatch, device, buffer, lambda *_: cl.mem_flags.COPY_HOST_PTR)
    assert is_sum_right(device, buffer)
    assert asked == [*imported.IMPORTS]


def test_memory_that_cannot_be_imported_later_is_mapped(
    device: OpenCLDevice, buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of the first buffer passes, then its import is refused."""
    calls: list[int] = []

    def takes(*_: int) -> int | None:
        calls.append(1)
        return cl.mem_flags.USE_HOST_PTR if len(calls) == 1 else None

    driver(monkeypatch, device, buffer, takes)
    assert is_sum_right(device, buffer)
    assert len(calls) == 2
