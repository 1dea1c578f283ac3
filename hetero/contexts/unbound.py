"""Files of applications that are not bound yet: their bytes count, and they can be removed.

An application's name is not on the disk, so its chunks are unknown before it is bound; their bytes,
and when they were written, are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hetero.contexts.budget import ByteBudget
from hetero.errors import DiskFullError


class UnboundFile(NamedTuple):
    """A file of chunks; `written` is in milliseconds since 1970, as a chunk's `used`."""

    written: int
    path: Path
    nbytes: int


class UnboundApps:
    """Files of apps that are not bound.

    Their bytes are taken from `budget`; files of chunks that it has no room for are removed, the
    oldest first, as are the remains of killed writers.

    Raises `UserError` where the texts alone do not fit. Used by the thread that has the lock and,
    for `oldest` and `remove`, by the writing thread; neither overlaps with `bind`, which is called
    when nothing is being written.
    """

    def __init__(self, apps: Path, budget: ByteBudget) -> None:
        self._budget = budget
        self._texts: dict[Path, int] = {}
        self._chunks: dict[Path, list[UnboundFile]] = {}
        for folder in sorted(path for path in apps.iterdir() if path.is_dir()):
            remove_partials(folder)
            self._count(folder)
        files = [_described(path) for folder in self._chunks for path in folder.glob("*.kv")]
        for file in sorted(files, reverse=True):
            self._add(file)

    def _count(self, folder: Path) -> None:
        texts = sum(path.stat().st_size for path in folder.glob("ctx-*.log"))
        if not self._budget.take(texts):
            raise DiskFullError(
                f"the texts of the contexts alone need more than the {self._budget.limit} bytes of "
                "context_disk: give it more"
            )
        self._texts[folder], self._chunks[folder] = texts, []

    def _add(self, file: UnboundFile) -> None:
        if self._budget.take(file.nbytes):
            self._chunks[file.path.parent].append(file)
        else:
            file.path.unlink(missing_ok=True)

    def unbind(self, folder: Path) -> None:
        """Count a folder's files here again: it could not be bound."""
        self._count(folder)
        for path in sorted(folder.glob("*.kv")):
            self._add(_described(path))

    def bind(self, folder: Path) -> None:
        """Stop counting a folder's files: the bound app counts them."""
        self._budget.give(self._texts.pop(folder, 0))
        self._budget.give(sum(file.nbytes for file in self._chunks.pop(folder, [])))

    def files(self) -> Iterator[UnboundFile]:
        """Yield files of chunks."""
        for files in list(self._chunks.values()):
            yield from list(files)

    def remove(self, file: UnboundFile) -> None:
        """Remove a file of chunks; the texts stay."""
        with suppress(OSError):
            file.path.unlink(missing_ok=True)
        files = self._chunks.get(file.path.parent, [])
        if file in files:
            files.remove(file)
            self._budget.give(file.nbytes)


def remove_partials(folder: Path) -> None:
    """Remove the remains of killed writers from an app's folder, which belongs to this process."""
    for path in folder.glob(".*.partial"):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _described(path: Path) -> UnboundFile:
    about = path.stat()
    return UnboundFile(about.st_mtime_ns // 1_000_000, path, about.st_size)
