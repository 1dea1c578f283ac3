"""A folder of this process: links to a driver, and the kernel cache that the driver itself reads.

Nothing in it outlives the process: it is removed at exit, or by the next process that starts after
this one was killed, which sees that its lock is free. What a killed process had opened is then
tried again before it is used (`used`): it may have died of it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from filelock import BaseFileLock, FileLock, Timeout

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.host.files import try_room

RUNS: Final = "runs"
USED: Final = "used"  # file in the folder: results that the process relies on, a line each
PREFIX: Final = "hetero-opencl-"


class RunFolder:
    """`path` exists and is locked as long as this process lives.

    `suspects` are files that processes relied on which ended without removing their folders.
    """

    def __init__(self, root: Path) -> None:
        self.pid = os.getpid()
        self.suspects: list[Path] = []
        problem = None
        # One that has room and links, else one that can be made: a GPU's driver needs neither.
        for demanding, elsewhere in itertools.product((True, False), (False, True)):
            try:  # a full disk has no folder for temporary files either
                parent = Path(tempfile.gettempdir()) if elsewhere else root / RUNS
                self.path = self._make(parent, demanding=demanding)
            except (OSError, Timeout) as error:
                problem = problem or error
                continue
            atexit.register(self.remove)
            return
        raise DeviceUnavailableError(
            "opencl",
            f"making a folder for kernels in {root / RUNS} and for temporary files",
            str(problem),
            "make room, or name a writable folder in TMPDIR",
        )

    def _make(self, parent: Path, *, demanding: bool) -> Path:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.suspects += sweep(parent)
        path = parent / f"{PREFIX}{self.pid}-{time.monotonic_ns():x}"
        self._lock = path.with_suffix(".lock")
        # Locked under another name first: a lock that a sweep sees is locked.
        born = path.with_suffix(".born") if os.name == "posix" else self._lock
        self._locks = FileLock(born)
        self._locks.acquire(timeout=0)
        born.replace(self._lock)
        path.mkdir(mode=0o700)
        if demanding:
            try:
                _try_out(path)
            except OSError:
                _remove(path, self._lock, self._locks)
                raise
        return path

    def use(self, path: Path) -> None:
        """Record that this process relies on a file from here on."""
        with contextlib.suppress(OSError), (self.path / USED).open("a", encoding="utf-8") as file:
            file.write(f"{path}\n")

    def remove(self) -> None:
        """Delete everything; not in a fork of the process that made it."""
        if os.getpid() == self.pid:
            _remove(self.path, self._lock, self._locks)


def _try_out(folder: Path) -> None:
    """Raise `OSError` unless a folder has room for kernels and, on Linux, takes links.

    The folder of a wheel's PoCL is made of links: file systems of Windows (vfat, exFAT) have none.
    """
    try_room(folder)
    if sys.platform.startswith("linux"):
        link = folder / "link"
        link.symlink_to(folder)
        link.unlink()


_folders: dict[Path, RunFolder] = {}  # by root, of this process


def run_folder(root: Path) -> RunFolder:
    """Return this process's folder; a process that was forked from another has one of its own."""
    known = _folders.get(root)
    if known is None or known.pid != os.getpid() or not known.path.exists():
        known = _folders[root] = RunFolder(root)
    return known


def sweep(parent: Path) -> list[Path]:
    """Remove folders of processes that ended; return the files that they relied on."""
    suspects: list[Path] = []
    for lock_path in parent.glob(f"{PREFIX}*.lock"):
        lock = FileLock(lock_path)
        try:
            if not _is_own(lock_path):  # another user's, in a folder for temporary files
                continue
            lock.acquire(timeout=0)
        except (OSError, Timeout):
            continue
        folder = lock_path.with_suffix("")
        with contextlib.suppress(OSError, ValueError):
            lines = (folder / USED).read_text(encoding="utf-8").splitlines()
            suspects += [Path(line) for line in lines if line]
        _remove(folder, lock_path, lock)
    return suspects


def _is_own(path: Path) -> bool:
    """Return whether it is a file of this user, and no link. Raises `OSError`."""
    state = path.lstat()
    mine = not hasattr(os, "getuid") or state.st_uid == os.getuid()
    return mine and stat.S_ISREG(state.st_mode)


def _remove(path: Path, lock_path: Path, lock: BaseFileLock) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        lock_path.unlink()
    with contextlib.suppress(OSError):
        lock.release()
