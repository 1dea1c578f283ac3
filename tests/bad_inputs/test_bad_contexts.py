"""Folders of contexts that are full, read-only, another model's, locked or damaged: one sentence
with the remedy, or a recompute; the same text either way.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM, Service, UserError
from hetero.contexts import measured, text_log
from tests.support import tiny_files


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_files.write_directory(tmp_path_factory.mktemp("model") / "model")
    with LLM(str(folder), device="npu") as opened:
        yield opened


KEY = bytes(range(32))


def service(llm: LLM, folder: Path, **options: Any) -> Service:
    given: dict[str, Any] = {"context_memory": "2MiB", "context_disk": "1MiB", "kv_bits": "raw"}
    return Service(llm, directory=folder, **(given | options))


@pytest.fixture
def folder(llm: LLM, tmp_path: Path) -> Path:
    """With one context of one app, whose chunks are on the disk."""
    with service(llm, tmp_path / "c") as opened:
        opened.bind("a").new_context(chat=False).call("hi hi hi hi hi", max_tokens=4)
    return tmp_path / "c"


@pytest.fixture
def sealed(llm: LLM, tmp_path: Path) -> Path:
    """The same, encrypted."""
    pytest.importorskip("cryptography")
    with service(llm, tmp_path / "s", encryption_key=KEY) as opened:
        opened.bind("a").new_context(chat=False).call("hi hi hi hi hi", max_tokens=4)
    return tmp_path / "s"


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "service.json"
        about = json.loads(path.read_text("utf-8"))
        change(about)
        path.write_text(json.dumps(about), "utf-8")

    return edit


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another model": (
        edited(lambda x: x["identity"].update(weights="other")),
        "belong to another model or weight format: open them with that, or choose another",
    ),
    "another codec": (
        edited(lambda x: x["identity"].update(codec=99)),
        "belong to another model or weight format",
    ),
    "another version": (
        edited(lambda x: x.update(version=99)),
        "written by another version of hetero: choose another directory",
    ),
    "a short secret": (edited(lambda x: x.update(secret="00")), "another version of hetero"),
    "no secret": (edited(lambda x: x.pop("secret")), "is damaged"),
    "half a description": (
        lambda folder: (folder / "service.json").write_bytes(b'{"version": 1, "ide'),
        "is damaged",
    ),
    "no text at all": (lambda folder: (folder / "service.json").write_bytes(b"\xff\x00"), "damage"),
    "a list": (lambda folder: (folder / "service.json").write_bytes(b"[1]"), "is damaged"),
    "a folder in its place": (
        lambda folder: ((folder / "service.json").unlink(), (folder / "service.json").mkdir()),
        "is damaged",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_used_is_one_sentence(llm: LLM, folder: Path, name: str) -> None:
    change, sentence = REFUSED[name]
    change(folder)
    before = {path: path.stat().st_size for path in folder.rglob("*")}
    with pytest.raises(UserError, match=sentence):
        service(llm, folder)
    assert {path: path.stat().st_size for path in folder.rglob("*")} == before


def test_a_folder_and_a_key_that_do_not_go_together(llm: LLM, folder: Path, sealed: Path) -> None:
    for path, key, sentence in (
        (sealed, None, r"is encrypted: give the key \(encryption_key, --encryption-key FILE"),
        (sealed, bytes(32), r"by another key \(.*, this one is .*\): give that one, or choose"),
        (folder, KEY, "is not encrypted: open it without a key, or choose another directory"),
        (folder, b"short", "an encryption key has 32 bytes, got 5"),
    ):
        before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
        with pytest.raises(UserError, match=sentence):
            service(llm, path, encryption_key=key)
        assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    edited(lambda x: x.update(secret="00" * 60))(sealed)
    with pytest.raises(UserError, match=r"service\.json: is damaged"):
        service(llm, sealed, encryption_key=KEY)


def test_keys_that_are_none(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    with pytest.raises(UserError, match="the encryption key cannot be read"):
        service(llm, tmp_path / "c", encryption_key=path)
    path.write_text("no key at all")
    path.chmod(0o600)
    with pytest.raises(UserError, match="make one with `openssl rand -hex 32`"):
        service(llm, tmp_path / "c", encryption_key=path)
    if os.name == "posix":
        path.chmod(0o640)
        with pytest.raises(UserError, match="others can read the encryption key: chmod 600 it"):
            service(llm, tmp_path / "c", encryption_key=path)
    monkeypatch.setenv("HETERO_ENCRYPTION_KEY", "abc")
    with pytest.raises(UserError, match="the environment's HETERO_ENCRYPTION_KEY: an encryption"):
        service(llm, tmp_path / "c")
    monkeypatch.delenv("HETERO_ENCRYPTION_KEY")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(UserError, match=r"another package: pip install 'hetero\[encryption\]'"):
        service(llm, tmp_path / "c", encryption_key=KEY)
    assert not (tmp_path / "c").exists()


def test_a_locked_folder(llm: LLM, folder: Path) -> None:
    with service(llm, folder), pytest.raises(UserError, match="end it, or choose another"):
        service(llm, folder)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs permissions")
def test_a_read_only_folder(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the system's answer is planted."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refused)
        with pytest.raises(UserError, match=r"Read-only file system.*choose another directory"):
            service(llm, folder)
    with service(llm, folder) as opened:
        (context,) = opened.bind("a").contexts()
        before = context.tokens
        monkeypatch.setattr(text_log, "atomic_write", refused)
        monkeypatch.setattr(os, "fsync", refused)
        with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
            context.call("hi", max_tokens=1)
        with pytest.raises(UserError, match="cannot be written"):
            opened.bind("a").new_context()
        assert context.tokens == before, "nothing that was not acknowledged"
        monkeypatch.undo()
        context.call("hi", max_tokens=1)


def test_a_full_disk_before_anything_is_measured(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(measured.ChunkFiles, "write", full)
    with pytest.raises(UserError, match=r"No space left on device.*choose another directory"):
        service(llm, tmp_path / "c")
    assert not list((tmp_path / "c").glob("speed*"))


@pytest.mark.parametrize("seed", range(24))
def test_damage_anywhere_is_a_sentence_or_costs_computing(
    llm: LLM, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A byte changed, a file cut or gone: the text is whole, or it is said that it is not."""
    folder: Path = request.getfixturevalue("sealed" if seed % 2 else "folder")
    key: dict[str, Any] = {"encryption_key": KEY} if seed % 2 else {}
    with service(llm, shutil.copytree(folder, tmp_path / "sound"), **key) as opened:
        (context,) = opened.bind("a").contexts()
        text = context.tokens
        wanted = context.call("hi", max_tokens=6).tokens
    chance = random.Random(seed)
    path = chance.choice(sorted(folder.glob("apps/*/*")))
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if seed % 3 == 0:
        path.write_bytes(data[:at])
    else:
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    with service(llm, folder, **key) as opened:
        said = ""
        try:
            opened.bind("a")
        except UserError as error:
            said = str(error)
        if said:
            assert path.suffix == ".log"
            assert "restore it, or remove it to continue without this context" in said
            return
        (context,) = opened.bind("a").contexts()
        if context.tokens != text:  # a log that ends early is one that was never acknowledged
            assert path.suffix == ".log"
            assert text[: len(context.tokens)] == context.tokens
            return
        assert context.call("hi", max_tokens=6).tokens == wanted
