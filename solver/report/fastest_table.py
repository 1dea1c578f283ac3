"""The table that says where prompts and decode steps are fastest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetero.profiler.table_data import TableData
from hetero.solver.plan import DecodeBand, FastestDevices, Plan
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


def answers(plan: Plan) -> tuple[str, ...]:
    """Return the sentences on decoding by depth: where it is fastest, and where this plan moves."""
    said, more = [], _beyond(plan)
    if len(plan.fastest_answers) > 1:
        steps = [(x.depth_from, named(x.devices) + _by(x.gain)) for x in plan.fastest_answers]
        said.append(f"Answers are fastest on {_moving(steps)} ({content.kind(plan)}){more}.")
    if plan.bands:
        steps = [(0, named(sorted(plan.devices_of("decode"))))]
        steps += [(x.depth_from, _band(x) + _by(x.gain)) for x in plan.bands]
        said.append(f"This plan decodes on {_moving(steps)}{more}.")
    return tuple(said)


def _beyond(plan: Plan) -> str:
    """Return what each gain is more than; nothing of a plan that was made by hand."""
    if plan.errors:
        return ", each by more than predictions are off on average"
    return "" if plan.margin is None else f", each by more than the margin of {plan.margin:.0%}"


def _by(gain: float | None) -> str:
    """Return by how much what takes over is faster at its depth."""
    return "" if gain is None else f" ({gain:.2f} ×)"


def _moving(steps: Sequence[tuple[int, str]]) -> str:
    """Return `CPU until 2,944 tokens, then NPU`."""
    (_, text), *others = steps
    return text + "".join(f" until {depth:,} tokens, then {name}" for depth, name in others)


def _band(band: DecodeBand) -> str:
    shared = f" with attention on {band.device.upper()}" if len(band.devices) > 1 else ""
    return named(band.devices) + shared


def _line(step: FastestDevices) -> tuple[str, ...]:
    sure = "" if step.gain is None else "not known"
    if step.confidence is not None:
        sure = f"{min(100 * step.confidence, 99):.0f} %"
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
