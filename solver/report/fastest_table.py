"""The table that says where prompts and decode steps are fastest."""

from __future__ import annotations

from collections.abc import Iterable

from hetero.profiler.table_data import TableData
from hetero.solver.plan import FastestDevices, Plan
from hetero.solver.report import content, units

PHASES = {"prefill": "prompt", "decode": "answer"}


def table(plan: Plan) -> TableData | None:
    """Return a line for each depth and phase; None for a plan that does not say it."""
    if not plan.fastest:
        return None
    head = ("tokens", "of", "fastest", "tokens/s", "gain", "over", "sure")
    note = (
        "Alone or cut; an answer's token comes after so many; sure: of the order, by the "
        "profile's errors."
    )
    title = f"Where it is fastest ({content.kind(plan)})"
    numbers = ("tokens/s", "gain", "sure")
    return TableData(title, head, tuple(map(_line, plan.fastest)), note, 2, numbers)


def _line(step: FastestDevices) -> tuple[str, ...]:
    sure = "" if step.confidence is None else f"{min(100 * step.confidence, 99):.0f} %"
    return (
        f"{step.depth:,}",
        PHASES[step.phase],
        named(step.devices),
        units.rate(step.tokens_per_s),
        "" if step.gain is None else f"{step.gain:.2f} ×",
        named(step.over),
        sure,
    )


def named(devices: Iterable[str]) -> str:
    """Return `GPU + NPU`."""
    return " + ".join(x.upper() for x in devices)
