"""A chip's profile from a benchmark of whole models (`hetero profile --from`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hetero.backends.snapdragon import CHIPS, DEFAULT_CHIP, Chip, chip_named
from hetero.errors import UserError
from hetero.measuring.rate_files import Source, known_graphs, read_rates
from hetero.profiler.fitted_profiles import About, fitted_profile
from hetero.profiler.fitted_units import (
    Rate,
    fit,
    left_out,
    plain_ops,
    stack_of,
    unit_of,
)
from hetero.profiler.records import DeviceProfile, FittedUnit, Phase
from hetero.profiler.table_data import TableData

# Plans are made from the first of a kind: graphs of QNN are hetero's, too.
ORDER: Final = (
    ("gpu", "llama.cpp"), ("npu", "qairt"), ("npu", "llama.cpp"), ("cpu", "llama.cpp"),
)  # fmt: skip
PHASES: Final[dict[Phase, str]] = {"prefill": "prompts (-p)", "decode": "answers (-n)"}


class RateProfile(NamedTuple):
    """The profile, and sentences about rows that were not used and what was assumed."""

    profile: DeviceProfile
    notes: tuple[str, ...]


def profile_of_rates(path: str | Path, soc: str | None = None) -> RateProfile:
    """Return the profile of the chip whose rates a file has.

    `soc` says which chip that is, where the file does not say it or has several. Raises `UserError`
    for files without the rates that a profile needs.
    """
    file = read_rates(path)
    label, own = _own(path, file.rates, soc)
    chip, notes = _chip(label, soc)
    name = soc or (chip.name if not notes else Path(path).stem)
    units = [_unit(path, source, rows) for source, rows in own.items()]
    if all(unit.device == "cpu" for unit in units):
        raise UserError(
            f"{path} has rates of the CPU only, and plans are for a GPU or an NPU: add a benchmark "
            "of one (llama-bench --device HTP0, or GPUOpenCL)"
        )
    about = About(
        name,
        label or chip.title,
        f"fitted to the rates of {Path(path).name}",
        time.strftime("%Y-%m-%d"),
    )
    profile = fitted_profile(about, chip, units, plain_ops(known_graphs()))
    skipped = [f"{count} rows were skipped: {why}" for why, count in file.skipped.items()]
    return RateProfile(profile, (*notes, *skipped))


def _own(
    path: str | Path, rates: Mapping[Source, Sequence[Rate]], soc: str | None
) -> tuple[str, dict[Source, Sequence[Rate]]]:
    """Return the label of the one chip in a file, and its rates in the order of `ORDER`."""
    labels = sorted({source.chip for source in rates})
    if len(labels) > 1:
        labels = [x for x in labels if soc is not None and _is_named(x, soc)] or labels
    if len(labels) > 1:
        raise UserError(
            f"{path} has rates of {len(labels)} chips ({', '.join(labels)}): name one with --soc"
        )
    own = {source: rows for source, rows in rates.items() if source.chip == labels[0]}
    ranked = sorted(own, key=lambda source: ORDER.index((source.unit, source.engine)))
    return labels[0], {source: own[source] for source in ranked}


def _is_named(label: str, soc: str) -> bool:
    chip = chip_named(label)
    return label.lower() == soc.lower() or (chip is not None and chip == _known(soc))


def _known(soc: str) -> Chip | None:
    return CHIPS.get(soc.lower()) or chip_named(soc)


def _chip(label: str, soc: str | None) -> tuple[Chip, list[str]]:
    """Return the chip whose abilities the profile has, and a note where it is assumed."""
    chip = (_known(soc) if soc is not None else None) or chip_named(label)
    if chip is not None:
        return chip, []
    assumed = CHIPS[DEFAULT_CHIP]
    return assumed, [f"the chip is not known, its abilities are {assumed.label}'s: --soc names it"]


def _unit(path: str | Path, source: Source, rows: Sequence[Rate]) -> FittedUnit:
    """Return the fit of one processor. Raises `UserError` where a phase has no row."""
    for phase, name in PHASES.items():
        if not any(row.phase == phase for row in rows):
            raise UserError(
                f"{path} has no rate of {name} on the {source.unit.upper()} ({source.engine}): a "
                "fit needs both"
            )
    stack = stack_of(source.engine)
    errors, rates = left_out(rows, stack), fit(rows, stack)
    return unit_of(source.unit, source.engine, stack, rates, errors)


def units_table(units: Iterable[FittedUnit]) -> TableData:
    """Return a line for each processor: its speeds, and the errors of models left out."""
    head = ("device", "engine", "arithmetic", "memory", "a call", "prompts off", "answers off")
    rows = []
    for unit in units:
        errors = {x.phase: f"{x.mape:.0%}" for x in unit.validation}
        rows.append((
            unit.device, unit.engine, f"{unit.flops_per_s / 1e12:.2f} TFLOP/s",
            f"{unit.bandwidth_bytes_per_s / 1e9:.0f} GB/s", f"{unit.call_s * 1e6:.0f} µs",
            errors.get("prefill", "not checked"), errors.get("decode", "not checked"),
        ))  # fmt: skip
    note = "Off: mean errors of models that a fit to the others predicts."
    return TableData("Fitted to rates of whole models", head, tuple(rows), note, 2, head[2:])
