"""Drawings of a plan as SVG: timelines, cuts to scale, curves, the energy front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

from hetero.backends.protocol import KINDS
from hetero.solver.plan import FrontPoint, OpPlan, Plan, Total
from hetero.solver.report import units
from hetero.solver.report.content import display, drawn_tokens, label, where

WIDTH: Final = 960
DOTTED: Final = 6  # points of a line that are drawn one by one
COLORS: Final = {"gpu": "var(--gpu)", "npu": "var(--npu)", "rest": "var(--rest)"}
PALETTE: Final = (
    "#0b6e4f", "#d1495b", "#7a5195", "#e0912b", "#30638e", "#8d8741", "#5c5c5c", "#9fb8ad",
    "#c99db0", "#b0a8d0", "#a5682a",
)  # fmt: skip


class Bar(NamedTuple):
    """A piece of work on a lane."""

    lane: str
    start_s: float
    end_s: float
    name: str
    rest: bool = False


def svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """A drawing that scales with the page."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", css: str = "") -> str:
    """One label."""
    style = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(content)}</text>'


def block_bars(plan: Plan, total: Total) -> list[Bar]:
    """One block: matmuls as planned, the other operators on their device."""
    rest = plan.rest.prefill if total.phase == "prefill" else plan.rest.decode
    between = {"qkv": "attention", "v": "attention", "o": "norm", "gate_up": "activation",
               "up": "activation", "down": "norm"}  # fmt: skip
    now, bars = 0.0, []
    for op in plan.ops:
        if op.phase != total.phase or op.m != drawn_tokens(total) or op.op == "lm_head":
            continue
        gpu, npu = op.gpu_s or 0.0, op.npu_s or 0.0
        whole = max(op.predicted_s or 0.0, gpu, npu)
        start = now + whole - max(gpu, npu)  # synchronisation comes first
        if npu:
            bars.append(Bar("npu", start, start + npu, op.op))
        if gpu:
            bars.append(Bar("gpu", start, start + gpu, op.op))
        now += whole
        part = op.op if op.op in total.rest_s else between.get(op.op, "")
        seconds = total.rest_s.get(part, 0.0)
        if seconds:
            name = f"behind {part}" if part == op.op else part
            bars.append(Bar(rest, now, now + seconds, name, True))
            now += seconds
    return bars


def timeline(plan: Plan, total: Total) -> str:
    """One block with a lane for each device."""
    bars = block_bars(plan, total)
    if not bars:
        return ""
    end = max(bar.end_s for bar in bars)
    left, top, lane = 56, 8, 44
    scale = (WIDTH - left - 12) / end
    parts = []
    for i, kind in enumerate(KINDS):
        y = top + i * (lane + 10)
        parts.append(text(left - 10, y + lane / 2 + 5, kind.upper(), anchor="end", css="lane"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{WIDTH - left - 12}" height="{lane}" class="track"/>'
        )
        parts += [_bar(bar, left, y, lane, scale) for bar in bars if bar.lane == kind]
    axis = top + 2 * (lane + 10) + 8
    parts += _time_axis(end, left, axis, scale)
    busy = [sum(b.end_s - b.start_s for b in bars if b.lane == k) / end for k in KINDS]
    caption = f"GPU busy {100 * busy[0]:.0f} %, NPU busy {100 * busy[1]:.0f} % of the block"
    parts.append(text(WIDTH - 12, axis + 34, caption, anchor="end", css="small"))
    return svg(WIDTH, axis + 42, parts, f"one block, {label(total)}")


def _bar(bar: Bar, left: float, y: float, lane: float, scale: float) -> str:
    x, width = left + bar.start_s * scale, max((bar.end_s - bar.start_s) * scale, 1.0)
    color = COLORS["rest"] if bar.rest else COLORS[bar.lane]
    tip = f"{bar.name}: {units.duration(bar.end_s - bar.start_s)}"
    drawn = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{lane}" rx="2" fill="{color}">'
        f"<title>{escape(tip)}</title></rect>"
    )
    if width > 8.5 * len(bar.name) + 6:
        drawn += text(x + width / 2, y + lane / 2 + 5, bar.name, anchor="middle", css="on")
    return drawn


