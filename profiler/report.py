"""The report of a profile: one HTML page without network, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hetero.profiler import files
from hetero.profiler.charts import Chart, all_charts
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import DeviceProfile, MatMulPredictor

CSS = """
:root { color-scheme: light; --ink: #1a1d21; --dim: #5c6570; --line: #e3e6ea;
  --paper: #f6f7f9 }
* { box-sizing: border-box }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper) }
main { max-width: 1180px; margin: 0 auto; padding: 16px }
h1 { font-size: 1.5rem; margin: .4rem 0 0 }
h2 { font-size: 1.15rem; margin: 1.6rem 0 .6rem }
p { margin: .3rem 0 } .dim { color: var(--dim); font-size: .9rem }
.grid { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)) }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px;
  min-width: 0; margin-bottom: 8px }
.card h3 { font-size: 1rem; margin: 0 } .card svg { display: block; width: 100%; height: auto }
.tiles { display: grid; gap: 8px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)) }
.tile b { display: block; font-size: 1.25rem } .tile { padding: 8px 12px }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.bad { border-left: 4px solid #b3261e } .good { border-left: 4px solid #137333 }
details summary { cursor: pointer; padding: 4px 0 }
"""


def write_report(profile: DeviceProfile, path: str | Path) -> None:
    """Write the page. Raises `ProfileError` if the file cannot be written, or is to be no page."""
    if Path(path).suffix.lower() not in (".html", ".htm", ""):
        raise ProfileError(f"the report of a profile is a page ({path}): choose .html")
    files.write_atomically(path, to_html(profile))


def to_html(profile: DeviceProfile) -> str:
    """The page as text; the same profile always gives the same page."""
    parts = [
        _heading(profile),
        _tiles(profile),
        _quarantine(profile),
        "<h2>Curves</h2>",
        f'<div class="grid">{"".join(map(_chart, all_charts(profile)))}</div>',
        "<h2>How well it predicts</h2>",
        _validation(profile.predictors),
        "<h2>Other kernels, preparation and the machine</h2>",
        _details(profile),
    ]
    title = escape(f"Profile {profile.name}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _heading(profile: DeviceProfile) -> str:
    kinds = sorted({record.numbers for record in profile.devices.values()})
    lines = [
        f"{kind}: {record.name} ({record.backend}, {record.driver}), {record.numbers}"
        for kind, record in profile.devices.items()
    ]
    body = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f"<h1>Device profile: {escape(profile.name)}</h1>"
        f'<p class="dim">{escape(profile.created)}, hetero {escape(profile.hetero_version)}, '
        f"numbers are {escape(' and '.join(kinds))}</p>{body}"
    )


def _tiles(profile: DeviceProfile) -> str:
    coverage = profile.coverage
    tiles = [(f"{coverage.measured_tasks} / {coverage.grid_tasks}", "matmuls measured")]
    tiles.append((f"{coverage.spent_s:.0f} s", "of measuring"))
    for kind, predictor in _main_predictors(profile).items():
        if predictor.regimes.bytes_per_s:
            speed = f"{predictor.regimes.bytes_per_s / 1e9:.1f} GB/s"
            tiles.append((speed, f"{kind.upper()} decode"))
        if predictor.regimes.flops_per_s:
            flops = f"{predictor.regimes.flops_per_s / 1e9:.0f} GFLOP/s"
            tiles.append((flops, f"{kind.upper()} prefill"))
    for entry in profile.contention:
        text = f"{entry.gpu:.2f}× / {entry.npu:.2f}×"
        kind = f" {entry.weight_format.value}" if entry.weight_format else ""
        tiles.append((text, f"slower together, {entry.phase}{kind} (GPU / NPU)"))
    cells = "".join(
        f'<div class="card tile"><b>{escape(value)}</b>'
        f'<span class="dim">{escape(label)}</span></div>'
        for value, label in tiles
    )
    return f'<div class="tiles" style="margin-top:12px">{cells}</div>'


def _main_predictors(profile: DeviceProfile) -> dict[str, MatMulPredictor]:
    found: dict[str, MatMulPredictor] = {}
    for predictor in profile.predictors:
        found.setdefault(predictor.device, predictor)
    return found


def _quarantine(profile: DeviceProfile) -> str:
    if not profile.quarantined:
        text = "No kernel is quarantined: each was checked against float32 before it was timed."
        return f'<div class="card good" style="margin-top:12px">{text}</div>'
    items = "".join(
        f"<li>{escape(entry.device)} {escape(entry.op)} {escape(entry.shape_class)}: "
        f"{escape(entry.detail)}</li>"
        for entry in profile.quarantined
    )
    return (
        '<div class="card bad" style="margin-top:12px"><b>Quarantined kernels</b> '
        f"(the solver does not use them)<ul>{items}</ul></div>"
    )


def _chart(chart: Chart) -> str:
    return (
        f'<section class="card"><h3>{escape(chart.title)}</h3>'
        f'<p class="dim">{escape(chart.note)}</p>{chart.svg}</section>'
    )


def _validation(predictors: Iterable[MatMulPredictor]) -> str:
    rows = [
        (
            p.device,
            p.weight_format.value,
            p.order,
            v.phase,
            f"{v.mape:.1%}",
            f"{v.p95:.1%}",
            str(v.rows),
            f"{len(p.trees)} trees" if p.trees else "piecewise linear",
        )
        for p in predictors
        for v in p.validation
    ]
    note = '<p class="dim">Each (n, k) pair predicted by a fit that has not seen it.</p>'
    heads = ("device", "weights", "order", "phase", "mean error", "95 %", "rows", "predictor")
    return note + _table(heads, rows, numbers=(4, 5, 6))


def _details(profile: DeviceProfile) -> str:
    others = [
        (row.device, row.op, _sizes(row.sizes), str(row.m), str(row.context), _us(row.seconds))
        for row in profile.others
    ]
    preparation = [
        (
            row.device,
            row.weight_format.value,
            f"{row.n} × {row.k}",
            _us(row.cold_s),
            _us(row.cached_s),
        )
        for row in profile.preparation
    ]
    sleeps = [
        (
            _us(row.requested_s),
            "default" if row.timer_slack_ns is None else f"{row.timer_slack_ns} ns",
            _us(row.late_median_s),
            _us(row.late_p99_s),
        )
        for row in profile.host_sync.sleep
    ]
    machine = [
        (name, str(value))
        for name, value in profile.environment.model_dump().items()
        if value not in (None, "", {}) and name != "packages"
    ]
    machine += sorted(profile.environment.packages.items())
    machine.append(("power", "absent" if profile.power is None else str(profile.power)))
    notes: list[tuple[str, str]] = [
        (kind, f"{name}: {note}")
        for kind, sync in profile.sync.items()
        for name, note in sync.notes.items()
    ]
    notes += [("", note) for note in profile.notes]
    return "".join(
        (
            _fold("Other kernels", ("device", "operation", "sizes", "m", "context", "µs"), others),
            _fold(
                "Preparation", ("device", "weights", "n × k", "cold µs", "again µs"), preparation
            ),
            _fold("Sleep", ("asked µs", "timer slack", "late µs", "99 % µs"), sleeps),
            _fold("Machine", ("what", "value"), machine),
            _fold("Notes", ("device", "note"), notes),
        )
    )


def _fold(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    narrow = ("m", "context")
    numbers = tuple(i for i, head in enumerate(heads) if head.endswith("µs") or head in narrow)
    table = _table(heads, rows, numbers=numbers)
    return f"<details><summary>{escape(title)}</summary>{table}</details>"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: tuple[int, ...] = ()
) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{escape(value)}</{tag}>"
            for i, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="card scroll"><table><thead><tr>{cells("th", heads)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _sizes(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"
