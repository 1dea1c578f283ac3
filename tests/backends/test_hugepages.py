"""Moving memory into huge pages changes its place for the hardware, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.backends import memory
from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.host import hugepages
from hetero.backends.host.hugepages import HUGE_BYTES
from hetero.backends.memory import PAGE_BYTES, Arena, HostBuffer, private_pages
from hetero.backends.ops import MatMul
from hetero.backends.optional import SupportsCompaction
from hetero.backends.registry import open_device
from hetero.backends.weights import pack
from hetero.models.packing import empty_packed

CHUNK = 1 << 20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has madvise")


def resident_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return next(1024 * int(line.split()[1]) for line in text.splitlines() if line[:4] == "Rss:")


@linux
def test_collapsing_changes_no_byte_and_takes_no_memory() -> None:
    random = np.random.default_rng()
    memory = private_pages(16 * HUGE_BYTES)
    values = np.frombuffer(memory, dtype=np.uint64)
    half = len(values) // 2  # the rest stays untouched
    values[:half] = random.integers(0, 2**63, half, dtype=np.uint64)
    before, size = values[:half].copy(), resident_bytes()
    inside = values.ctypes.data + HUGE_BYTES
    assert any(start <= inside < stop for start, stop in hugepages.private_mappings())
    moved = hugepages.collapse(30.0)
    assert np.array_equal(values[:half], before)
    assert resident_bytes() - size < 4 * HUGE_BYTES
    assert moved % HUGE_BYTES == 0


@linux
def test_only_whole_resident_pages_are_moved() -> None:
    start = 64 * HUGE_BYTES

    class Library:
        def mincore(self, _start: int, nbytes: int, seen: int) -> int:
            pages = (ctypes.c_uint8 * (nbytes // mmap.PAGESIZE)).from_address(seen)
            per = HUGE_BYTES // mmap.PAGESIZE
            for page in (0, 1, 2, 4):  # page 3 has a hole
                pages[page * per : (page + 1) * per] = [1] * per
            pages[3 * per : 4 * per] = [1] * (per - 1) + [0]
            return 0

    found = list(hugepages._resident(Library(), start, start + 6 * HUGE_BYTES))
    expected = [(0, 3), (4, 5)]
    assert found == [(start + a * HUGE_BYTES, start + b * HUGE_BYTES) for a, b in expected]


def test_a_budget_of_nothing_moves_nothing() -> None:
    assert hugepages.collapse(0.0) == 0


@pytest.mark.parametrize("nbytes", [1, HUGE_BYTES, 3 * HUGE_BYTES + 5])
def test_huge_buffers_are_zero_and_as_long_as_others(nbytes: int) -> None:
    buffer = HostBuffer(nbytes, huge=True)
    assert buffer.nbytes == HostBuffer(nbytes).nbytes
    assert not buffer.bytes.any()


def test_only_a_device_with_much_to_move_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(hugepages, "collapse", asked.append)
    device = open_device("ort-cpu")
    for n in (64, 4096):
        weight = pack(np.zeros((n, 2048), dtype=np.float32), StorageFormat.F32)
        op = MatMul(n=n, k=2048, weight_format=WeightFormat.F32)
        kernel = device.prepare(op, {"weight": weight})
        assert isinstance(device, SupportsCompaction)
        device.compact_weights()
        assert len(asked) == (n == 4096)
        assert kernel.nbytes > 0
    device.close()


@linux
def test_huge_buffers_begin_with_a_huge_page() -> None:
    assert all(HostBuffer(HUGE_BYTES, huge=True).address % HUGE_BYTES == 0 for _ in range(8))


@given(sizes=st.lists(st.integers(1, 3 * CHUNK // 4), min_size=1, max_size=40))
def test_parts_of_an_arena_are_zero_aligned_and_disjoint(sizes: list[int]) -> None:
    arena = Arena(CHUNK)
    parts = [arena.take(size) for size in sizes]
    assert [len(part) for part in parts] == sizes
    assert all(part.ctypes.data % PAGE_BYTES == 0 and not part.any() for part in parts)
    for i, part in enumerate(parts):
        part[:] = i + 1
    assert all((part == i + 1).all() for i, part in enumerate(parts))


def test_small_parts_share_a_buffer_that_lives_as_long_as_they() -> None:
    arena = Arena(CHUNK)
    first = arena.take(100)
    view = arena.take(PAGE_BYTES + 1)[10:20].view(np.uint16).reshape(5, 1)
    assert view.ctypes.data - first.ctypes.data == PAGE_BYTES + 10
    third = arena.take(8)
    assert third.ctypes.data - first.ctypes.data == 3 * PAGE_BYTES
    chunk = arena._chunk
    del first, third
    assert chunk() is not None
    del view
    assert chunk() is None
    assert arena.take(8)[0] == 0


def test_threads_take_different_parts() -> None:
    arena = Arena(CHUNK)

    def fill(value: int) -> list[npt.NDArray[np.uint8]]:
        parts = [arena.take(3000) for _ in range(50)]
        for part in parts:
            part[:] = value
        return parts

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fill, range(1, 9)))
    assert all((part == i).all() for i, parts in enumerate(found, start=1) for part in parts)


def test_small_weights_share_huge_pages() -> None:
    weights = [empty_packed(StorageFormat.Q4, 1024, 1024) for _ in range(3)]
    arrays = [array for w in weights for array in (w.data, w.scales) if array is not None]
    assert len({id(array.base) for array in arrays}) <= 2  # six, of which a buffer may have ended
    assert all(array.base is not None and array.base.nbytes >= HUGE_BYTES for array in arrays)


def test_a_refused_buffer_leaves_an_arena_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> mmap.mmap:
        raise MemoryError

    arena = Arena(CHUNK)
    first = arena.take(CHUNK // 2)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "private_pages", refused)
        with pytest.raises(MemoryError):
            arena.take(CHUNK // 2 + 1)
        second = arena.take(CHUNK // 2)  # what is left of the first buffer
    assert second.ctypes.data - first.ctypes.data == CHUNK // 2
    assert not arena.take(CHUNK // 2).any()
