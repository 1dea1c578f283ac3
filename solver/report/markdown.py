"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.solver.plan import Plan
from hetero.solver.report import content
from hetero.solver.report.content import TableData


def to_markdown(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """All tables of the report."""
    parts = [f"# {content.name(plan)}", f"Plan {plan.plan_id}; numbers are {content.kind(plan)}."]
    parts += [f"- {note}" for note in plan.notes]
    parts += [_table(table, "##") for table in content.tables(plan, others)]
    parts.append("## Why the others lost")
    parts += [_table(table, "###") for table in content.alternatives(plan)]
    return "\n\n".join(parts) + "\n"


def _table(table: TableData, level: str) -> str:
    lines = [f"{level} {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines += [_row(table.head), "|" + "---|" * len(table.head)]
    lines += [_row(row) for row in table.rows]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