def _time_axis(end: float, left: float, y: float, scale: float) -> list[str]:
    step = _nice(end / 6)
    parts = []
    for i in range(int(end / step) + 1):
        x = left + i * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{y - 6}" x2="{x:.1f}" y2="{y}" class="axis"/>')
        anchor = "start" if i == 0 else "middle"
        parts.append(
            text(x, y + 14, units.duration(i * step) if i else "0", anchor=anchor, css="small")
        )
    return parts


def _nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, not below `step`."""
    base = float(10 ** math.floor(math.log10(step)))
    return next(f * base for f in (1, 2, 5, 10) if f * base >= step * (1 - 1e-9))


def cuts(plan: Plan, total: Total) -> str:
    """The tiles of every matmul of a step: rows to the right, tokens down, to scale."""
    drawn = drawn_tokens(total)
    ops = [o for o in plan.ops if o.phase == total.phase and o.m == drawn]
    if not ops:
        return ""
    gap, top = 26, 34
    scale = (WIDTH - gap * (len(ops) - 1)) / sum(op.n for op in ops)
    height = 110 if total.phase == "prefill" else 46
    parts, x = [], 0.0
    for op in ops:
        width = op.n * scale
        parts.append(text(x, 13, op.op, css="lane"))
        parts.append(text(x, 28, _narrow(op, width), css="small"))
        parts += _tiles(op, drawn, x, top, width, height)
        x += width + gap
    tokens = f"{drawn} token{'s' if drawn > 1 else ''}"
    axes = f"rows of the weight to the right (n), {tokens} downwards; n to one scale"
    parts.append(text(0, top + height + 16, axes, css="small"))
    return svg(WIDTH, top + height + 24, parts, f"cuts of {label(total)}")


def _narrow(op: OpPlan, width: float) -> str:
    full = f"{op.strategy}, n={op.n}"
    return (
        full
        if width > 6.4 * len(full)
        else (op.strategy if width > 6.4 * len(op.strategy) else f"n={op.n}")
    )


def _tiles(op: OpPlan, m: int, x: float, y: float, width: float, height: float) -> list[str]:
    parts = []
    for tile in op.tiles:
        (t0, t1), (r0, r1) = tile.tokens, tile.rows
        t1 = m if t1 is None else t1
        left, wide = x + width * r0 / op.n, width * (r1 - r0) / op.n
        above, tall = y + height * t0 / m, height * (t1 - t0) / m
        tip = f"{tile.device.upper()}: tokens {t0} to {t1}, rows {r0} to {r1}"
        tip += f", graph of {tile.graph_size}" if tile.graph_size else ""
        parts.append(
            f'<rect x="{left:.1f}" y="{above:.1f}" width="{max(wide, 0.8):.1f}" '
            f'height="{max(tall, 0.8):.1f}" fill="{COLORS[tile.device]}" class="tile">'
            f"<title>{escape(tip)}</title></rect>"
        )
        name = f"{tile.device.upper()} {r1 - r0}"
        if wide > 8 * len(name) and tall > 18:
            parts.append(
                text(left + wide / 2, above + tall / 2 + 5, name, anchor="middle", css="on")
            )
    return parts


class Line(NamedTuple):
    """A named series of (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]


def curves(plan: Plan) -> str:
    """Prefill time by length, one line for each strategy; the plan's line is the heavy one."""
    lines = [
        Line(
            display(c.strategy),
            tuple((float(p.m), p.seconds) for p in c.points if p.seconds is not None),
        )
        for c in plan.curves
        if any(p.seconds is not None for p in c.points)
    ]
    return chart(lines, "tokens", "prefill time by length") if lines else ""


