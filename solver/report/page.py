"""The report as one self-contained page of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hetero.profiler.tables import TableData
from hetero.solver.plan import Plan, Total
from hetero.solver.report import content, drawings, units

STYLE = """
:root { --gpu: #d9763c; --npu: #2f6f9f; --rest: #a9a196; --ink: #22252a; --pale: #f4f2ee;
  --line: #d9d5cc; --muted: #6a6d73; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 36px 24px 80px; }
h1 { font-size: 28px; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 44px 0 8px; border-top: 1px solid var(--line); padding-top: 22px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
p, li { max-width: 78ch; } .muted, .note { color: var(--muted); } .note { margin: 2px 0 10px; }
.badge { display: inline-block; border-radius: 10px; padding: 1px 10px; font-size: 13px;
  background: #fbe9d7; color: #7a4a12; margin-right: 6px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 22px 0 6px; }
.card { background: var(--pale); border-radius: 8px; padding: 12px 16px; flex: 1 1 190px; }
.card b { display: block; font-size: 26px; line-height: 1.2; }
.card span { color: var(--muted); font-size: 13px; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; min-width: 40%; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
td:last-child { white-space: normal; }
th { color: var(--muted); font-weight: 600; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } th.n { text-align: right; }
svg { width: 100%; height: auto; display: block; margin: 6px 0 2px; }
svg text { font-size: 13px; fill: var(--ink); }
svg .small { font-size: 11.5px; fill: var(--muted); }
svg .lane { font-weight: 600; } svg .on { fill: #fff; font-size: 12px; }
svg .track { fill: var(--pale); } svg .grid { stroke: var(--line); } svg .axis { stroke: #999; }
svg .tile { stroke: #fff; stroke-width: 1; }
.key { margin-right: 18px; font-size: 13px; } .key i { display: inline-block; width: 12px;
  height: 12px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
details { margin: 6px 0; } summary { cursor: pointer; }
"""


def to_html(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """Everything on one page; no scripts, nothing from elsewhere."""
    parts = [
        _header(plan),
        _cards(plan),
        _section(content.gains(plan)),
        _optional(content.what_if(plan, others)),
        _blocks(plan),
        _cuts(plan),
        _curves(plan),
        _optional(content.memory(plan)),
        _front(plan),
        _alternatives(plan),
    ]
    title = escape(content.name(plan))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _header(plan: Plan) -> str:
    facts = [
        f"plan {plan.plan_id}",
        f"objective {plan.objective}",
        f"graphs of {', '.join(map(str, plan.graph_sizes))} tokens" if plan.graph_sizes else "",
        f"precision {plan.precision}",
        f"GPU at most {100 * plan.max_gpu_share:.0f} % of a matmul's time"
        if plan.max_gpu_share < 1
        else "",
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    return (
        f"<h1>{escape(plan.model)}</h1>"
        f"<p>How every matrix multiplication is split between the GPU and the NPU of "
        f"<b>{escape(plan.profile or 'this device')}</b>.</p>"
        f'<p><span class="badge">{content.kind(plan)} numbers</span>'
        f'<span class="muted">{escape("; ".join(f for f in facts if f))}</span></p>'
        + (f"<ul>{notes}</ul>" if notes else "")
    )


def _cards(plan: Plan) -> str:
    cards = "".join(
        f'<div class="card"><span>{escape(content.label(t))}</span>'
        f"<b>{units.rate(t.tokens_per_s)} tokens/s</b>"
        f"<span>{units.gain(t.predicted_s, t.best_single_device_s)} over the best single device"
        f"</span></div>"
        for t in plan.totals
    )
    return f'<div class="cards">{cards}</div>' if cards else ""


def _pictured(plan: Plan) -> list[Total]:
    """Three lengths at most (first, middle, last), and decoding."""
    prefill = [t for t in plan.totals if t.phase == "prefill"]
    places = sorted({0, len(prefill) // 2, len(prefill) - 1}) if prefill else []
    return [prefill[i] for i in places] + [t for t in plan.totals if t.phase == "decode"]


def _blocks(plan: Plan) -> str:
    drawn = [(t, drawings.timeline(plan, t)) for t in _pictured(plan)]
    figures = "".join(f"<h3>{escape(content.label(t))}</h3>{d}" for t, d in drawn if d)
    if not figures:
        return ""
    return (
        "<h2>One block on both processors</h2>"
        f'<p class="note">{content.kind(plan).capitalize()} times of one transformer block; '
        f"point at a bar for its length.</p><p>{drawings.legend()}</p>{figures}"
    )


def _cuts(plan: Plan) -> str:
    drawn = [(t, drawings.cuts(plan, t)) for t in _pictured(plan)]
    figures = "".join(f"<h3>{escape(content.label(t))}</h3>{d}" for t, d in drawn if d)
    note = (
        "Each rectangle is the output of one matmul: which rows and tokens each processor computes."
    )
    return _drawn(content.operators(plan), figures, note)


def _curves(plan: Plan) -> str:
    table = content.curves(plan)
    return "" if table is None else _drawn(table, drawings.curves(plan), table.note)


def _front(plan: Plan) -> str:
    table = content.front(plan)
    if table is None:
        return ""
    relative = "Times and energies are drawn relative to the fastest plan of each step."
    return _drawn(table, drawings.front(plan), f"{table.note} {relative}")


def _drawn(table: TableData, drawing: str, note: str) -> str:
    """A section with a drawing, its table folded under it."""
    return (
        f'<h2>{table.title}</h2><p class="note">{escape(note)}</p>{drawing}'
        f"<details><summary>as a table</summary>{_table(table)}</details>"
    )


def _alternatives(plan: Plan) -> str:
    found = "".join(
        f"<details><summary>{escape(t.title)}</summary>{_table(t)}</details>"
        for t in content.alternatives(plan)
    )
    if not found:
        return ""
    note = f"{content.kind(plan).capitalize()} time of the best tiling of every strategy."
    return f'<h2>Why the others lost</h2><p class="note">{note}</p>{found}'


def _optional(table: TableData | None) -> str:
    return "" if table is None else _section(table)


def _section(table: TableData) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<h2>{escape(table.title)}</h2>{note}{_table(table)}"


def _table(table: TableData) -> str:
    head = "".join(_cell("th", cell, cell in _NUMERIC) for cell in table.head)
    rows = "".join(f"<tr>{_cells(table.head, row)}</tr>" for row in table.rows)
    return f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


_NUMERIC = {"plan", "tokens/s", "speed", "energy", "energy, change", "time", "size", "tokens"}


def _cells(head: Sequence[str], row: Sequence[str]) -> str:
    return "".join(_cell("td", c, h in _NUMERIC) for h, c in zip(head, row, strict=True))


def _cell(tag: str, value: str, numeric: bool) -> str:
    css = ' class="n"' if numeric else ""
    return f"<{tag}{css}>{escape(value)}</{tag}>"
