"""The disk's rate is measured of pages that are not in memory, or not at all."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest

from hetero.backends.host.clock import SystemClock
from hetero.profiler import storage
from hetero.profiler.records import DeviceProfile, Storage
from hetero.profiler.storage import measure_storage, resident_share


def test_what_is_in_memory_is_no_measure(tmp_path: Path) -> None:
    asked = []

    def all_of_it(mapped: mmap.mmap) -> float:
        asked.append(len(mapped))
        return 1.0

    found = measure_storage(tmp_path, SystemClock(), resident=all_of_it)
    assert found.storage is None
    assert "stay in memory" in found.note
    assert asked == [storage.PIECES * storage.PIECE_BYTES]


def test_cold_pages_have_a_rate(tmp_path: Path) -> None:
    found = measure_storage(tmp_path, SystemClock(), resident=lambda _: 0.0)
    assert found.storage is not None
    assert 1e5 < found.storage.read_bytes_per_s < 1e12
    assert list(tmp_path.iterdir()) == []  # no file is left


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = measure_storage(tmp_path / "file" / "folder", SystemClock())
    assert found.storage is None
    assert found.note.startswith("the rate of the disk was not measured: ")


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs mincore")
def test_touched_pages_are_resident() -> None:
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as mapped:
        mapped[: 16 * mmap.PAGESIZE] = b"x" * 16 * mmap.PAGESIZE
        assert resident_share(mapped) >= 0.25


def test_profiles_of_before_stay_as_they_were() -> None:
    host = DeviceProfile.load("host")
    assert host.storage is None
    assert "storage" not in json.loads(host.to_json())
    known = host.model_copy(update={"storage": Storage(read_bytes_per_s=5e8, piece_bytes=1 << 20)})
    assert DeviceProfile.parse(known.to_json(), "here") == known
    assert known.fingerprint != host.fingerprint
