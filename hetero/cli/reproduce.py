"""`hetero reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hetero.cli.options import JsonOption, stderr
from hetero.cli.tables import show_or_print
from hetero.errors import UserError


def reproduce_command(
    profile: Annotated[
        str, typer.Option("--profile", metavar="PROFILE", help="The chip: a file or shipped name.")
    ] = "snapdragon-8-gen-3",
    report: Annotated[
        Path | None, typer.Option("--report", help="Draw the paper's numbers next to ours (.html).")
    ] = None,
    figure: Annotated[
        int | None, typer.Option("--figure", metavar="N", help="That figure's numbers alone.")
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

    if figure is not None:
        _show_figure(figure, profile, report, as_json=as_json)
        return
    with stderr().status("solving and executing"):
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


def _show_figure(number: int, profile: str, report: Path | None, *, as_json: bool) -> None:
    from hetero.measuring import paper_figures

    if report is not None:
        raise UserError("--report draws all claims on a page: leave out --figure")
    with stderr().status("solving and executing"):
        shown = paper_figures.figure(number, profile)
    if as_json:
        print(json.dumps({"figure": number, "rows": shown.rows}))
    else:
        table = shown.table
        show_or_print(table._replace(title="", note=""), before=[table.title], after=[table.note])
