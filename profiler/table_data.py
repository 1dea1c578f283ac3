"""Tables of reports: what they say, and the same as Markdown. Terminals and pages draw them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TableData(NamedTuple):
    """A titled table.

    `note` stands under the title. The first `lead` cells of a row name it; `numbers` are columns
    that line up at the right.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    lead: int = 1
    numbers: tuple[str, ...] = ()


def markdown_table(table: TableData) -> str:
    """Return the rows alone."""
    rule = ("---:" if name in table.numbers else "---" for name in table.head)
    return "\n".join([_row(table.head), f"|{'|'.join(rule)}|", *map(_row, table.rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
