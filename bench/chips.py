"""Profiles of six chips, fitted to the speeds that Qualcomm publishes of whole models.

python bench/chips.py               # fit, print the errors, write the shipped profiles
python bench/chips.py --check       # exit 1 if the shipped profiles are not a fit's
python bench/chips.py --npu-stack llama.cpp --out folder

`data/published_llm_rates.csv` has the rows: rates of prompts and answers of text models, from the
files `models/*/perf.yaml` of Qualcomm's package qai-hub-models 0.65.0 (2026-10-21, BSD-3-Clause).
Two engines of one NPU are in it: `qairt`, whose graphs are those that hetero makes by QNN, and
llama.cpp's Hexagon backend. The GPU is llama.cpp's, by OpenCL.

A unit of a chip is six numbers (`Unit`). Each model is predicted by a fit to the others: that is
the error which the profiles state. Costs between the devices are not in such rows: those of the
simulated Snapdragon 8 Gen 3 are taken, and memory is assumed to give both units together no more
than the fastest one has been seen to read.
"""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from common import DATA, one_command, table

import hetero
from hetero.backends import ops
from hetero.backends.formats import WeightFormat
from hetero.backends.host.files import atomic_write
from hetero.backends.opencl import gpu_capabilities
from hetero.backends.qnn import npu_capabilities
from hetero.backends.snapdragon import find_chip
from hetero.models import model_spec
from hetero.profiler.predict import op_name, work
from hetero.profiler.records import CapabilityRecord, DeviceProfile

Floats = npt.NDArray[np.float64]
ROWS = DATA / "published_llm_rates.csv"
PROFILES = DATA.parents[1] / "profiler" / "profiles"
SOURCE = "fitted to published rates (Qualcomm qai-hub-models 0.65.0, 2026-10-21)"
# By the names of the rows. Left out: mixtures of experts, per-layer embeddings, and a model that is
# served with speculation (`llama_v3_2_3b_instruct_ssd`), whose rates are those of guesses.
MODELS = {
    "qwen3_0_6b": "qwen3-0.6b",
    "qwen3_4b": "qwen3-4b",
    "qwen3_4b_instruct_2507": "qwen3-4b",
    "qwen3_8b": "qwen3-8b",
    "qwen3_5_0_8b": "qwen3.5-0.8b",
    "qwen3_5_2b": "qwen3.5-2b",
    "llama_v3_2_1b_instruct": "llama-3.2-1b",
    "llama_v3_8b_instruct": "llama-3-8b",
    "llama_v3_1_8b_instruct": "llama-3-8b",
    "smollm2_1_7b_it": "smollm2-1.7b",
    "falcon_v3_7b_instruct": "falcon3-7b",
    "granite_4_0_micro": "granite-4.0-micro",
    "lfm2_5_1_2b_instruct": "lfm2-1.2b",
}
CALL_TOKENS = {"llama.cpp": 512, "qairt": 128}  # of one call of a prompt
STACKS = ("qairt", "llama.cpp")
CACHE_BYTES = 2  # an fp16 key or value
MAX_M, MAX_CONTEXT = 1024, 4096


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


class Rate(NamedTuple):
    """One published number: tokens per second of a prompt of `context` tokens, or after it."""

    model: str
    context: int
    phase: str
    tokens_per_s: float


class Unit(NamedTuple):
    """The rates of a processor, with a model's weights in 4 bits.

    bandwidth_bytes_per_s       weights and activations
    flops_per_s                 of matmuls
    attention_flops_per_s       of scores and their sums
    cache_bytes_per_s           cached keys and values
    call_s                      each operation, whatever its size
    state_flops_per_s           of a gated delta rule
    """

    bandwidth_bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float
    cache_bytes_per_s: float
    call_s: float
    state_flops_per_s: float


START = Unit(5e10, 5e12, 2e12, 3e10, 2e-5, 1e12)
LEAST = Unit(1e9, 1e10, 1e9, 1e8, 1e-8, 1e8)
MOST = Unit(1e12, 3e14, 1e15, 1e13, 1e-2, 1e15)


