"""The journal next to a profile: a JSON line for everything that is finished.

Each line has the checksum of the rest of it (`crc32`), so that a damaged one is noticed, and is one
of the kinds below; the first damaged line ends what a run continues from.

"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter

from hetero.backends.host.closing import Closing
from hetero.backends.host.files import LONGEST_TEXT_BYTES, atomic_write, is_replaceable, read_file
from hetero.backends.protocol import DeviceKind
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import (
    MatMulRow,
    Phase,
    Positive,
    Quarantine,
    Record,
    ReferencePoint,
    Seconds,
)

Entry: TypeAlias = dict[str, Any]

VERSION = 2


class _Header(Record):
    model_config = ConfigDict(extra="allow")
    kind: Literal["header"]


class _Base(Record):
    kind: Literal["base"]
    device: DeviceKind
    phase: Phase
    seconds: Positive


class _Reference(Record):
    kind: Literal["reference"]
    point: ReferencePoint


class _Row(Record):
    kind: Literal["row"]
    row: MatMulRow


class _Quarantined(Record):
    kind: Literal["quarantine"]
    entry: Quarantine


class _Spent(Record):
    kind: Literal["spent"]
    spent_s: Seconds


class _Part(Record):
    kind: Literal["part"]
    name: str
    values: tuple[dict[str, Any], ...]


_KINDS: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _Header | _Base | _Reference | _Row | _Quarantined | _Spent | _Part,
        Field(discriminator="kind"),
    ]
)


def journal_path(out: Path) -> Path | None:
    """Return the journal of the profile `out`.

    A device or a pipe has none. Raises `ProfileError` for a path that cannot be written.
    """
    try:
        if not is_replaceable(out):
            return None
    except OSError as error:
        raise _cannot_write(out, error) from error
    return out.with_name(out.name + ".journal.jsonl")


class Journal(Closing):
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
            self._file.write(to_line(entry))
            self._file.flush()
            os.fsync(self._file.fileno())

    def of_kind(self, kind: str) -> list[Entry]:
        """Return the entries of an earlier run."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def close(self, *, delete: bool = False) -> None:
        """Stop writing; `delete` once the profile is complete."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if delete and self.path is not None:
                self.path.unlink(missing_ok=True)


def read_entries(path: Path) -> list[Entry]:
    """Return the whole lines of a journal.

    Everything after the first torn or foreign line is dropped.
    """
    entries: list[Entry] = []
    try:
        data = read_file(path, LONGEST_TEXT_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ProfileError(f"journal {path} cannot be read ({error.strerror})") from error
    for line in data.splitlines(keepends=True):
        entry = _entry(line)
        if entry is None or (entry["kind"] == "header") == bool(entries):
            break
        entries.append(entry)
    return entries


def to_line(entry: Entry) -> str:
    """Return a line of a journal."""
    crc32 = zlib.crc32(json.dumps(entry, allow_nan=False).encode())
    return json.dumps({"crc32": crc32, **entry}) + "\n"


def _entry(line: bytes) -> Entry | None:
    """Return the entry of a whole, undamaged line of a known kind."""
    try:
        entry = json.loads(line.decode("utf-8"))
        if not line.endswith(b"\n") or not isinstance(entry, dict):
            return None
        checksum = entry.pop("crc32", None)
        if checksum != zlib.crc32(json.dumps(entry, allow_nan=False).encode()):
            return None
        json.dumps(entry, ensure_ascii=False).encode("utf-8")  # half of a pair is no text
        _KINDS.validate_python(entry)
    except (ValueError, RecursionError):
        return None
    return entry


def _cannot_write(path: Path, error: OSError) -> ProfileError:
    return ProfileError(f"cannot write {path} ({error.strerror}): choose another --out")


def _continue(path: Path, header: Entry) -> list[Entry]:
    """Return the entries to continue from, after cutting a torn tail.

    Raises `ProfileError` if they are not of the same devices and settings.
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
        atomic_write(path, "".join(map(to_line, entries)))
    except OSError as error:
        raise _cannot_write(path, error) from error
    return entries
