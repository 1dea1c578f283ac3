"""What `hetero cache` shows, asks and says."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import typer
from rich.console import Console

from hetero.cache.entries import Entry
from hetero.cache.kinds import KINDS
from hetero.cache.records import ClearedKind, Kept, KeptEntry, KeptKind
from hetero.cli.tables import fits, show_or_print
from hetero.errors import UserError
from hetero.profiler.tables import TableData
from hetero.solver.report import units

UNITS: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


LONGEST_S: Final = 100 * 366 * UNITS["d"]


def parse_age(text: str) -> float:
    """Seconds of `90m`, `12h`, `30d` or `4w`. Raises `UserError`."""
    try:
        seconds = float(text[:-1]) * UNITS[text[-1:].lower()]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise UserError(f"--older-than is a time such as 90m, 12h, 30d or 4w, got {text!r}")
    return seconds


def refuse_options(kinds: list[str], given: dict[str, object]) -> None:
    """Options of `clear` without it."""
    for name, value in given.items():
        if value:
            line = " ".join(["hetero cache clear", *kinds, name])
            raise UserError(f"{name} is for clearing: `{line}`")


def ask(found: dict[str, list[Entry]]) -> None:
    """Whether what took long may go. Raises `UserError` where nobody can be asked."""
    for name, entries in found.items():
        going = [entry for entry in entries if not entry.held and not entry.stale]
        if not going or not KINDS[name].guarded:
            continue
        size = units.size(sum(entry.nbytes for entry in going))
        what = f"{KINDS[name].what} ({_count(len(going))}, {size}; again: {KINDS[name].again})"
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError(f"nobody can be asked whether to remove {what}: add --yes")
        if not typer.confirm(f"Remove {what}?", err=True):
            entries[:] = [entry for entry in entries if entry not in going]


def show_kept(document: Kept) -> None:
    """All kinds, or the entries of those that were named."""
    named = [kind for kind in document.kinds if kind.listed is not None]
    if named:
        for kind in named:
            show_or_print(_entries(kind), [f"{kind.kind}: {kind.what}, in {short(kind.path)}"])
        return
    there = [kind for kind in document.kinds if kind.entries]
    if not there:
        print("hetero keeps nothing on this machine")
        return
    head = ("kind", "what", "entries", "size", "used", "path")
    rows = tuple(
        (kind.kind, kind.what, str(kind.entries), units.size(kind.nbytes), ago(kind.used_at_s),
         short(kind.path))
        for kind in there
    )  # fmt: skip
    table = TableData("", head, rows, numbers=("entries", "size", "used"))
    places, console = [], Console()
    narrow = table._replace(head=head[:-1], rows=tuple(row[:-1] for row in rows))
    if console.is_terminal and not fits(table, console) and fits(narrow, console):
        table = narrow
        folders = dict.fromkeys(short(str(Path(kind.path).parent)) for kind in there)
        places = [f"in {', '.join(folders)}"]
    show_or_print(table, after=[*places, *_remarks(document)])


def _remarks(document: Kept) -> list[str]:
    """What the numbers come to."""
    old = [kind for kind in document.kinds if kind.stale]
    lines = [f"{units.size(document.nbytes)} in all"]
    if old:
        size = units.size(sum(kind.stale_nbytes for kind in old))
        parts = ", ".join(f"{kind.kind} {kind.stale}" for kind in old)
        lines.append(f"{size} of no more use ({parts}): hetero cache clear --stale")
    if busy := [f"{kind.kind} {kind.held}" for kind in document.kinds if kind.held]:
        lines.append(f"in use: {', '.join(busy)}")
    return lines


def _entries(kind: KeptKind) -> TableData:
    head = ("name", "of", "size", "used", "state")
    rows = tuple(
        (entry.name, entry.of, units.size(entry.nbytes), ago(entry.used_at_s), _state(entry))
        for entry in kind.listed or ()
    )
    return TableData("", head, rows, numbers=("size", "used"))


def _state(entry: KeptEntry) -> str:
    return "in use" if entry.held else entry.stale


def tell_cleared(document: Kept) -> None:
    """What went, and what stayed."""
    cleared = [kind for kind in document.cleared or () if kind.entries]
    verb = "would free" if document.dry_run else "freed"
    if not cleared:
        print("nothing to clear")
    else:
        parts = ", ".join(_went(kind) for kind in cleared)
        print(f"{verb} {units.size(document.freed_nbytes)}: {parts}")
    for kind in document.cleared or ():
        if kind.held:
            print(f"{kind.kind}: {_count(kind.held)} in use by a running process, left")


def _went(kind: ClearedKind) -> str:
    return f"{kind.kind} {kind.entries} ({units.size(kind.nbytes)})"


def _count(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def ago(at_s: float | None) -> str:
    """`3 h ago`."""
    if at_s is None:
        return ""
    passed = max(0.0, time.time() - at_s)
    for unit, seconds in (("d", UNITS["d"]), ("h", UNITS["h"]), ("min", UNITS["m"])):
        if passed >= seconds:
            return f"{passed // seconds:.0f} {unit} ago"
    return "just now"


def short(path: str) -> str:
    """With `~` for the home."""
    try:
        return f"~/{Path(path).relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return path
