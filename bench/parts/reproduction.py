"""`hetero reproduce` with a file for the claims."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from common import finish

from hetero.backends.host.files import atomic_write
from hetero.measuring.reproduction import reproduce
from hetero.profiler.table_data import markdown_table


def command(
    json_: Path | None = typer.Option(None, "--json", help="where to write all claims"),  # noqa: B008
    profile: str = "snapdragon-8-gen-3",
) -> None:
    """The paper's end-to-end claims beside the simulated chip: paper, simulated, ratio.

    Exits with 1 if a target is missed.
    """
    found = reproduce(profile)
    print(markdown_table(found.table()))
    print("\n" + "\n".join(found.remarks()[:-1]))
    finish(found.remarks()[-1])
    if json_ is not None:
        atomic_write(json_, json.dumps(found.document(), indent=1) + "\n")
    raise typer.Exit(not found.met)
