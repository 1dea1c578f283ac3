"""Moving memory into huge pages changes where it lies for the hardware, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from hetero.backends import hugepages
from hetero.backends.hugepages import HUGE_BYTES
from hetero.backends.memory import HostBuffer, private_pages
from hetero.backends.ops import MatMul, StorageFormat, WeightFormat
from hetero.backends.registry import open_device
from hetero.backends.weights import pack

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
        device.settle()
        assert len(asked) == (n == 4096)
        assert kernel.nbytes > 0
    device.close()
