"""Profiles as files: JSON that a person can read, replaced atomically, refused by name if foreign.

This module knows dictionaries and paths only; the records are in `hetero.profiler.records`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_text
from hetero.backends.host.folders import cache_folder, data_folder
from hetero.backends.host.processor import cpu_flags
from hetero.backends.opencl.drivers.levels import chosen_level, processor_levels
from hetero.profiler.errors import ProfileError

Document: TypeAlias = dict[str, Any]

# From an old schema version to the next one; applied one after the other.
MIGRATIONS: dict[int, Callable[[Document], Document]] = {}

INLINE_BELOW = 120  # characters: shorter lists and objects stay on one line


def read_document(path: str | Path, current_version: int) -> Document:
    """Return the JSON object of a profile file, migrated.

    Raises `ProfileError` for anything else.
    """
    return parse_document(read_profile(path), path, current_version)


def read_profile(path: str | Path) -> str:
    """Return the text of a profile file. Raises `ProfileError`."""
    try:
        return read_text(path, LONGEST_DOCUMENT_BYTES)
    except OSError as error:
        raise ProfileError(
            f"profile {path} cannot be read ({error.strerror}): take one with `hetero profile`"
        ) from error
    except UnicodeDecodeError as error:
        raise _not_json(path, error) from error


def parse_document(text: str, path: str | Path, current_version: int) -> Document:
    """Do the same as `read_document` for the text that was read from `path`."""
    try:
        document = json.loads(text)
        if "\\u" in text:  # half of a pair is no text, and would only fail where it is written
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except (RecursionError, ValueError) as error:
        raise _not_json(path, error) from error
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ProfileError(
            f"{path} is not a profile (no schema_version): pass a file written by `hetero profile`"
        )
    return migrate(document, current_version, str(path))


def _not_json(path: str | Path, error: Exception) -> ProfileError:
    return ProfileError(
        f"profile {path} is not JSON ({error}): take it again with `hetero profile`"
    )


def migrate(document: Document, current_version: int, name: str) -> Document:
    """Bring an old document to the current version. Raises `ProfileError` where it cannot."""
    version = document["schema_version"]
    while version != current_version and isinstance(version, int) and version in MIGRATIONS:
        document = MIGRATIONS[version](document)
        version = document["schema_version"]
    if version != current_version or isinstance(version, bool):
        newer = isinstance(version, int) and version > current_version
        remedy = "update hetero" if newer else "take it again with `hetero profile`"
        raise ProfileError(
            f"profile {name} has schema version {version!r}, this hetero reads {current_version}: "
            f"{remedy}"
        )
    return document


def to_text(document: Document) -> str:
    """Return indented JSON with one row of a table to a line."""
    return _format(document, "") + "\n"


def _format(value: Any, indent: str) -> str:
    inline = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or len(inline) + len(indent) < INLINE_BELOW or not value:
        return inline
    deeper = indent + "  "
    if isinstance(value, dict):
        # A row of a table is a flat object; it stays on one line whatever its length.
        if indent and not any(isinstance(item, dict | list) and item for item in value.values()):
            return inline
        parts = [f"{json.dumps(key)}: {_format(item, deeper)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        if not any(isinstance(item, dict | list) for item in value):
            return inline
        parts = [_row(item, deeper) for item in value]
        opening, closing = "[", "]"
    body = f",\n{deeper}".join(parts)
    return f"{opening}\n{deeper}{body}\n{indent}{closing}"


def _row(item: Any, indent: str) -> str:
    """Return an item of a list: measured rows (an object without lists of objects) on one line."""
    if isinstance(item, dict) and not any(_is_large(part) for part in item.values()):
        return json.dumps(item, allow_nan=False)
    return _format(item, indent)


def _is_large(value: Any) -> bool:
    return isinstance(value, dict | list) and len(json.dumps(value)) > INLINE_BELOW


def write_atomically(path: str | Path, text: str) -> None:
    """Replace a file by its new contents; a kill leaves the old or the new, never half."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except OSError as error:
        raise ProfileError(
            f"cannot write {path} ({error.strerror}): choose another --out"
        ) from error


def refuse_folder(path: str | Path) -> None:
    """Raise `ProfileError` before anything is measured for a file that is a folder."""
    if Path(path).is_dir():
        raise ProfileError(f"cannot write {path} (Is a directory): choose another --out")


def own_profile_path() -> Path:
    """Return where `hetero profile` puts this machine's profile by default.

    Among the user's data, because ten minutes of measuring are no cache.
    """
    return data_folder() / "profiles" / "host.json"


def cached_profile_path() -> Path:
    """Return where earlier versions put it.

    It is still read there, and records of first starts are stored next to it.
    """
    return cache_folder() / "profiles" / "host.json"


def taken_profile_path() -> Path:
    """Return where this machine's profile is, if there is one."""
    own, cached = own_profile_path(), cached_profile_path()
    return cached if os.path.exists(cached) and not os.path.exists(own) else own


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    folder = resources.files("hetero.profiler") / "profiles"
    if not folder.is_dir():
        return ()
    names = [entry.name for entry in folder.iterdir()]
    return tuple(sorted(name[:-5] for name in names if name.endswith(".json")))


def shipped_host() -> str | None:
    """Return the name of the shipped profile of a PC whose processor computes like this one's.

    None if there is none: 8-bit dot products (AVX-512 VNNI) make the OpenCL kernels 1.5 to 2.5
    times as fast, tiles of them (AMX) ONNX Runtime's w8a8 some 8 times as fast as its w4a8.
    """
    names = shipped_names()
    best = chosen_level() or processor_levels()[0]
    wanted: tuple[str, ...] = ("host-avx2", "host")
    if best.name == "avx512-vnni":
        wanted = ("host-amx", "host") if "amx_int8" in cpu_flags() else ("host",)
    return next((name for name in wanted if name in names), None)


def shipped_path(name: str) -> Path:
    """Return the file of a shipped profile."""
    return Path(str(resources.files("hetero.profiler") / "profiles" / f"{name}.json"))
