"""Compiled kernels on disk: checksummed entries that are written whole and verified when read.

An entry is one file: a magic line, the SHA-256 of what follows, a JSON list of [path, bytes], the
contents. It is written next to its place and renamed, so that a killed writer leaves nothing that
is read, and whatever a disk or another program did to it afterwards shows in the checksum: such an
entry is removed and its kernels are compiled again. Nothing in here is ever mapped or loaded in
place; `unpack` copies into a folder of this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

MAGIC: Final = b"hetero-kernels-1\n"
SUFFIX: Final = ".kernels"
MAX_STORES: Final = 32  # of a machine: a driver's have about 10 MB for each level
_HASH: Final = 32


class KernelStore:
    """Entries by name in one or more folders: all are read, the first that takes it is written.

    Any number of processes may use the folders at once.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders

    def put(self, name: str, files: Mapping[str, bytes]) -> None:
        """Keep files under relative paths; a folder that cannot be written is passed over."""
        content = encode(files)
        for folder in self.folders:
            with contextlib.suppress(OSError):
                write_whole(folder / (name + SUFFIX), content)
                return

    def get(self, name: str) -> dict[str, bytes] | None:
        """Return the files of an entry, None where there is none; a damaged one is removed."""
        for folder in self.folders:
            path = folder / (name + SUFFIX)
            try:
                content = path.read_bytes()
            except OSError:
                continue
            files = decode(content)
            if files is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)  # when it was last used
                return files
            with contextlib.suppress(OSError):
                path.unlink()
        return None

    def unpack(self, name: str, folder: Path) -> bool:
        """Copy an entry's files into `folder`; whether it was there. Raises `OSError`."""
        files = self.get(name)
        for relative, content in (files or {}).items():
            path = folder / relative
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return files is not None

    def use(self) -> None:
        """Mark it as one of the stores that were used last (`keep_newest`)."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                os.utime(folder)
                return

    def is_used(self) -> bool:
        """Return whether anything was kept."""
        return any(os.listdir(folder) for folder in self.folders if os.access(folder, os.R_OK))

    def clear(self) -> None:
        """Forget every entry."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                for path in folder.glob(f"*{SUFFIX}"):
                    path.unlink(missing_ok=True)


def keep_newest(root: Path, most: int = MAX_STORES) -> None:
    """Remove stores of a folder except the ones that were used last.

    Another version's kernels, or another driver's, have one of their own. Who still uses one that
    went compiles again.
    """
    with contextlib.suppress(OSError):
        stores = sorted(root.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for old in stores[:-most]:
            shutil.rmtree(old, ignore_errors=True)


def encode(files: Mapping[str, bytes]) -> bytes:
    """Return the bytes of an entry."""
    index = json.dumps([[name, len(content)] for name, content in files.items()]).encode() + b"\n"
    body = b"".join([index, *files.values()])
    return MAGIC + hashlib.sha256(body).digest() + body


def decode(content: bytes) -> dict[str, bytes] | None:
    """Return the files of an entry.

    None if any byte of it is wrong or a path leads out of the folder.
    """
    head, body = content[: len(MAGIC) + _HASH], content[len(MAGIC) + _HASH :]
    if head != MAGIC + hashlib.sha256(body).digest():
        return None
    index, _, rest = body.partition(b"\n")
    files, at = {}, 0
    try:
        listed: Sequence[tuple[str, int]] = json.loads(index)
        for name, nbytes in listed:
            if not _inside(name) or not 0 <= nbytes <= len(rest) - at:
                return None
            files[name] = rest[at : at + nbytes]
            at += nbytes
    except (ValueError, TypeError, RecursionError):
        return None
    return files if at == len(rest) else None


def _inside(name: object) -> bool:
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def write_whole(path: Path, content: bytes) -> None:
    """Write next to `path` and rename. Raises `OSError` and leaves no partial file.

    Not synced: a file that a power cut leaves half-written has a wrong checksum.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
