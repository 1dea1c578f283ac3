"""The journal beside a profile: a JSON line for everything that is finished."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from hetero.backends.files import LONGEST_TEXT_BYTES, atomic_write, is_replaceable, read_file
from hetero.profiler.errors import ProfileError

Entry: TypeAlias = dict[str, Any]

VERSION = 1


def journal_path(out: Path) -> Path | None:
    """Journal of the profile `out`; a device or a pipe has none. Raises `ProfileError` for a path
    that cannot be written.
    """
    try:
        if not is_replaceable(out):
            return None
    except OSError as error:
        raise _cannot_write(out, error) from error
    return out.with_name(out.name + ".journal.jsonl")


class Journal:
    """Append-only. `entries` holds what an earlier run of the same devices and settings wrote."""

    def __init__(self, path: Path | None, header: Entry, *, resume: bool) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self._file = None
        if path is None:
            return
        header = {"kind": "header", "version": VERSION, **header}
        if resume:
            self.entries = _continue(path, header)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self.entries:
                path.unlink(missing_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(path, error) from error
        if not self.entries:
            self.add(header)

    def add(self, entry: Entry) -> None:
        """Write one line through to the disk."""
        if self._file is not None:
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def of_kind(self, kind: str) -> list[Entry]:
        """Entries of an earlier run."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def close(self, *, delete: bool = False) -> None:
        """Stop writing; `delete` once the profile is complete."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if delete and self.path is not None:
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_entries(path: Path) -> list[Entry]:
    """Whole lines of a journal; everything after the first torn or foreign line is dropped."""
    entries: list[Entry] = []
    try:
        data = read_file(path, LONGEST_TEXT_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ProfileError(f"journal {path} cannot be read ({error.strerror})") from error
    for line in data.splitlines(keepends=True):
        try:
            entry = json.loads(line.decode("utf-8"))
        except (UnicodeDecodeError, ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(entry, dict) or "kind" not in entry:
            break
        entries.append(entry)
    return entries


def _cannot_write(path: Path, error: OSError) -> ProfileError:
    return ProfileError(f"cannot write {path} ({error.strerror}): choose another --out")


def _continue(path: Path, header: Entry) -> list[Entry]:
    """Entries to go on from, after cutting a torn tail. Raises `ProfileError` if they are not of
    the same devices and settings.
    """
    entries = read_entries(path)
    if not entries:
        return []
    if entries[0] != json.loads(json.dumps(header)):
        changed = [key for key in header if entries[0].get(key) != header[key]]
        raise ProfileError(
            f"journal {path} was begun with another {', '.join(changed) or 'version'}: run again "
            "with the same options, or without --resume to start over"
        )
    try:
        atomic_write(path, "".join(json.dumps(e) + "\n" for e in entries))
    except OSError as error:
        raise _cannot_write(path, error) from error
    return entries
