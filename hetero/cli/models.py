"""`hetero models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hetero.cli.options import JsonOption


def models_command(
    catalogue: Annotated[
        bool, typer.Option("--catalogue", help="List models that one command downloads.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List models that can be opened without a network: here, and downloaded before."""
    if catalogue:
        _show_catalogue(as_json)
        return
    from hetero.cli.tables import show_or_print
    from hetero.models import DEMO_DIRECTORY
    from hetero.models.hub import models_here
    from hetero.profiler.table_data import TableData
    from hetero.solver.report import units
    from hetero.terminal.notices import notify

    try:
        models = models_here(Path.cwd(), DEMO_DIRECTORY)
    except OSError as error:
        notify(f"the models of the current folder are not listed ({error.strerror})")
        models = models_here(None, DEMO_DIRECTORY)
    if as_json:
        print(json.dumps([model._asdict() for model in models]))
        return
    note = "" if len(models) > 1 else "`hetero models --catalogue` lists models to download."
    rows = tuple((model.name, model.format, units.size(model.nbytes)) for model in models)
    show_or_print(TableData("", ("MODEL", "format", "size"), rows, note, numbers=("size",)))


def _show_catalogue(as_json: bool) -> None:
    from hetero.cli.tables import show_or_print
    from hetero.models.catalogue import CATALOGUE
    from hetero.profiler.table_data import TableData

    if as_json:
        print(json.dumps([model._asdict() for model in CATALOGUE]))
        return
    rows = tuple((model.name, model.about, f"{model.gigabytes:.2f} GB") for model in CATALOGUE)
    show_or_print(TableData("", ("MODEL", "what it is", "download"), rows, numbers=("download",)))
