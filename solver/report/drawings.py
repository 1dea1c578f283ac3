"""Drawings of a plan.

Lanes and tiles are rectangles to scale, which are stretched to the page's width while their labels
are text of the page and stay readable; lines are charts of matplotlib.

Rectangles are by hand because no library draws a matmul's tiles, and a chart's text would shrink
with it on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from hetero.backends.protocol import EVERY_KIND, KINDS
from hetero.profiler.model_graph import role_of_op
from hetero.profiler.pages import COLORS, LINES, markup
from hetero.profiler.table_data import TableData
from hetero.solver.plan import FrontPoint, OpPlan, Plan, Total
from hetero.solver.report import units
from hetero.solver.report.content import (
    ALONE,
    candidates_of,
    display,
    drawn_tokens,
    label,
    reason,
    share,
)

WIDTH: Final = 960.0
MIN_LABEL: Final = 4.0  # percent of the width, below which a bar has no name in it
LEGEND: Final = (("gpu", "GPU"), ("npu", "NPU"), ("rest", "other operators (norms, attention, …)"))
LEGEND_OF_THREE: Final = (*LEGEND[:2], ("cpu", "CPU"), LEGEND[2])


class Bar(NamedTuple):
    """A piece of work on a lane."""

    lane: str
    start_s: float
    end_s: float
    name: str
    rest: bool = False


class Label(NamedTuple):
    """The name of a bar, in percent of the lane."""

    left: str
    width: str
    name: str


class Lane(NamedTuple):
    """Work of one device in a block."""

    name: str
    busy: str
    svg: Markup
    bars: tuple[Label, ...]


class Block(NamedTuple):
    """One transformer block, and its matmuls in words."""

    title: str
    whole: str
    lanes: tuple[Lane, ...]
    said: str


class Cut(NamedTuple):
    """One matmul: its tiles, the devices, the reason, and the alternatives."""

    op: str
    svg: Markup
    strategy: str
    share: str
    time: str
    why: str
    others: TableData


class DrawnStep(NamedTuple):
    """The cuts of a step; a single row of tokens is drawn flat."""

    title: str
    flat: bool
    cuts: tuple[Cut, ...]


def _svg(width: float, height: float, parts: Iterable[str], title: str, style: str = "") -> Markup:
    """Return the rectangles that fill their place, whatever its shape."""
    styled = f' style="{style}"' if style else ""
    return markup(
        f'<svg viewBox="0 0 {width:.1f} {height:.1f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}"{styled}>{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, color: str, tip: str, css: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.8):.2f}" '
        f'height="{max(height, 0.8):.2f}" fill="var(--{color})" class="{css}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def block_bars(plan: Plan, total: Total) -> list[Bar]:
    """Return one block: matmuls as planned, the other operators on their device."""
    rest = plan.non_matmul.prefill if total.phase == "prefill" else plan.non_matmul.decode
    between = {"qkv": "attention", "v": "attention", "o": "norm", "conv_in": "convolution",
               "conv_out": "norm", "gate_up": "activation", "up": "activation",
               "down": "norm"}  # fmt: skip
    now, bars = 0.0, []
    for op in plan.ops:
        if op.phase != total.phase or op.m != drawn_tokens(total) or op.op == "lm_head":
            continue
        gpu, npu, cpu = op.gpu_s or 0.0, op.npu_s or 0.0, op.cpu_s or 0.0
        whole = max(op.predicted_s or 0.0, gpu, npu, cpu)
        start = now + whole - max(gpu, npu, cpu)  # synchronisation comes first
        if npu:
            bars.append(Bar("npu", start, start + npu, op.op))
        if gpu:
            bars.append(Bar("gpu", start, start + gpu, op.op))
        if cpu:
            bars.append(Bar("cpu", start, start + cpu, op.op))
        now += whole
        part = op.op if op.op in total.non_matmul_s else between.get(role_of_op(op.op), "")
        seconds = total.non_matmul_s.get(part, 0.0)
        if seconds:
            name = f"after {part}" if part == op.op else part
            bars.append(Bar(rest, now, now + seconds, name, True))
            now += seconds
    return bars


def block(plan: Plan, total: Total) -> Block | None:
    """Return one block with a lane for each device."""
    bars = block_bars(plan, total)
    if not bars:
        return None
    end_s = max(bar.end_s for bar in bars)
    kinds = [kind for kind in EVERY_KIND if kind in KINDS or any(b.lane == kind for b in bars)]
    lanes = tuple(_lane(kind, [b for b in bars if b.lane == kind], end_s) for kind in kinds)
    matmuls: dict[str, list[str]] = {}
    for bar in bars:
        took = f"{bar.lane.upper()} {units.duration(bar.end_s - bar.start_s)}"
        matmuls.setdefault(bar.name, []).append(took)
    said = "; ".join(f"{name}: {', '.join(times)}" for name, times in matmuls.items())
    return Block(label(total), units.duration(end_s), lanes, said)


def _lane(kind: str, bars: Sequence[Bar], end_s: float) -> Lane:
    def percent(seconds: float) -> float:
        return 100 * seconds / end_s

    drawn = [
        _rect(
            WIDTH * b.start_s / end_s,
            0,
            WIDTH * (b.end_s - b.start_s) / end_s,
            40,
            "rest" if b.rest else kind,
            f"{b.name}: {units.duration(b.end_s - b.start_s)}",
            "bar",
        )
        for b in bars
    ]
    labels = tuple(
        Label(f"{percent(b.start_s):.2f}", f"{percent(b.end_s - b.start_s):.2f}", b.name)
        for b in bars
        if percent(b.end_s - b.start_s) > max(MIN_LABEL, 0.9 * len(b.name))
    )
    busy = sum(b.end_s - b.start_s for b in bars) / end_s
    svg = _svg(WIDTH, 40, drawn, f"{kind} in one block")
    return Lane(kind.upper(), f"{100 * busy:.0f} %", svg, labels)


def step(plan: Plan, total: Total) -> DrawnStep | None:
    """Return the tiles of every matmul of a step: rows to the right, tokens down, to one scale."""
    m = drawn_tokens(total)
    ops = [o for o in plan.ops if o.phase == total.phase and o.m == m]
    if not ops:
        return None
    scale = WIDTH / sum(op.n for op in ops)
    widest = max(op.n for op in ops)
    flat = total.phase != "prefill"
    cuts = tuple(_cut(op, m, scale, 28.0 if flat else 110.0, widest) for op in ops)
    return DrawnStep(label(total), flat, cuts)


def _cut(op: OpPlan, m: int, scale: float, height: float, widest: int) -> Cut:
    parts, width = [], op.n * scale
    for tile in op.tiles:
        (t0, t1), (r0, r1) = tile.tokens, tile.rows
        t1 = m if t1 is None else t1
        tip = f"{tile.device.upper()}: tokens {t0} to {t1}, rows {r0} to {r1}"
        tip += f", graph of {tile.graph_size}" if tile.graph_size else ""
        x, wide = width * r0 / op.n, width * (r1 - r0) / op.n
        parts.append(
            _rect(x, height * t0 / m, wide, height * (t1 - t0) / m, tile.device, tip, "tile")
        )
    svg = _svg(width, height, parts, f"tiles of {op.op}", f"width:{100 * op.n / widest:.1f}%")
    name = f"{op.op}, {op.n} × {op.k}"
    time = units.duration(op.predicted_s)
    others = candidates_of(op)._replace(title="what else there was")
    return Cut(name, svg, op.strategy, share(op), time, reason(op), others)


def curves(plan: Plan) -> Any:
    """Return prefill time by length.

    Single devices in their colours, this plan's lengths as dots.
    """
    from hetero.profiler.pages.figures import Chart, new_axes, own_style, svg_of

    with own_style():
        axes, shades = new_axes(height=4.0), iter(LINES)
        for curve in plan.curves:
            points = [(p.m, p.seconds) for p in curve.points if p.seconds is not None]
            if not points:
                continue
            kind = {"gpu-only": "gpu", "npu-only": "npu", "auto": "both"}.get(curve.strategy)
            color = COLORS[kind] if kind else next(shades)
            (line,) = axes.plot(
                *zip(*points, strict=True), color=color, lw=2.4 if kind else 1.0,
                label=display(curve.strategy), zorder=3 if kind else 2,
            )  # fmt: skip
            line.set_gid(f"curve-{curve.strategy}")
        own = [(t.m, t.predicted_s) for t in plan.totals if t.phase == "prefill"]
        shown = [point for point in own if any(p.m == point[0] for p in plan.curves[0].points)]
        if shown:
            (dots,) = axes.plot(
                *zip(*shown, strict=True), "o", color="#1a1d21", ms=5, label="this plan", zorder=4
            )
            dots.set_gid("this-plan")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens")
        axes.set_ylabel("s")
        axes.legend(ncols=2, loc="upper left", fontsize=7.5)
        title = "Prefill time by length"
        note = f"Dots: this plan. Heavy lines: one device, and {ALONE}."
        return Chart(title, note, svg_of(axes, title))


def front(plan: Plan) -> Any:
    """Return energy against time of every step, both relative to its fastest plan.

    None without energy.
    """
    from hetero.profiler.pages.figures import Chart, new_axes, own_style, svg_of

    steps: dict[str, list[FrontPoint]] = {}
    for point in plan.front:
        steps.setdefault(f"{point.phase} {point.m}", []).append(point)
    steps = {name: points for name, points in steps.items() if points[0].energy_j}
    if not steps:
        return None
    with own_style():
        axes = new_axes()
        for color, (name, points) in zip(
            (COLORS["both"], *LINES * math.ceil(len(steps) / len(LINES))), steps.items(),
            strict=False,
        ):  # fmt: skip
            first = points[0]
            x = [100 * p.seconds / first.seconds for p in points]
            y = [100 * p.energy_j / first.energy_j for p in points]
            (line,) = axes.plot(x, y, "o-", color=color, ms=4, lw=1.4, label=name)
            line.set_gid(f"front-{name.replace(' ', '-')}")
        axes.set_xlabel("time, % of the fastest")
        axes.set_ylabel("energy, % of the fastest's")
        axes.legend()
        title = "Energy against time"
        note = "Relative to the fastest of each step."
        return Chart(title, note, svg_of(axes, title))


__all__ = ["LEGEND", "LEGEND_OF_THREE", "block", "curves", "front", "step"]
