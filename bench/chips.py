"""Profiles of six chips, fitted to the speeds that Qualcomm publishes of whole models.

python bench/chips.py               # fit, print the errors, write the shipped profiles
python bench/chips.py --check       # exit 1 if the shipped profiles are not a fit's
python bench/chips.py --npu-stack llama.cpp --out folder

`data/published_llm_rates.csv` has the rows: rates of prompts and answers of text models, from the
files `models/*/perf.yaml` of Qualcomm's package qai-hub-models 0.65.0 (2026-10-21, BSD-3-Clause).
Two engines of one NPU are in it: `qairt`, whose graphs are those that hetero makes by QNN, and
llama.cpp's Hexagon backend. The GPU is llama.cpp's, by OpenCL.

A unit of a chip is seven numbers (`hetero.profiler.fitted_units`). Each model is predicted by a fit
to the others: that is the error which the profiles state. Costs between the devices are not in such
rows: those of the simulated Snapdragon 8 Gen 3 are taken, and memory is assumed to give both units
together no more than the fastest one has been seen to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from common import DATA, one_command, table

from hetero.backends.host.files import atomic_write
from hetero.backends.snapdragon import find_chip
from hetero.measuring.rate_files import Source, read_rates
from hetero.models import model_spec
from hetero.profiler.fitted_profiles import About, fitted_profile
from hetero.profiler.fitted_units import LeftOut, Rate, fit, left_out, plain_ops, stack_of, unit_of
from hetero.profiler.records import FittedUnit

ROWS = DATA / "published_llm_rates.csv"
PROFILES = DATA.parents[1] / "profiler" / "profiles"
SOURCE = "fitted to published rates (Qualcomm qai-hub-models 0.65.0, 2026-10-21)"
CREATED = "2026-11-27"
# Models with experts or per-layer embeddings are predicted, and not fitted to.
APART = ("gemma-4-e2b", "gemma-4-e4b", "gpt-oss-20b")
STACKS = ("qairt", "llama.cpp")


class Shipped(NamedTuple):
    """A profile: its chip in the rows, the chip whose abilities it has, and its name for people."""

    row: str
    soc: str
    title: str


CHIPS = {
    "snapdragon-8-elite-gen-5": Shipped("galaxy-s26 (8 Elite Gen 5)", "sm8850", "8 Elite Gen 5"),
    "snapdragon-8-elite": Shipped("galaxy-s25 (8 Elite)", "sm8750", "8 Elite"),
    "snapdragon-x2-elite": Shipped("x2-elite", "sc8480xp", "X2 Elite"),
    "snapdragon-x-elite": Shipped("x-elite", "sc8380xp", "X Elite"),
    "iq-9075": Shipped("iq-9075", "qcs9075", "IQ-9075"),
    # The compiler's number of its chip, QCS8275, is not published: the larger board's abilities.
    "ventuno-q": Shipped("ventuno-q", "qcs9075", "Ventuno Q"),
}


class Fitted(NamedTuple):
    """A unit of a chip, and every row of it, predicted by a fit to the other models."""

    unit: FittedUnit
    rows: Sequence[Rate]
    errors: Sequence[LeftOut]


def units_of(
    chip: str, rates: Mapping[Source, Sequence[Rate]], npu_stack: str = "qairt"
) -> list[Fitted]:
    """Return the fits to one chip's rows, the NPU by `npu_stack` first."""
    other = next(x for x in STACKS if x != npu_stack)
    kinds = (("gpu", "llama.cpp"), ("npu", npu_stack), ("cpu", "llama.cpp"), ("npu", other))
    fitted = []
    for kind, engine in kinds:
        rows = [x for x in rates[Source(chip, engine, kind)] if x.model.name not in APART]
        stack = stack_of(engine)
        errors = left_out(rows, stack)
        fitted.append(Fitted(unit_of(kind, engine, stack, fit(rows, stack), errors), rows, errors))
    return fitted


def shares(off: Iterable[LeftOut], phase: str) -> str:
    """Return median and ninth decile of errors."""
    sizes = np.abs([x.error for x in off if x.row.phase == phase])
    return f"{100 * np.median(sizes):.0f} % ({100 * np.quantile(sizes, 0.9):.0f} %)"


def line(name: str, fitted: Fitted) -> list[str]:
    """Return a line of the table of fits."""
    unit = fitted.unit
    return [
        name, unit.device, unit.engine, str(len(fitted.rows)), f"{unit.flops_per_s / 1e12:.2f}",
        f"{unit.bandwidth_bytes_per_s / 1e9:.0f}", f"{unit.call_s * 1e6:.0f}",
        shares(fitted.errors, "prefill"), shares(fitted.errors, "decode"),
    ]  # fmt: skip


def main(
    check: Annotated[bool, typer.Option(help="exit 1 if the files are not a fit's")] = False,
    npu_stack: Annotated[str, typer.Option(help="whose rates the NPU has")] = "qairt",
    out: Annotated[Path | None, typer.Option(help="folder for files, not the shipped ones")] = None,
) -> None:
    """Fit the units of each chip to published rates, and write the profiles."""
    if npu_stack not in STACKS:
        raise typer.BadParameter(f"--npu-stack is one of {', '.join(STACKS)}, got {npu_stack!r}")
    if npu_stack != "qairt" and out is None:
        raise typer.BadParameter("the shipped profiles are qairt's: another stack needs --out")
    rates = read_rates(ROWS).rates
    fitted_to = {x.model.name for rows in rates.values() for x in rows} - set(APART)
    plain = plain_ops(model_spec(name) for name in fitted_to)
    lines, files = [], {}
    for name, shipped in CHIPS.items():
        fitted = units_of(shipped.row, rates, npu_stack)
        lines += [line(name, x) for x in fitted]
        about = About(name, shipped.title, SOURCE, CREATED)
        units = [x.unit for x in fitted]
        profile = fitted_profile(about, find_chip(shipped.soc), units, plain)
        files[(out or PROFILES) / f"{name}.json"] = profile.to_json()
    print(f"{SOURCE}; errors of models left out of the fit: median (nine in ten)\n")
    table("profile|unit|engine|rows|matmuls, TFLOP/s|memory, GB/s|a call, µs|prompt|answer", lines)
    if check:
        stale = [str(x) for x, text in files.items() if not same(x, text)]
        print("stale: " + ", ".join(stale) if stale else "files are up to date")
        raise typer.Exit(bool(stale))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)


def same(path: Path, text: str) -> bool:
    """Return whether a file is this document."""
    return path.exists() and json.loads(path.read_text("utf-8")) == json.loads(text)


app = one_command(main)

if __name__ == "__main__":
    app()
