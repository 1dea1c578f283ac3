"""Pages of mapped files are brought, and nothing else happens to them."""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from hetero.backends.host import mapped

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux")


def test_pages_are_mapped_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "CHUNK_BYTES", 1 << 20)
    values = np.random.default_rng(0).integers(0, 256, (5 << 20) + 123, dtype=np.uint8)
    (tmp_path / "file").write_bytes(values.tobytes())
    with (tmp_path / "file").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(memory, np.uint8)[100:]
    thread = mapped.prefetch(array)
    assert thread is not None
    thread.join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    total = int(array[:: mmap.PAGESIZE].sum(dtype=np.int64))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert total == int(values[100 :: mmap.PAGESIZE].sum(dtype=np.int64))
    assert faults < 40  # of 80 runs of 16 pages


def test_nothing_is_brought_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   16 kB\n", encoding="ascii")
    monkeypatch.setattr(mapped, "MEMINFO", tmp_path / "meminfo")
    assert mapped.available_bytes() == 16 << 10
    assert mapped.prefetch(np.zeros(9 << 10, np.uint8)) is None
    monkeypatch.setattr(mapped, "MEMINFO", tmp_path / "none")
    assert mapped.available_bytes() == 0
