"""`hetero cache`: what hetero keeps here, and how to be rid of it."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from hetero.cli.options import JsonOption
from hetero.terminal import json_line

CLEAR: Final = "clear"
NAMES: Final = (  # as `hetero.cache.kinds` has them
    "decisions", "first-starts", "opencl", "packed", "qnn", "qnn-schedules", "locks", "notices",
    "profiles", "contexts", "history", "other",
)  # fmt: skip


def cache_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[clear] [KIND]...",
            help=f"Kinds, to list what they have or to clear it: {', '.join(NAMES)}.",
            show_default=False,
        ),
    ] = None,
    stale: Annotated[
        bool,
        typer.Option("--stale", help="Clear what is of no more use: of files, versions, processes "
                     "that are gone."),
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="Clear what was not used for this long, "
                     "such as 30d, 12h."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Clear every kind but profiles, contexts and history.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask about what took hours to make.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show what hetero keeps on this machine, with sizes; `clear` removes it.

    What is cleared is made again where it is needed, but for profiles, contexts and history, which
    go by their names alone. Nothing goes that a running process has.
    """
    from hetero import cache
    from hetero.cli.work import cache as work

    kinds = list(words or ())
    if kinds[:1] != [CLEAR]:
        given = {"--stale": stale, "--older-than": older_than, "--all": everything}
        work.refuse_options(kinds, {**given, "--yes": yes, "--dry-run": dry_run})
        document = cache.kept(kinds)
        if as_json:
            print(json_line(document.model_dump_json()))
        else:
            work.show_kept(document)
        return
    found = cache.chosen(
        kinds[1:],
        everything=everything,
        stale=stale,
        older_than_s=None if older_than is None else work.parse_age(older_than),
    )
    if not dry_run and not yes:
        work.ask(found)
    document = cache.remove(found, dry_run=dry_run)
    if as_json:
        print(json_line(document.model_dump_json()))
    else:
        work.tell_cleared(document)
