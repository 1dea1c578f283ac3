"""Tables in a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from hetero.cli.options import shown
from hetero.profiler.table_data import TableData, markdown_table
from hetero.terminal import printable


def show(data: TableData, console: Console | None = None) -> None:
    """Print a table as wide as it has to be.

    Where the console is narrower, cells are printed one below the other with their names: words are
    not broken to fit columns. Outside of a terminal there is no width: the table is Markdown.
    """
    console = console or Console()
    if not console.is_terminal:
        above = [line for line in (data.title, data.note) if line]
        text = "\n".join(["", *above, "", markdown_table(data), ""])
        console.file.write(printable(text))
        return
    if data.title:
        console.print(shown(data.title), style="bold")
    if data.note:
        console.print(shown(data.note), style="dim")
    if not fits(data, console):
        _fold(data, console)
        return
    table = Table(show_edge=True)
    for name in data.head:
        table.add_column(shown(name), justify="right" if name in data.numbers else "left")
    before = ""
    for first, *others in data.rows:
        again = data.lead > 1 and first == before  # a group of rows is named once
        table.add_row(shown("" if again else first), *map(shown, others))
        before = first
    console.print(table)


def say(text: str, console: Console) -> None:
    """Print a line, wrapped in a terminal only."""
    console.print(shown(text), soft_wrap=not console.is_terminal)


def show_or_print(data: TableData, before: Iterable[str] = (), after: Iterable[str] = ()) -> None:
    """Print a table between lines: as wide as needed in a terminal, elsewhere as Markdown."""
    console = Console()
    if not console.is_terminal:
        text = "\n".join([*before, "", markdown_table(data), "", *after]).strip("\n")
        print(printable(text))
        return
    for line in before:
        console.print(shown(line))
    show(data, console)
    for line in after:
        console.print(shown(line))


def fits(data: TableData, console: Console) -> bool:
    """Return whether a table is at most as wide as the console."""
    return _width(data) <= console.width


def _width(data: TableData) -> int:
    columns = zip(data.head, *data.rows, strict=True)
    return sum(max(map(cell_len, map(printable, cells))) + 3 for cells in columns) + 1


def _fold(data: TableData, console: Console) -> None:
    """Return a row as its name with the other cells below it, named by their columns."""
    for row in data.rows:
        console.print(shown(" ".join(row[: data.lead])), style="cyan")
        cells = zip(data.head[data.lead :], row[data.lead :], strict=True)
        text = "; ".join(f"{name}: {cell}" for name, cell in cells if cell)
        console.print(Padding(shown(text), (0, 0, 0, 4), expand=False))
