"""`hetero cache`: list the files that hetero caches, and clear them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from hetero import cache
from hetero.cache import KINDS, CacheEntry, CacheUsage, KindUsage
from hetero.cli.options import JsonOption
from hetero.cli.tables import fits, show_or_print
from hetero.errors import UserError
from hetero.profiler.table_data import TableData
from hetero.solver.report import units
from hetero.terminal import json_line

UNITS: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
LONGEST_S: Final = 100 * 366 * UNITS["d"]
CLEAR: Final = "clear"


def cache_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[clear] [KIND]...",
            help=f"Kinds, to list what they have or to clear it: {', '.join(KINDS)}.",
            show_default=False,
        ),
    ] = None,
    stale: Annotated[
        bool,
        typer.Option("--stale", help="Clear leftovers of deleted files, other versions, "
                     "ended processes."),
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="Clear entries not used for this long, "
                     "such as 30d, 12h."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Clear every kind but profiles, contexts and history.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before deleting what took hours.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Clear nothing, only print.")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show the files that hetero caches on this machine, with sizes; `clear` removes them.

    Cleared files are made again when they are needed, except profiles, contexts and history, which
    are only cleared by name. Nothing is cleared that a running process uses.
    """
    kinds = list(words or ())
    if kinds[:1] != [CLEAR]:
        given = {"--stale": stale, "--older-than": older_than, "--all": everything, "--yes": yes}
        for name in (name for name, x in {**given, "--dry-run": dry_run}.items() if x):
            line = " ".join(["hetero cache clear", *kinds, name])
            raise UserError(f"{name} is for clearing: `{line}`")
        document, show = cache.usage(kinds), _show
    else:
        age_s = None if older_than is None else parse_age(older_than)
        entries = cache.select(kinds[1:], everything=everything, stale=stale, older_than_s=age_s)
        if not dry_run and not yes:
            _confirm(entries)
        document, show = cache.remove(entries, dry_run=dry_run), _show_cleared
    if as_json:
        print(json_line(document.model_dump_json()))
    else:
        show(document)


def parse_age(text: str) -> float:
    """Return the seconds of `90m`, `12h`, `30d` or `4w`. Raises `UserError`."""
    try:
        seconds = float(text[:-1]) * UNITS[text[-1:].lower()]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise UserError(f"--older-than is a time such as 90m, 12h, 30d or 4w, got {text!r}")
    return seconds


def _confirm(entries: dict[str, list[CacheEntry]]) -> None:
    """Ask before removing guarded kinds; declined ones leave the lists.

    Raises `UserError` without a terminal.
    """
    for name, listed in entries.items():
        going = [entry for entry in listed if not entry.held and not entry.stale]
        if not going or not KINDS[name].guarded:
            continue
        size = units.size(sum(entry.nbytes for entry in going))
        what = f"{KINDS[name].what} ({_count(len(going))}, {size}; again: {KINDS[name].again})"
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError(f"refusing to delete {what} without a terminal: pass --yes")
        if not typer.confirm(f"Remove {what}?", err=True):
            listed[:] = [entry for entry in listed if entry not in going]


def _show_entries(kind: KindUsage) -> None:
    head = ("name", "of", "size", "used", "state")
    rows = tuple(
        (x.name, x.of, units.size(x.nbytes), ago(x.used_at_s), "in use" if x.held else x.stale)
        for x in kind.listed or ()
    )
    table = TableData("", head, rows, numbers=("size", "used"))
    show_or_print(table, [f"{kind.kind}: {kind.what}, in {_short(kind.path)}"])


def _show(document: CacheUsage) -> None:
    """Print all kinds, or the entries of those that were named."""
    if named := [kind for kind in document.kinds if kind.listed is not None]:
        for kind in named:
            _show_entries(kind)
        return
    used = [kind for kind in document.kinds if kind.entries]
    if not used:
        print("hetero keeps nothing on this machine")
        return
    head = ("kind", "what", "entries", "size", "used", "path")
    rows = tuple(
        (kind.kind, kind.what, str(kind.entries), units.size(kind.nbytes), ago(kind.used_at_s),
         _short(kind.path))
        for kind in used
    )  # fmt: skip
    table = TableData("", head, rows, numbers=("entries", "size", "used"))
    places, console = [], Console()
    narrow = table._replace(head=head[:-1], rows=tuple(row[:-1] for row in rows))
    if console.is_terminal and not fits(table, console) and fits(narrow, console):
        table = narrow
        folders = dict.fromkeys(_short(str(Path(kind.path).parent)) for kind in used)
        places = [f"in {', '.join(folders)}"]
    lines = [*places, f"{units.size(document.nbytes)} in all"]
    if old := [kind for kind in used if kind.stale]:
        size = units.size(sum(kind.stale_nbytes for kind in old))
        parts = ", ".join(f"{kind.kind} {kind.stale}" for kind in old)
        lines.append(f"{size} unused ({parts}): hetero cache clear --stale")
    if busy := [f"{kind.kind} {kind.held}" for kind in used if kind.held]:
        lines.append(f"in use: {', '.join(busy)}")
    show_or_print(table, after=lines)


def _show_cleared(document: CacheUsage) -> None:
    """Print what was removed, and what was in use."""
    cleared = [kind for kind in document.cleared or () if kind.entries]
    parts = ", ".join(f"{x.kind} {x.entries} ({units.size(x.nbytes)})" for x in cleared)
    verb = "would free" if document.dry_run else "freed"
    freed = f"{verb} {units.size(document.freed_nbytes)}: {parts}"
    print(freed if cleared else "nothing to clear")
    for kind in document.cleared or ():
        if kind.held:
            print(f"{kind.kind}: {_count(kind.held)} in use by a running process, left")


def _count(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def ago(at_s: float | None) -> str:
    """Return `3 h ago`."""
    if at_s is None:
        return ""
    passed_s = max(0.0, time.time() - at_s)
    for unit, seconds in (("d", UNITS["d"]), ("h", UNITS["h"]), ("min", UNITS["m"])):
        if passed_s >= seconds:
            return f"{passed_s // seconds:.0f} {unit} ago"
    return "just now"


def _short(path: str) -> str:
    """Return a path with `~` for the home."""
    try:
        return f"~/{Path(path).relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return path
