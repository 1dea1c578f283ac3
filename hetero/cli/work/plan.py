"""What `hetero plan` shows of a plan."""

from __future__ import annotations

from rich.console import Console

from hetero.cli.tables import say, show
from hetero.errors import UserError
from hetero.placement.planning import (
    load_either,
    parse_tokens,
    planned,
)
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.profiler.tables import TableData
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.report import brief, conclusion, content, units
from hetero.solver.request import GraphSizes, PlanRequest
from hetero.terminal import json_line


def parse_sizes(value: str | None) -> GraphSizes:
    """`auto`, token counts, or nothing. Raises `UserError`."""
    if value is None or value == "auto":
        return value  # type: ignore[return-value]
    return parse_tokens(value, "--graph-sizes")


def show_plan(
    plan: ExecutionPlan, others: list[ExecutionPlan], explain: str | None, *, as_json: bool
) -> None:
    if not as_json:
        _print_plan(plan, others, explain)
    else:
        _matching(plan, explain)
        print(json_line(plan.model_dump_json()), flush=True)


def other(name: str, spec: ModelGraph, request: PlanRequest) -> ExecutionPlan:
    found = load_either(name)
    if isinstance(found, DeviceProfile):
        return planned(spec, found, request)
    return found


def _print_plan(plan: ExecutionPlan, others: list[ExecutionPlan], explain: str | None) -> None:
    console = Console()
    if explain is not None:
        for title, candidates in _matching(plan, explain):
            show(candidates._replace(title=title), console)
        return
    say(
        f"{content.name(plan)}: {content.kind(plan)} numbers, plan {plan.plan_id}, "
        f"solved in {units.duration(plan.solve_s)}",
        console,
    )
    for sentence in conclusion.sentences(plan):
        say(sentence, console)
    tables = [brief.gains(plan), content.forms(plan), brief.operators(plan)]
    for table in (
        *tables,
        content.attention(plan),
        content.what_if(plan, others),
        content.memory(plan),
    ):
        if table is not None:
            show(table, console)
    for note in plan.notes:
        say(f"note: {note}", console)


def _matching(plan: ExecutionPlan, explain: str | None) -> list[tuple[str, TableData]]:
    """Tables of candidates of one matmul. Raises `UserError` for an unknown name."""
    if explain is None:
        return []
    known = sorted({op.op for op in plan.ops})
    if explain not in known:
        raise UserError(f"--explain {explain!r}: the plan's matmuls are {', '.join(known)}")
    tables = list(content.alternatives(plan))
    named = [op for op in plan.ops if op.candidates]
    return [(t.title, t) for op, t in zip(named, tables, strict=True) if op.op == explain]