def read_rates(path: Path = ROWS) -> dict[tuple[str, str, str], list[Rate]]:
    """Return the rows by chip, engine and unit, of models that hetero knows."""
    rates: dict[tuple[str, str, str], list[Rate]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["model"] not in MODELS or row["precision"] not in ("q4_0", "w4a16"):
                continue
            key, name = (row["chip"], row["engine"], row["unit"]), MODELS[row["model"]]
            for phase in ("prefill", "decode"):
                speed = float(row[f"{phase}_tokens_per_s"] or 0)
                if speed > 0:
                    rates[key].append(Rate(name, int(row["context"]), phase, speed))
    return rates


@cache
def step_work(name: str, m: int, context: int) -> tuple[Floats, Counter[str]]:
    """Return the matmuls (tokens, n, k, count) of a step, and the work of all else, by its kind."""
    matmuls: Counter[tuple[int, int, int]] = Counter()
    rest: Counter[str] = Counter()
    for node in model_spec(name, WeightFormat.W4A16).nodes:
        if isinstance(node.op, ops.MatMul):
            matmuls[1 if node.name == "lm_head" else m, node.op.n, node.op.k] += 1
            continue
        of_state = isinstance(node.op, ops.GatedDelta)
        for kind, amount in work(node.op, m, context).items():
            rest["state" if kind == "pairs" and of_state else kind] += amount  # type: ignore[assignment]
    return np.asarray([(*key, count) for key, count in matmuls.items()], np.float64).T, rest


def step_s(unit: Unit, bytes_per_weight: float, name: str, m: int, context: int) -> float:
    """Return the seconds of m tokens after `context` others."""
    (tokens, n, k, count), rest = step_work(name, m, context)
    streams = n * k * bytes_per_weight / unit.bandwidth_bytes_per_s
    matmuls = np.maximum(streams, 2 * tokens * n * k / unit.flops_per_s)
    others = sum(cost * rest[kind] for kind, cost in coefficients(unit).items())
    return float((count * (matmuls + unit.call_s)).sum()) + others


def coefficients(unit: Unit) -> dict[str, float]:
    """Return the seconds of each kind of work but matmuls (`hetero.profiler.predict.work`).

    Cached elements are counted as float32 there: of the same bytes, half as many in fp16.
    """
    return {
        "calls": unit.call_s,
        "elements": 4 / unit.bandwidth_bytes_per_s,
        "pairs": 4 / unit.attention_flops_per_s,
        "cached": CACHE_BYTES / unit.cache_bytes_per_s,
        "state": 4 / unit.state_flops_per_s,
    }


def predicted(unit: Unit, engine: str, rate: Rate) -> float:
    """Return the tokens per second of a published row."""
    bytes_per_weight = stored(engine)
    if rate.phase == "decode":
        return 1 / step_s(unit, bytes_per_weight, rate.model, 1, rate.context)
    m = CALL_TOKENS[engine]
    spent = (step_s(unit, bytes_per_weight, rate.model, m, at) for at in range(0, rate.context, m))
    return rate.context / sum(spent)


def stored(engine: str) -> float:
    """Return the bytes of a weight: blocks of 32 with an fp16 scale; QNN's of 64."""
    return 0.5 + 2 / (64 if engine == "qairt" else 32)


def fit(rates: Sequence[Rate], engine: str) -> Unit:
    """Fit a unit by least squares of relative errors, with less weight for what is far off."""
    from scipy.optimize import least_squares

    def errors(x: Floats) -> list[float]:
        unit = Unit(*map(float, np.exp(x)))
        return [float(np.log(predicted(unit, engine, x) / x.tokens_per_s)) for x in rates]

    bounds = tuple(np.log(np.asarray(x)) for x in (LEAST, MOST))
    start = np.log(np.asarray(START))
    solved = least_squares(errors, start, loss="soft_l1", f_scale=0.1, bounds=bounds)
    # Rounded: logarithms differ in their last bits from one processor to the next.
    return Unit(*(float(f"{x:.4g}") for x in np.exp(solved.x)))


def left_out(rates: Sequence[Rate], engine: str) -> dict[str, list[float]]:
    """Return the relative errors by phase: each model is predicted by a fit to the others."""
    errors: dict[str, list[float]] = {"prefill": [], "decode": []}
    for model in sorted({x.model for x in rates}):
        unit = fit([x for x in rates if x.model != model], engine)
        for rate in rates:
            if rate.model == model:
                errors[rate.phase].append(predicted(unit, engine, rate) / rate.tokens_per_s - 1)
    return errors


def knots(unit: Unit, bytes_per_weight: float) -> dict[str, Any]:
    """Return a matmul's seconds: the stream of the weights up to some tokens, then arithmetic."""
    stream = bytes_per_weight / unit.bandwidth_bytes_per_s
    equal = max(2, round(stream * unit.flops_per_s / 2))
    tokens = [1, equal, max(2 * equal, MAX_M)]
    costs = [stream, stream, 2 * tokens[-1] / unit.flops_per_s]
    return {"tokens": tokens, "coefficients": [[unit.call_s, 0.0, 0.0, x] for x in costs]}


def other_predictors(device: str, unit: Unit) -> list[dict[str, Any]]:
    """Return predictors of all operations but matmuls that any known model has."""
    costs = coefficients(unit)
    state, common = costs.pop("state"), {key: costs[key] for key in ("calls", "elements")}
    attention = costs | {"cached": 2 * costs["cached"]}  # the bytes that its format has
    by_op = dict.fromkeys(plain_ops(), common)
    by_op |= {f"Attention{kv}": attention for kv in ("", "+f16", "+q8")}
    by_op["GatedDelta"] = costs | {"pairs": state}
    shape = {"device": device, "max_m": MAX_M, "max_context": MAX_CONTEXT}
    return [shape | {"op": op, "coefficients": by_op[op]} for op in sorted(by_op)]


@cache
def plain_ops() -> tuple[str, ...]:
    """Return the names of operations that take no more than a look at their elements."""
    names = {op_name(node.op) for model in MODELS.values() for node in model_spec(model).nodes}
    return tuple(sorted(x for x in names if not x.startswith(("MatMul", "Attention", "GatedD"))))


def profile_of(
    name: str,
    rates: Mapping[str, Sequence[Rate]],
    units: Mapping[str, Unit],
    errors: Mapping[str, Mapping[str, list[float]]],
) -> DeviceProfile:
    """Return the profile of a chip by its GPU and NPU."""
    shipped = CHIPS[name]
    base = DeviceProfile.load("snapdragon-8-gen-3").model_dump(mode="json")
    base["predictors"] = [x for x in base["predictors"] if x["weight_format"] == "w4a16"]
    speeds = {kind: units[kind].bandwidth_bytes_per_s for kind in ("gpu", "npu")}
    fastest = max(x.bandwidth_bytes_per_s for x in units.values())
    slower = max(1.0, sum(speeds.values()) / fastest)
    base |= {
        "name": name,
        "hetero_version": hetero.__version__,
        "created": "2026-11-26",
        "environment": {"system": "fitted", "processor": f"{shipped.title} ({SOURCE})"},
        "bandwidth": {f"{kind}_alone_bytes_per_s": x for kind, x in speeds.items()}
        | {f"{kind}_together_bytes_per_s": x / slower for kind, x in speeds.items()},
        "contention": [{"phase": "decode", "gpu": slower, "npu": slower}],
        "power": None,
        "notes": [f"{SOURCE}; costs between devices: snapdragon-8-gen-3's; bench/chips.py"],
    }
    base["sync"]["npu"]["call_s"] = units["npu"].call_s
    for kind, capabilities in declared(shipped.soc).items():
        base["devices"][kind] |= {
            "numbers": "fitted",
            "name": f"{kind.upper()} of {shipped.title} (fitted)",
            "fingerprint": f"fitted|{name}|{kind}",
            "capabilities": capabilities.model_dump(mode="json"),
        }
    base["other_predictors"] = [
        x for kind in ("gpu", "npu") for x in other_predictors(kind, units[kind])
    ]
    for predictor in base["predictors"]:
        kind = predictor["device"]
        bytes_per_weight = WeightFormat.W4A16.storage.bytes_per_weight
        predictor |= {
            "model": None,
            "knots": knots(units[kind], bytes_per_weight),
            "regimes": {
                "bytes_per_s": units[kind].bandwidth_bytes_per_s,
                "flops_per_s": units[kind].flops_per_s,
            },
            "validation": validations(rates[kind], errors[kind]),
        }
    return DeviceProfile.model_validate(base)


def validations(rates: Sequence[Rate], errors: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return how well models were predicted that a fit had not seen."""
    return [
        {
            "phase": phase,
            "mape": round(float(np.mean(np.abs(off))), 4),
            "p95": round(float(np.quantile(np.abs(off), 0.95)), 4),
            "folds": len({rate.model for rate in rates}),
            "rows": len(off),
        }
        for phase, off in errors.items()
    ]


def declared(soc: str) -> dict[str, CapabilityRecord]:
    """Return the capabilities that the backends declare for a chip: bundles share weights."""
    sizes = npu_capabilities.STANDARD_GRAPH_SIZES
    npu = npu_capabilities.capabilities_of(find_chip(soc), sizes, shared_weights=True)
    return {x.kind: CapabilityRecord.of(x) for x in (gpu_capabilities.capabilities_of(), npu)}


def shares(off: Iterable[float]) -> str:
    """Return median and ninth decile of errors."""
    sizes = np.abs(list(off))
    return f"{100 * np.median(sizes):.0f} % ({100 * np.quantile(sizes, 0.9):.0f} %)"


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
    rates, rows, files = read_rates(), [], {}
    for name, shipped in CHIPS.items():
        known, units, errors = {}, {}, {}
        for kind, engine in (("cpu", "llama.cpp"), ("gpu", "llama.cpp"), ("npu", npu_stack)):
            of_unit = known[kind] = rates[shipped.row, engine, kind]
            unit = units[kind] = fit(of_unit, engine)
            off = errors[kind] = left_out(of_unit, engine)
            rows.append([
                name, kind, engine, str(len(of_unit)), f"{unit.flops_per_s / 1e12:.2f}",
                f"{unit.bandwidth_bytes_per_s / 1e9:.0f}", f"{unit.call_s * 1e6:.0f}",
                shares(off["prefill"]), shares(off["decode"]),
            ])  # fmt: skip
        path = (out or PROFILES) / f"{name}.json"
        files[path] = profile_of(name, known, units, errors).to_json()
    print(f"{SOURCE}; errors of models left out of the fit: median (nine in ten)\n")
    table("profile|unit|engine|rows|matmuls, TFLOP/s|memory, GB/s|a call, µs|prompt|answer", rows)
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
