"""Folders of a user without a home, and whose cache is full."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.backends.errors import UserError
from hetero.backends.host import files, folders

posix = pytest.mark.skipif(os.name != "posix", reason="users as POSIX has them")


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user id without an entry and without HOME; yields where temporary files go."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders._temporary_folder.cache_clear()
    yield tmp_path
    folders._temporary_folder.cache_clear()


@posix
def test_a_user_without_a_home_has_a_private_temporary_folder(homeless: Path) -> None:
    own = homeless / f"hetero-{os.getuid()}"
    assert folders.cache_folder() == own / "cache"
    assert folders.data_folder() == own / "data"
    assert folders.data_is_temporary()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@posix
@pytest.mark.parametrize("planted", ["open to all", "a link", "a file", "another user's"])
def test_a_folder_that_another_user_may_have_made_is_not_taken(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    user = os.getuid()
    if planted == "another user's":
        monkeypatch.setattr("os.getuid", lambda: user + 1)
        user += 1
    own = homeless / f"hetero-{user}"
    if planted == "a link":
        own.symlink_to(homeless)
    elif planted == "a file":
        own.touch()
        with pytest.raises(UserError, match="XDG_CACHE_HOME"):
            folders.cache_folder()
        return
    else:
        own.mkdir()
        own.chmod(0o777 if planted == "open to all" else 0o700)
    taken = folders.cache_folder().parent
    assert taken != own
    assert taken.parent == homeless
    assert folders.cache_folder().parent == taken


@posix
def test_without_any_folder_it_is_one_sentence(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(homeless / "none"))
    with pytest.raises(UserError, match=r"no home folder.*a writable folder in XDG_CACHE"):
        folders.cache_folder()


@posix
@pytest.mark.usefixtures("homeless")
def test_variables_still_name_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    assert (folders.cache_folder(), folders.data_folder()) == (Path("/c/hetero"), Path("/d/hetero"))
    assert not folders.data_is_temporary()


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "~nobody-of-this-name", "a/~b", "/x"])
def test_a_home_that_is_not_there_stays_as_it_is_typed(path: str) -> None:
    assert folders.expand_user(path) == Path(path)


def test_a_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert folders.expand_user("~/x") == tmp_path / "x"


@posix
def test_room_is_tried_out(tmp_path: Path) -> None:
    """Against a real limit of sizes, which native compilers run into without a word."""
    assert files.has_room(tmp_path)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10240, resource.RLIM_INFINITY))\n"
        "from hetero.backends.host import files\n"
        "try: files.try_room(Path(sys.argv[1]))\n"
        "except OSError as error: print(error.errno, files.has_room(Path(sys.argv[1])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG), "False"]
    assert not list(tmp_path.iterdir())
    assert not files.has_room(tmp_path / "none")


@pytest.mark.parametrize("holds", [True, False])
def test_a_folder_in_use_cannot_be_replaced_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    target, fresh = tmp_path / "model", tmp_path / "fresh"
    for folder in (target, fresh):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    rename = Path.rename

    def refused(path: Path, to: Path) -> Path:
        if path == target:
            raise PermissionError(errno.EACCES, "Access is denied", str(path))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    monkeypatch.setattr(files, "OPEN_FILES_HOLD_FOLDERS", holds)
    with pytest.raises(PermissionError) as raised:
        files.replace_directory(fresh, target)
    said = "a program has a file in it open: close the models that use it"
    assert raised.value.strerror == (said if holds else "Access is denied")
    assert (target / "name").read_text() == "model"


@pytest.mark.parametrize("text", ["", "a", "ä\r\nb", "\ufeffagain"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert files.read_text(path, 100) == text.replace("\r\n", "\n")
    assert files.read_document(path) == text.encode()
