"""What hetero keeps on a machine: kernels, packed files, graphs, choices, profiles, contexts.

    from hetero import cache

    for kind in cache.kept().kinds:
        print(kind.kind, kind.nbytes)
    cache.clear(["packed"], older_than_s=30 * 86400)

The command is `hetero cache`. Everything but profiles, contexts and history is made again where it
is missing.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping

from hetero.cache.entries import Entry, Kind, removed
from hetero.cache.kinds import KINDS
from hetero.cache.records import ClearedKind, Kept, KeptEntry, KeptKind
from hetero.errors import UserError


def kept(listed: Iterable[str] = ()) -> Kept:
    """What there is, with the entries of the kinds that are `listed`."""
    named = [kind.name for kind in kinds_of(listed)]
    return _document({name: entries_of(name) for name in KINDS}, named)


def kinds_of(names: Iterable[str]) -> list[Kind]:
    """Kinds by their names. Raises `UserError`."""
    found = []
    for name in names:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{name!r} is not a kind: {hint}there are {', '.join(KINDS)}")
        found.append(KINDS[name])
    return found


def entries_of(kind: str) -> list[Entry]:
    """What there is of a kind, what was used last first."""
    found = KINDS[kind].scan(KINDS[kind].folder())
    return sorted(found, key=lambda entry: -entry.used_s)


def chosen(
    kinds: Iterable[str] = (),
    *,
    everything: bool = False,
    stale: bool = False,
    older_than_s: float | None = None,
) -> dict[str, list[Entry]]:
    """What `clear` would remove, by kind: of the kinds that are named, or of `everything` but
    those that go by name alone. Raises `UserError` where nothing is said.
    """
    named = [kind.name for kind in kinds_of(kinds)]
    if not named and not everything and not stale:
        raise UserError(
            f"say what to clear: kinds ({', '.join(KINDS)}), --stale for what is of no more use, "
            "or --all"
        )
    if everything or not named:
        named += [x.name for x in KINDS.values() if not x.named and x.name not in named]
    before_s = None if older_than_s is None else time.time() - older_than_s
    return {
        name: [
            entry
            for entry in entries_of(name)
            if (entry.stale or not stale) and (before_s is None or entry.used_s < before_s)
        ]
        for name in named
    }


def clear(
    kinds: Iterable[str] = (),
    *,
    everything: bool = False,
    stale: bool = False,
    older_than_s: float | None = None,
) -> Kept:
    """Remove what is `chosen`, but nothing that a running process has. Raises `UserError`,
    `OSError`.
    """
    found = chosen(kinds, everything=everything, stale=stale, older_than_s=older_than_s)
    return remove(found)


def remove(found: Mapping[str, list[Entry]], *, dry_run: bool = False) -> Kept:
    """Remove these entries; what is left, and what went. Raises `OSError`."""
    cleared = []
    for kind, entries in found.items():
        gone: Callable[[Entry], bool] = _would_go if dry_run else removed
        went = [entry for entry in entries if gone(entry)]
        freed = sum(entry.nbytes for entry in went)
        held = len(entries) - len(went)
        if entries:
            record = ClearedKind(kind=kind, entries=len(went), nbytes=freed, held=held)
            cleared.append(record)
    left = _document({name: entries_of(name) for name in KINDS}, ())
    freed = sum(kind.nbytes for kind in cleared)
    return left.model_copy(
        update={"cleared": tuple(cleared), "freed_nbytes": freed, "dry_run": dry_run}
    )


def _would_go(entry: Entry) -> bool:
    return not entry.held


def _document(found: Mapping[str, list[Entry]], listed: Iterable[str]) -> Kept:
    kinds = tuple(_kind(name, entries, name in listed) for name, entries in found.items())
    return Kept(kinds=kinds, nbytes=sum(kind.nbytes for kind in kinds))


def _kind(name: str, entries: list[Entry], listed: bool) -> KeptKind:
    kind, old = KINDS[name], [entry for entry in entries if entry.stale]
    return KeptKind(
        kind=name,
        what=kind.what,
        again=kind.again,
        path=str(kind.folder()),
        entries=len(entries),
        nbytes=sum(entry.nbytes for entry in entries),
        stale=len(old),
        stale_nbytes=sum(entry.nbytes for entry in old),
        held=sum(entry.held for entry in entries),
        used_at_s=max((entry.used_s for entry in entries), default=None),
        listed=tuple(map(_entry, entries)) if listed else None,
    )


def _entry(entry: Entry) -> KeptEntry:
    return KeptEntry(
        name=entry.name,
        path=str(entry.paths[0]),
        of=entry.of,
        nbytes=entry.nbytes,
        used_at_s=entry.used_s,
        stale=entry.stale,
        held=entry.held,
    )


__all__ = ["Entry", "Kept", "chosen", "clear", "entries_of", "kept", "kinds_of", "remove"]