def front(plan: Plan) -> str:
    """Energy against time of every step, both relative to its fastest plan."""
    steps: dict[str, list[FrontPoint]] = {}
    for point in plan.front:
        steps.setdefault(f"{point.phase} {point.m}", []).append(point)
    steps = {name: points for name, points in steps.items() if points[0].energy_j}
    if not steps:
        return ""
    lines = [
        Line(
            name,
            tuple(
                (100 * p.seconds / points[0].seconds, 100 * p.energy_j / points[0].energy_j)
                for p in points
            ),
        )
        for name, points in steps.items()
    ]
    title = "energy in % of the fastest plan's, by time in % of it"
    least = min(y for line in lines for _, y in line.points)
    return chart(
        lines,
        "time, % of the fastest plan's",
        title,
        height=300,
        unit=_percent,
        low=5.0 * math.floor(least / 5 - 0.2),
        heavy_first=False,
    )


def _percent(value: float) -> str:
    return f"{value:g} %"


def chart(
    lines: Sequence[Line],
    x_name: str,
    title: str,
    height: int = 400,
    *,
    unit: Callable[[float], str] = units.duration,
    low: float = 0.0,
    heavy_first: bool = True,
) -> str:
    """Lines from `low` up, with a legend on the right in the order of their ends."""
    left, right, top, bottom = 64, 190, 12, 40
    xs = [x for line in lines for x, _ in line.points]
    high = max(y for line in lines for _, y in line.points)
    low_x, high_x = min(xs), max(xs)
    wide, tall = WIDTH - left - right, height - top - bottom

    def px(x: float) -> float:
        return left + wide * (x - low_x) / max(high_x - low_x, 1e-9)

    def py(y: float) -> float:
        return top + tall * (1 - (y - low) / (high - low))

    parts = _grid(low, high, low_x, high_x, px, py, left, wide, top + tall, unit)
    legend = sorted(enumerate(lines), key=lambda item: -item[1].points[-1][1])
    for place, (i, line) in enumerate(legend):
        color, main = PALETTE[i % len(PALETTE)], heavy_first and i == 0
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line.points)
        stroke = 3.5 if main else 1.6
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{stroke}"/>'
        )
        if len(line.points) <= DOTTED:
            parts += [
                f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="{1 + stroke}" fill="{color}"/>'
                for x, y in line.points
            ]
        y = top + 10 + place * 19
        parts.append(
            f'<line x1="{WIDTH - right + 18}" x2="{WIDTH - right + 42}" y1="{y}" y2="{y}" '
            f'stroke="{color}" stroke-width="{stroke}"/>'
        )
        parts.append(text(WIDTH - right + 48, y + 4, line.name, css="lane" if main else "small"))
    parts.append(text(left + wide / 2, height - 6, x_name, anchor="middle", css="small"))
    return svg(WIDTH, height, parts, title)


def _grid(low, high, low_x, high_x, px, py, left, wide, floor, unit) -> list[str]:  # type: ignore[no-untyped-def]
    step, parts = _nice((high - low) / 8), []
    for i in range(math.ceil(low / step), int(high / step) + 1):
        y = py(i * step)
        parts.append(
            f'<line x1="{left}" x2="{left + wide}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        )
        value = unit(i * step) if i else "0"
        parts.append(text(left - 8, y + 4, value, anchor="end", css="small"))
    step = _nice((high_x - low_x) / 8 if high_x > low_x else 1.0)
    first = math.ceil(low_x / step)
    parts.extend(
        text(px(i * step), floor + 16, f"{i * step:g}", anchor="middle", css="small")
        for i in range(first, int(high_x / step) + 1)
    )
    return parts


def legend() -> str:
    """Which colour is which device."""
    names = (("gpu", "GPU"), ("npu", "NPU"), ("rest", "other operators (norms, attention, …)"))
    return "".join(
        f'<span class="key"><i style="background:{COLORS[key]}"></i>{name}</span>'
        for key, name in names
    )


__all__ = ["curves", "cuts", "front", "legend", "timeline", "where"]
