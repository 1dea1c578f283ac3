"""The document of `hetero cache --json`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KeptEntry(_Record):
    """A thing that can go alone.

    of         what it was made of, empty where that is not known
    used_at_s  when it was last used, in seconds since 1970
    stale      why nothing here would take it again, empty where something may
    held       a running process has it
    """

    name: str
    path: str
    of: str
    nbytes: int
    used_at_s: float
    stale: str
    held: bool


class KeptKind(_Record):
    """All of a kind; `stale` of the `entries` have `stale_nbytes` of the `nbytes`, `held` are in
    use. `again` says what it takes to have them again; `listed` are those of a kind that was named.
    """

    kind: str
    what: str
    again: str
    path: str
    entries: int
    nbytes: int
    stale: int
    stale_nbytes: int
    held: int
    used_at_s: float | None
    listed: tuple[KeptEntry, ...] | None = None


class ClearedKind(_Record):
    """What went of a kind (or would have: `dry_run`), and what stayed because a process has it."""

    kind: str
    entries: int
    nbytes: int
    held: int


class Kept(_Record):
    """What hetero keeps on this machine: after `hetero cache clear` what is left, and `cleared`."""

    schema_version: Literal[1] = 1
    kinds: tuple[KeptKind, ...]
    nbytes: int
    cleared: tuple[ClearedKind, ...] | None = None
    freed_nbytes: int = 0
    dry_run: bool = False
