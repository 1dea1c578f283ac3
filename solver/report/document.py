"""The report as JSON: the plan's document, and every table of the report in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hetero.profiler.table_data import TableData
from hetero.solver.plan import REPORT_KEY, Plan
from hetero.solver.report import content, fastest_table


def to_json(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """Return the plan with `report`.

    What its numbers are, the tables, and why the alternatives lost.
    """
    document, fastest = plan.model_dump(mode="json"), fastest_table.table(plan)
    document[REPORT_KEY] = {
        "title": content.name(plan),
        "plan_id": plan.plan_id,
        "numbers": content.kind(plan),
        "tables": [_table(x) for x in (fastest, *content.tables(plan, others)) if x is not None],
        "alternatives": [_table(table) for table in content.alternatives(plan)],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _table(table: TableData) -> dict[str, Any]:
    columns, rows = list(table.head), [list(row) for row in table.rows]
    return {"title": table.title, "note": table.note, "columns": columns, "rows": rows}
