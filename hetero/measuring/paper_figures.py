"""Figures of HeteroLLM's evaluation, one by one: the paper's, predicted and executed numbers."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any, Final, NamedTuple

from hetero.errors import UserError
from hetero.measuring.executed import opened, plan_of
from hetero.measuring.reproduction import (
    MISALIGNED,
    MODELS,
    STRATEGIES,
    ExecutedChip,
    Kind,
    PaperChip,
    scenario,
)
from hetero.profiler.records import DeviceProfile
from hetero.profiler.table_data import TableData
from hetero.runtime.engine import Engine
from hetero.runtime.program import RUN, SUBMIT, WAIT

PAPER: Final = "HeteroLLM"
LENGTHS: Final = (64, 256, 1024)
SYSTEMS: Final = {"gpu-only": "GPU-only", "layer": "Hetero-layer", "auto": "Hetero-tensor"}
TIMELINE: Final = 11  # the figure that is a timeline, not numbers
NOTE: Final = "The paper's text states few of its bars; its other engines are not simulated."
ACTIONS: Final = {SUBMIT: "submit", RUN: "run", WAIT: "wait"}


class Number(NamedTuple):
    """One bar of a figure: what it is, and its formula (`paper_claims.toml` explains them)."""

    what: str
    formula: str


class Figure(NamedTuple):
    """A figure of numbers of one unit."""

    title: str
    unit: str
    numbers: Callable[[], Iterator[Number]]
    kind: Kind = "simulated"


def _prefill() -> Iterator[Number]:
    for model in MODELS:
        for m in LENGTHS:
            for system, name in SYSTEMS.items():
                yield Number(f"{model}, {m} tokens, {name}", f"speed('{model}', '{system}', {m})")


def _misaligned() -> Iterator[Number]:
    for m in MISALIGNED:
        for system, name in STRATEGIES.items():
            yield Number(f"{m} tokens, {name}", f"1e3 * seconds('{system}', {m})")


def _synchronised(system: str, m: int) -> Iterator[Number]:
    for model in MODELS:
        where = f"{model}, {f'{m} tokens' if m else 'decode'}, {SYSTEMS[system]}"
        yield Number(f"{where}, fast", f"speed('{model}', '{system}', {m})")
        yield Number(f"{where}, without", f"slow('{model}', '{system}', {m})")


def _fast_prefill() -> Iterator[Number]:
    for m in LENGTHS:
        for system in ("layer", "auto"):
            yield from _synchronised(system, m)


def _decode() -> Iterator[Number]:
    for model in MODELS:
        for system in ("gpu-only", "auto"):
            yield Number(f"{model}, {SYSTEMS[system]}", f"speed('{model}', '{system}', 0)")


def _energy() -> Iterator[Number]:
    for system, name in SYSTEMS.items():
        yield Number(name, f"joules('{system}')")


FIGURES: Final[Mapping[int, Figure]] = {
    13: Figure("Prefill speed", "tok/s", _prefill),
    14: Figure("Prefill of misaligned lengths, Llama-8B", "ms", _misaligned),
    15: Figure("Prefill with and without fast synchronisation", "tok/s", _fast_prefill),
    16: Figure("Decoding after 256 tokens", "tok/s", _decode),
    17: Figure("Decoding with and without fast synchronisation", "tok/s",
               lambda: _synchronised("auto", 0)),
    19: Figure("Energy of a prefill of 256 tokens, Llama-8B", "J", _energy, "fitted"),
}  # fmt: skip
SHOWN: Final = tuple(sorted({TIMELINE, *FIGURES}))


class FigureNumbers(NamedTuple):
    """The numbers of one figure, as a table and as rows of JSON."""

    table: TableData
    rows: tuple[Mapping[str, Any], ...]


def figure(number: int, profile: str) -> FigureNumbers:
    """Return one of `SHOWN`. Raises `UserError` for others."""
    if number not in SHOWN:
        known = ", ".join(map(str, SHOWN))
        raise UserError(f"figure {number} of HeteroLLM has no numbers here: choose one of {known}")
    chip = PaperChip(DeviceProfile.load(profile))
    return _timeline(chip) if number == TIMELINE else _bars(number, FIGURES[number], chip)


def _bars(number: int, shown: Figure, chip: PaperChip) -> FigureNumbers:
    executed, claims = ExecutedChip(chip), _claims()
    known = {str(x["formula"]): chip.value(x["paper"]) for x in claims["claim"]}
    rows: list[dict[str, Any]] = [
        {
            "paper": PAPER, "item": f"figure {number}", "what": x.what, "unit": shown.unit,
            "paper_value": known.get(x.formula), "predicted": chip.value(x.formula),
            "executed": executed.value(x.formula), "kind": shown.kind,
        }
        for x in shown.numbers()
    ]  # fmt: skip
    head = ("", "paper", "predicted", "executed", "executed / predicted", "kind")
    cells = tuple(
        (
            str(row["what"]),
            "" if row["paper_value"] is None else f"{row['paper_value']:.4g}",
            f"{row['predicted']:.4g}",
            f"{row['executed']:.4g}",
            f"{100 * (row['executed'] / row['predicted'] - 1):+.1f} %",
            str(row["kind"]),
        )
        for row in rows
    )
    title = f"Figure {number}: {shown.title} ({shown.unit})"
    return FigureNumbers(TableData(title, head, cells, NOTE, numbers=head[1:5]), tuple(rows))


def _claims() -> dict[str, Any]:
    """Return what the paper's text states."""
    file = resources.files("hetero.measuring") / "data" / "paper_claims.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _timeline(chip: PaperChip) -> FigureNumbers:
    """Return one layer of Llama-8B as the control thread and both devices work through it."""
    rows: list[Mapping[str, Any]] = []
    planner, model = chip.fast["Llama-8B"], MODELS["Llama-8B"]
    for m in (256, 0):
        plan = plan_of(planner, scenario(m), "auto")
        with opened(planner.profile, model, plan) as (_, engine, context):
            for _ in range(2):
                context.truncate(0)
                engine.prefill(context, [1] * 256)
            for _ in range(4 if m == 0 else 0):
                engine.decode(context, 1)
            rows += _layer(engine, planner.spec.layers // 2)
    head = (
        "phase", "operation", "action", "device", "from", "to", "asleep", "kernel from", "kernel to"
    )  # fmt: skip
    names = ("phase", "what", "action", "device")
    times = ("start_s", "end_s", "slept_s", "kernel_start_s", "kernel_end_s")
    cells = tuple(
        (
            *(str(row[x]) for x in names),
            *("" if row[x] is None else f"{1e6 * row[x]:.1f}" for x in times),
        )
        for row in rows
    )
    title = "Figure 11: Fast synchronisation, one layer of Llama-8B, 256 tokens (µs, simulated)"
    return FigureNumbers(TableData(title, head, cells, lead=2, numbers=head[4:]), tuple(rows))


def _layer(engine: Engine, layer: int) -> Iterator[Mapping[str, Any]]:
    """Yield the actions of one layer in the last step, from its first."""
    step, run = engine.runner.last_step, engine.runner.last_run
    slept = iter(run.slept)
    origin_s: float | None = None
    for at, action in enumerate(step.program):
        launch, asleep_s = step.launches[action.launch], None
        if action.code == WAIT:
            asleep_s = next(slept)
        if not launch.node.startswith(f"layer{layer}."):
            continue
        origin_s = run.stamps[at] if origin_s is None else origin_s
        completion = step.completions[action.launch]
        span = None if completion is None or action.code != SUBMIT else completion.span()
        yield {
            "paper": PAPER, "item": "figure 11", "what": launch.node.partition(".")[2],
            "phase": step.phase, "action": ACTIONS[action.code], "device": launch.kind,
            "start_s": run.stamps[at] - origin_s, "end_s": run.stamps[at + 1] - origin_s,
            "slept_s": asleep_s, "kernel_start_s": span and span[0] - origin_s,
            "kernel_end_s": span and span[1] - origin_s, "kind": "simulated",
        }  # fmt: skip
