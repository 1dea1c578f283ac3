"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.profiler.table_data import TableData, markdown_table
from hetero.solver.plan import Plan
from hetero.solver.report import content, fastest_table


def to_markdown(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """Return all tables of the report."""
    parts = [f"# {content.name(plan)}", f"Plan {plan.plan_id}; numbers are {content.kind(plan)}."]
    parts += [f"- {note}" for note in (*plan.notes, *fastest_table.answers(plan))]
    parts += [_table(x, "##") for x in (fastest_table.table(plan),) if x is not None]
    parts += [_table(table, "##") for table in content.tables(plan, others)]
    parts.append("## Why the others lost")
    parts += [_table(table, "###") for table in content.alternatives(plan)]
    return "\n\n".join(parts) + "\n"


def _table(table: TableData, level: str) -> str:
    note = f"{table.note}\n" if table.note else ""
    return f"{level} {table.title}\n\n{note}\n{markdown_table(table)}".replace("\n\n\n", "\n\n")
