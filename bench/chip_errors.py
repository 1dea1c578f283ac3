"""How well fitted chips predict models that a fit has not seen, and whether the fastest is named.

python bench/chip_errors.py                                   # by processor, and the shares
python bench/chip_errors.py --csv results/fitted_chips.csv    # by chip, processor and context, too

Every model of `data/published_llm_rates.csv` is predicted by a fit to the others (models with
experts or per-layer embeddings are in no fit). A cell is a chip, a model, a phase and a context; it
counts where the two fastest of its processors differ by more than 10 %.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from chips import APART, CHIPS, ROWS, Shipped, units_of
from common import one_command, table

from hetero.measuring.rate_files import Source, read_rates
from hetero.profiler.fitted_units import LeftOut, Rate, predicted, rates_of

CLOSE = 1.1  # times the next best: less is no question
MEDIAN, NINTH = 20, 40  # most percent of error, of half the rows and of nine in ten
NAMED = 85  # least percent of cells whose fastest processor is named


class Row(NamedTuple):
    """A published rate and its prediction."""

    chip: str
    unit: str
    engine: str
    model: str
    phase: str
    context: int
    tokens_per_s: float
    predicted: float

    @property
    def off(self) -> float:
        """The relative error, without its sign."""
        return abs(self.predicted / self.tokens_per_s - 1)


def rows_of(name: str, shipped: Shipped, rates: Mapping[Source, Sequence[Rate]]) -> list[Row]:
    """Return every row of a chip, predicted by a fit to other models."""
    rows = []
    for fitted in units_of(shipped.row, rates):
        unit = fitted.unit
        values, stack = rates_of(unit)
        others = [
            LeftOut(x, predicted(values, stack, x) / x.tokens_per_s - 1)
            for x in rates[Source(shipped.row, unit.engine, unit.device)]  # type: ignore[arg-type]
            if x.model.name in APART
        ]
        for rate, error in (*fitted.errors, *others):
            context = rate.tokens if rate.phase == "prefill" else rate.depth
            speed = rate.tokens_per_s
            rows.append(
                Row(name, unit.device, unit.engine, rate.model.name, rate.phase, context, speed,
                    speed * (1 + error))
            )  # fmt: skip
    return rows


def quantiles(rows: Iterable[Row], phase: str) -> tuple[str, str, str]:
    """Return median and ninth decile of the errors in a phase, in percent, and their number."""
    off = [row.off for row in rows if row.phase == phase]
    if not off:
        return "", "", "0"
    return f"{100 * np.median(off):.0f}", f"{100 * np.quantile(off, 0.9):.0f}", str(len(off))


def right(rows: Iterable[Row], npu: str) -> dict[str, tuple[int, int]]:
    """Return by phase how many cells name the fastest processor rightly, and all that count."""
    cells: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.unit != "npu" or row.engine == npu:
            cells[row.chip, row.model, row.phase, str(row.context)][row.unit] = row
    counts: dict[str, tuple[int, int]] = {"prefill": (0, 0), "decode": (0, 0)}
    for (_, _, phase, _), units in cells.items():
        ordered = sorted(units.values(), key=lambda row: -row.tokens_per_s)
        if len(ordered) < 2 or ordered[0].tokens_per_s <= CLOSE * ordered[1].tokens_per_s:
            continue
        named = max(ordered, key=lambda row: row.predicted) is ordered[0]
        done, every = counts[phase]
        counts[phase] = done + named, every + 1
    return counts


def lines_of(rows: Sequence[Row], *keys: str) -> list[list[str]]:
    """Return a line of errors for each value of these fields."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(str(getattr(row, key)) for key in keys)].append(row)
    return [
        [*group, *quantiles(own, "prefill"), *quantiles(own, "decode")]
        for group, own in groups.items()
    ]


def within(rows: Sequence[Row]) -> list[list[str]]:
    """Return by engine and phase how many chips, units and contexts keep `MEDIAN` and `NINTH`."""
    groups: dict[tuple[str, ...], dict[tuple[str, int], list[Row]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        groups[row.unit, row.engine, row.phase][row.chip, row.context].append(row)
    lines = []
    for key, cells in groups.items():
        errors = [[float(x) for x in quantiles(own, key[2])[:2]] for own in cells.values()]
        kept = [sum(x[i] <= bound for x in errors) for i, bound in enumerate((MEDIAN, NINTH))]
        lines.append([*key, *(f"{x} of {len(errors)}" for x in kept)])
    return lines


def main(
    out: Annotated[Path | None, typer.Option("--csv", help="file of all groups")] = None,
) -> None:
    """Print the errors of held-out models, and how often the fastest processor is named."""
    rates = read_rates(ROWS).rates
    rows = [row for name, shipped in CHIPS.items() for row in rows_of(name, shipped, rates)]
    fitted = [row for row in rows if row.model not in APART]
    apart = [row for row in rows if row.model in APART]
    numbers = "median|nine in ten|rows"
    for title, own in (("dense models and delta nets", fitted), ("in no fit", apart)):
        print(f"errors in prompts and in answers, %: {title}\n")
        every = [["all", "", *quantiles(own, "prefill"), *quantiles(own, "decode")]]
        table(f"unit|engine|{numbers}|{numbers}", every + lines_of(own, "unit", "engine"))
        print()
    print("chips and contexts within the bounds: dense models and delta nets\n")
    bounds = f"median at most {MEDIAN} %|nine in ten at most {NINTH} %"
    table(f"unit|engine|phase|{bounds}", within(fitted))
    print()
    shares = []
    for npu in ("llama.cpp", "qairt"):
        counts = right(rows, npu)
        done, every_cell = (sum(x) for x in zip(*counts.values(), strict=True))
        by_phase = [f"{done} of {count}" for done, count in counts.values()]
        shares.append([npu, *by_phase, f"{100 * done / every_cell:.0f}"])
    print(f"cells whose fastest processor is named (asked: {NAMED} %)\n")
    table("NPU by|prompts|answers|fastest named, %", shares)
    if out is not None:
        head = ("chip", "unit", "engine", "context")
        stats = [f"{phase}_{x}" for phase in ("prefill", "decode") for x in ("p50", "p90", "rows")]
        with out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*head, *stats))
            writer.writerows(lines_of(fitted, *head))


app = one_command(main)

if __name__ == "__main__":
    app()
