"""Tables in a terminal, of whatever width it is."""

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
    """Print a table as wide as it has to be; where the console is narrower, its rows one below the
    other, their cells named: words are not broken to fit columns. What is no terminal has no width:
    there it is Markdown.
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
    """A line, wrapped in a terminal only."""
    console.print(shown(text), soft_wrap=not console.is_terminal)


def show_or_print(data: TableData, before: Iterable[str] = (), after: Iterable[str] = ()) -> None:
    """A table between lines: in a terminal as wide as that is, elsewhere as Markdown."""
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
    """Return whether a table is as wide as the console at most."""
    return _width(data) <= console.width


def _width(data: TableData) -> int:
    columns = zip(data.head, *data.rows, strict=True)
    return sum(max(map(cell_len, map(printable, cells))) + 3 for cells in columns) + 1


def _fold(data: TableData, console: Console) -> None:
    """A row is its name, and under it the other cells with the names of their columns."""
    for row in data.rows:
        console.print(shown(" ".join(row[: data.lead])), style="cyan")
        cells = zip(data.head[data.lead :], row[data.lead :], strict=True)
        text = "; ".join(f"{name}: {cell}" for name, cell in cells if cell)
        console.print(Padding(shown(text), (0, 0, 0, 4), expand=False))
