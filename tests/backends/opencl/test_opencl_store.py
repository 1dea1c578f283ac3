"""Kernel entries: written whole, verified when read, whatever happens to their files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyopencl")

from hetero.backends.opencl.self_test import kernel_store
from hetero.backends.opencl.self_test.kernel_store import (
    MAGIC,
    SUFFIX,
    KernelStore,
    decode,
    encode,
    keep_newest,
)

FILES = {"AB/program.bc": b"BC\xc0\xde" * 40, "AB/add/1-1-1/add.so": b"\x7fELF" + bytes(300)}
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,8}(/[a-zA-Z0-9._-]{1,8}){0,3}", fullmatch=True).filter(
    lambda name: ".." not in name.split("/") and "." not in name.split("/")
)


@pytest.mark.full
@given(st.dictionaries(NAMES, st.binary(max_size=200), max_size=5))
def test_what_is_written_is_read(files: dict[str, bytes]) -> None:
    assert decode(encode(files)) == files


@given(st.data())
def test_no_damaged_byte_passes(data: st.DataObject) -> None:
    good = encode(FILES)
    at = data.draw(st.integers(0, len(good) - 1))
    bit = data.draw(st.integers(0, 7))
    flipped = good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :]
    assert decode(flipped) is None
    assert decode(good[:at]) is None
    assert decode(good + bytes([bit])) is None


@given(st.binary(max_size=200))
def test_any_bytes_behind_a_right_checksum_are_checked(body: bytes) -> None:
    """A program that can write an entry can also write its checksum."""
    import hashlib

    found = decode(MAGIC + hashlib.sha256(body).digest() + body)
    assert found is None or all(isinstance(content, bytes) for content in found.values())


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", "", "a\\b", "a\0b", 7, None])
def test_no_path_leads_out_of_the_folder(name: object) -> None:
    import hashlib

    body = json.dumps([[name, 1]]).encode() + b"\nx"
    assert decode(MAGIC + hashlib.sha256(body).digest() + body) is None


class TestStore:
    def test_a_damaged_entry_is_removed(self, tmp_path: Path) -> None:
        store = KernelStore(tmp_path)
        store.put("one", FILES)
        path = tmp_path / f"one{SUFFIX}"
        path.write_bytes(path.read_bytes()[:-1])
        assert store.get("one") is None
        assert not path.exists()

    def test_unpacks_into_a_folder(self, tmp_path: Path) -> None:
        store = KernelStore(tmp_path / "store")
        store.put("one", FILES)
        assert store.unpack("one", tmp_path / "run")
        assert not store.unpack("two", tmp_path / "run")
        for name, content in FILES.items():
            assert (tmp_path / "run" / name).read_bytes() == content

    def test_a_folder_that_cannot_be_written_is_passed_over(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        store = KernelStore(tmp_path / "file" / "store", tmp_path / "second")
        store.put("one", FILES)
        assert store.get("one") == FILES
        assert [path.name for path in (tmp_path / "second").iterdir()] == [f"one{SUFFIX}"]

    def test_a_full_disk_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int, *_: object) -> object:
            os.close(descriptor)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kernel_store.os, "fdopen", full)
        store = KernelStore(tmp_path)
        store.put("one", FILES)
        assert list(tmp_path.iterdir()) == []

    def test_clearing(self, tmp_path: Path) -> None:
        store = KernelStore(tmp_path)
        store.put("one", FILES)
        store.clear()
        assert store.get("one") is None


def test_unused_stores_are_removed(tmp_path: Path) -> None:
    """Of a version that was replaced, of a driver that is gone."""
    stores = [KernelStore(tmp_path / f"{i}", tmp_path / "none") for i in range(4)]
    for i, store in enumerate(stores):
        store.put("a", {"b": b"c"})
        os.utime(store.folders[0], (i, i))
    stores[0].use()
    keep_newest(tmp_path, 2)
    assert [store.get("a") is not None for store in stores] == [True, False, False, True]
    keep_newest(tmp_path / "none")


def test_a_folder_that_cannot_be_read_holds_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """It may be in one that this user may not enter."""
    store = KernelStore(tmp_path / "locked", tmp_path / "own")
    assert not store.is_used()
    store.put("a", {"x": b"1"})
    assert store.is_used()

    def refused(path: Path, _: str) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", refused)
        store.clear()
    store.clear()
    assert not store.is_used()
