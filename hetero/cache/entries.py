"""What lies in hetero's folders: an entry for each thing that can go alone, and how it goes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from hetero.backends.host.files import is_in_use, remove_unused

KILLED: Final = "left by a process that was killed"
WRITING_S: Final = 3600.0  # what nobody locks while it is written is left after this long
_PARTIAL: Final = re.compile(r"\..+\.[0-9a-f]{8}\.(partial|previous)")
_WRITING: Final = ".writing-"


@dataclass(frozen=True)
class Entry:
    """`paths` go together; `of` is what it was made of, where that is known. `stale` says why
    nothing here would take it again; `held`: a running process has it. Who has `lock` has the
    entry.
    """

    name: str
    paths: tuple[Path, ...]
    nbytes: int
    used_s: float
    of: str = ""
    stale: str = ""
    held: bool = False
    lock: Path | None = None


@dataclass(frozen=True)
class Kind:
    """Things of one kind, and the folder that they lie in (or the one file that it is).

    what     is kept, for people
    again    what it takes to have it again
    guarded  it took so long, or cannot be had again, that people are asked before it goes
    named    nothing but its own name clears it
    """

    name: str
    what: str
    again: str
    folder: Callable[[], Path]
    scan: Callable[[Path], Iterator[Entry]]
    guarded: bool = False
    named: bool = False


def entry_of(
    path: Path,
    *beside: Path,
    of: str = "",
    stale: str = "",
    held: bool = False,
    lock: Path | None = None,
) -> Entry:
    """An entry of a file or folder and what goes with it, used when the first was written. What is
    held is not stale.
    """
    held = held or (lock is not None and is_locked(lock))
    stale = "" if held else stale
    paths = (path, *(other for other in beside if other.exists()))
    return Entry(path.name, paths, sum(map(size_of, paths)), used_at(path), of, stale, held, lock)


def listed(folder: Path) -> list[Path]:
    """What is in a folder, by name; empty where it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def leftovers(paths: list[Path]) -> tuple[list[Path], list[Entry]]:
    """What was written whole, and entries of what writers have not finished."""
    whole, others = [], []
    for path in paths:
        if _PARTIAL.fullmatch(path.name):
            held = is_in_use(path)
            others.append(entry_of(path, held=held, stale="" if held else KILLED))
        elif path.name.startswith(_WRITING):
            held = time.time() - used_at(path) < WRITING_S
            others.append(entry_of(path, held=held, stale="" if held else KILLED))
        else:
            whole.append(path)
    return whole, others


def size_of(path: Path) -> int:
    """Bytes of a file, or of all in a folder; links count as themselves."""
    try:
        state = path.lstat()
        if not stat.S_ISDIR(state.st_mode):
            return state.st_size
        with os.scandir(path) as inside:
            return sum(size_of(Path(x.path)) for x in inside)
    except OSError:  # it is gone by now
        return 0


def used_at(path: Path) -> float:
    """When it was last written or touched, in seconds since 1970."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def is_locked(lock: Path) -> bool:
    """Whether a process has a `FileLock`."""
    if not lock.is_file():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # nobody's, or not ours to judge
        return False


def removed(entry: Entry) -> bool:
    """Remove an entry unless a process has it; whether it is gone. Raises `OSError`."""
    if entry.lock is None:
        return all(_gone(path) for path in entry.paths)  # the first one is what is held
    new = not entry.lock.exists()
    lock = FileLock(entry.lock, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return False
    inside = [path for path in entry.paths if path != entry.lock]
    try:
        for path in inside:
            if path.is_dir() and not path.is_symlink():
                _empty(path, but=entry.lock)
            else:
                path.unlink(missing_ok=True)
    finally:
        lock.release()
    if new or entry.lock in entry.paths:
        entry.lock.unlink(missing_ok=True)
    for path in inside:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    return True


def _gone(path: Path) -> bool:
    try:
        return remove_unused(path)
    except FileNotFoundError:  # somebody else was faster
        return True


def _empty(folder: Path, *, but: Path) -> None:
    for path in listed(folder):
        if path == but:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
