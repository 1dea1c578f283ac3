"""`hetero reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hetero.cli.options import JsonOption, stderr
from hetero.cli.tables import show_or_print


def reproduce_command(
    profile: Annotated[
        str, typer.Option("--profile", metavar="PROFILE", help="The chip: a file or shipped name.")
    ] = "snapdragon-8-gen-3",
    report: Annotated[
        Path | None, typer.Option("--report", help="Draw the paper's numbers next to ours (.html).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """HeteroLLM's claims against a simulated chip; exit code 1 if a stated target is missed.

    Predicted by the solver, and executed by the engine on that chip, launch by launch, in virtual
    time. The chip is fitted to timings of single kernels alone (docs/reference), nothing to these
    claims but energies; every number is simulated.
    """
    from hetero.measuring.reproduction import reproduce
    from hetero.terminal.notices import notify

    with stderr.status("solving and executing"):
        reproduction = reproduce(profile)
    if report is not None:
        reproduction.report(report)
        notify(f"{report} is written: open it in a browser")
    if as_json:
        print(json.dumps(reproduction.document()))
    else:
        show_or_print(reproduction.table(), after=reproduction.remarks())
    if not reproduction.met:
        raise typer.Exit(1)
