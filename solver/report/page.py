"""The report as one self-contained page of HTML (`profiler/pages/plan.html`)."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.profiler.pages import render
from hetero.profiler.table_data import TableData
from hetero.solver.plan import Plan, Total
from hetero.solver.report import conclusion, content, drawings, fastest_table, units

NUMERIC = (
    "plan", "tokens/s", "speed", "energy", "energy, change", "time", "size", "tokens", "mean power",
    "gain", "sure",
)  # fmt: skip


def to_html(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """Return everything on one page.

    No scripts, nothing from elsewhere. Raises `UserError` where matplotlib is missing.
    """
    pictured = _pictured(plan)
    steps = [drawn for t in pictured if (drawn := drawings.step(plan, t)) is not None]
    shown = {(t.phase, content.drawn_tokens(t)) for t in pictured} if steps else set()
    rest = [
        table
        for op, table in zip((o for o in plan.ops if o.candidates), content.alternatives(plan),
                             strict=True)
        if (op.phase, op.m) not in shown
    ]  # fmt: skip
    return render(
        "plan.html",
        title=content.name(plan),
        model=plan.model,
        profile=plan.profile or "this device",
        kind=content.kind(plan),
        facts="; ".join(_facts(plan)),
        notes=plan.notes,
        conclusion=(*conclusion.sentences(plan), *fastest_table.answers(plan)),
        numbers=[
            (
                f"{units.rate(t.tokens_per_s)} tokens/s",
                content.label(t),
                f"{units.gain(t.predicted_s, t.best_single_device_s)} over the best single device",
            )
            for t in plan.totals
        ],
        first=_tables(
            fastest_table.table(plan),
            content.gains(plan),
            content.what_if(plan, others),
            content.quality(plan),
        ),
        legend=drawings.LEGEND_OF_THREE if any(x.cpu_s for x in plan.ops) else drawings.LEGEND,
        lanes=[bars for t in pictured if (bars := drawings.block(plan, t)) is not None],
        cuts=steps,
        operators=_numeric(content.operators(plan)),
        charts=_charts(plan),
        last=_tables(content.attention(plan), content.memory(plan)) if steps else _tables(
            content.operators(plan), content.attention(plan), content.memory(plan)
        ),
        rest=list(map(_numeric, rest)),
    )  # fmt: skip


def _facts(plan: Plan) -> list[str]:
    facts = [
        f"plan {plan.plan_id}",
        f"objective {plan.objective}",
        f"graphs of {', '.join(map(str, plan.graph_sizes))} tokens" if plan.graph_sizes else "",
        f"precision {plan.precision}",
        f"GPU at most {100 * plan.max_gpu_share:.0f} % of a matmul's time"
        if plan.max_gpu_share < 1
        else "",
    ]
    return [fact for fact in facts if fact]


def _pictured(plan: Plan) -> list[Total]:
    """Return three lengths at most (first, middle, last), and decoding."""
    prefill = [t for t in plan.totals if t.phase == "prefill"]
    places = sorted({0, len(prefill) // 2, len(prefill) - 1}) if prefill else []
    return [prefill[i] for i in places] + [t for t in plan.totals if t.phase == "decode"]


def _charts(plan: Plan) -> list[tuple[object, TableData]]:
    """Return charts, each with its table."""
    charts = []
    for table, draw in ((content.curves(plan), drawings.curves),
                        (content.front(plan), drawings.front)):  # fmt: skip
        if table is not None and (drawn := draw(plan)) is not None:
            chart = drawn._replace(note=f"{table.note} {drawn.note}")
            charts.append((chart, _numeric(table)))
    return charts


def _tables(*tables: TableData | None) -> list[TableData]:
    return [_numeric(table) for table in tables if table is not None]


def _numeric(table: TableData) -> TableData:
    return table._replace(numbers=tuple(name for name in table.head if name in NUMERIC))
