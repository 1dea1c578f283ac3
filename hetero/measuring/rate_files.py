"""Rates of whole models from files: llama-bench's JSON or JSONL, and the published table's CSV.

A row that says nothing of one processor (several devices at once, prompt and answer in one test,
weights of other than four bits, a model that is not known) is skipped and counted; one with a rate
that no chip reaches is refused by its number.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, read_text
from hetero.errors import UserError
from hetero.models import model_spec
from hetero.models.random_models import KNOWN_MODELS
from hetero.profiler.fitted_units import MOST, Engine, ModelWork, Rate
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import Phase, UnitKind

COLUMNS: Final = (
    "model", "chip", "engine", "precision", "unit", "context", "prefill_tokens_per_s",
    "decode_tokens_per_s",
)  # fmt: skip
FOUR_BITS: Final = ("q4_0", "w4a16", "mxfp4")
MADE_BY: Final = "give what `llama-bench -o json`, or `-o jsonl`, printed, or the published table"
# Published names of models whose shapes are those of a known one.
SAME_SHAPES: Final = {"llama318b": "llama-3-8b", "lfm2512b": "lfm2-1.2b"}
SPECULATIVE: Final = "ssd"  # rows of models that are served with guesses
MAX_TOKENS: Final = 2**20


class Source(NamedTuple):
    """A chip, an engine and a processor, whose rates belong together."""

    chip: str
    engine: Engine
    unit: UnitKind


class RateFile(NamedTuple):
    """The rows of a file by their source, and why others were skipped, with their number."""

    rates: Mapping[Source, tuple[Rate, ...]]
    skipped: Mapping[str, int]


class _SkippedError(Exception):
    """The row says nothing of one processor; the message is why."""


def read_rates(path: str | Path) -> RateFile:
    """Return the rates of a file. Raises `UserError` for one that has none, or absurd ones."""
    rates: dict[Source, list[Rate]] = {}
    skipped: Counter[str] = Counter()
    for number, row in enumerate(_rows(path), 1):
        try:
            published = "prefill_tokens_per_s" in row
            source, of_row = _published(row) if published else _llama_bench(row)
            _check_sane(of_row)
        except _SkippedError as error:
            skipped[str(error)] += 1
            continue
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"row {number} of {path}: {reason}; {MADE_BY}") from None
        rates.setdefault(source, []).extend(of_row)
    if not rates:
        reasons = ", ".join(f"{count} of {why}" for why, count in skipped.items()) or "it is empty"
        raise UserError(f"{path} has no row to fit ({reasons}): {MADE_BY}")
    return RateFile({source: tuple(rows) for source, rows in rates.items()}, skipped)


def _rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON list or of lines, or the lines of a table."""
    try:
        text = read_text(path, LONGEST_DOCUMENT_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"{path} cannot be read ({reason}): {MADE_BY}") from None
    try:
        if text.startswith("["):
            rows = json.loads(text)
        elif text.startswith("{"):
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            return _table(path, text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): {MADE_BY}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is no list of benchmarks: {MADE_BY}")
    return list(rows)


def _table(path: str | Path, text: str) -> list[dict[str, Any]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(f"{path} has no column {missing[0]!r}: {MADE_BY}")
    return [dict(row) for row in reader]


def _published(row: Mapping[str, Any]) -> tuple[Source, list[Rate]]:
    """Return the rates of a line of the published table: of a prompt, and after it."""
    if row["precision"] not in FOUR_BITS:
        raise _SkippedError(f"weights in {row['precision']}")
    source = Source(
        str(row["chip"]), _one_of(row, "engine", Engine), _one_of(row, "unit", UnitKind)
    )
    model, context = work_of(str(row["model"])), _count(row, "context")
    speeds: dict[Phase, str] = {"prefill": row["prefill_tokens_per_s"] or ""}
    speeds["decode"] = row["decode_tokens_per_s"] or ""
    return source, [
        Rate(model, phase, context if phase == "prefill" else 1,
             0 if phase == "prefill" else context, float(speed))
        for phase, speed in speeds.items()
        if speed.strip() and float(speed) != 0  # 0: not published
    ]  # fmt: skip


def _llama_bench(row: Mapping[str, Any]) -> tuple[Source, list[Rate]]:
    """Return the rate of one test of llama-bench."""
    speed = float(row["avg_ts"])
    prompt, answer, depth = (_count(row, name) for name in ("n_prompt", "n_gen", "n_depth"))
    if bool(prompt) == bool(answer):
        raise _SkippedError("prompt and answer in one test")
    if not re.search(r"q4|mxfp4|iq4", str(row["model_type"]).lower()):
        raise _SkippedError(f"weights in {str(row['model_type']).split()[-1]}")
    names = (str(row.get(key, "")) for key in ("model_filename", "model_type"))
    model = next((x for x in map(_work_or_none, names) if x is not None), None)
    if model is None:
        raise _SkippedError(f"the unknown model {Path(str(row['model_filename'])).name}")
    chip = str(row.get("cpu_info") or row.get("gpu_info") or "")
    source = Source(chip, "llama.cpp", _unit(row))
    phase: Phase = "prefill" if prompt else "decode"
    at = depth if prompt else depth + answer // 2  # the mean of the answer's steps
    return source, [Rate(model, phase, prompt or 1, at, speed)]


def _unit(row: Mapping[str, Any]) -> UnitKind:
    """Return the processor of a row of llama-bench: by its devices, else what it was built for."""
    devices = str(row.get("devices") or "auto").lower()
    if _count(row, "n_gpu_layers") == 0 or devices in ("none", "cpu"):
        return "cpu"
    names = str(row["backends"]).lower() if devices == "auto" else devices
    npu = bool(re.search("htp|hexagon|npu", names))
    gpu = bool(re.search("opencl|vulkan|cuda|metal|rocm|sycl|gpu|mtl", names))
    if (npu and gpu) or len(set(re.findall("gpu|vulkan|cuda", names))) > 1:
        raise _SkippedError("several devices")
    return "npu" if npu else "gpu" if gpu else "cpu"


def _one_of(row: Mapping[str, Any], key: str, names: Any) -> Any:
    if row[key] not in get_args(names):
        raise ValueError(f"{key} {row[key]!r} is none of {', '.join(get_args(names))}")
    return row[key]


def _count(row: Mapping[str, Any], key: str) -> int:
    """Return a count of tokens, or of layers: `n_depth` is missing from older files."""
    value = row.get(key, 0) if key == "n_depth" else row[key]
    count = int(value)
    if not -1 <= count <= MAX_TOKENS:
        raise ValueError(f"{key} is {count}")
    return max(count, 0) if key != "n_gpu_layers" else count


def _check_sane(rates: Iterable[Rate]) -> None:
    """Raise `ValueError` for a rate that is no speed of a chip, by arithmetic or memory."""
    for rate in rates:
        if not (math.isfinite(rate.tokens_per_s) and rate.tokens_per_s > 0):
            raise ValueError(f"{rate.tokens_per_s} tokens/s is no speed")
        (_, n, k, count), _ = rate.model.step(1, 0)
        weights = float((n * k * count).sum())
        most = MOST.flops_per_s / 2 if rate.phase == "prefill" else 2 * MOST.bandwidth_bytes_per_s
        if rate.tokens_per_s * weights > most:
            raise ValueError(
                f"{rate.tokens_per_s:g} tokens/s of {rate.model.name} in {rate.phase} is more than "
                "a chip does"
            )


def work_of(name: str) -> ModelWork:
    """Return the work of a model by its published name, or by a file's."""
    model = _work_or_none(name)
    if model is None:
        raise _SkippedError(f"the unknown model {name}")
    return model


def _work_or_none(name: str) -> ModelWork | None:
    plain = _plain(Path(name.replace("\\", "/")).name)
    if plain.endswith(SPECULATIVE):
        return None
    known = next((x for x in _known_names() if x[0] in plain), None)
    return _model_work(known[1]) if known else None


@cache
def _known_names() -> tuple[tuple[str, str], ...]:
    """Return plain spellings and names of known models, the longest spelling first."""
    names = {_plain(name): name for name in KNOWN_MODELS} | SAME_SHAPES
    return tuple(sorted(names.items(), key=lambda x: -len(x[0])))


@cache
def _model_work(name: str) -> ModelWork:
    return ModelWork(model_spec(name, "w4a16"))


def _plain(name: str) -> str:
    """Return a name by its letters and digits: `llama_v3_2_1b` is `llama-3.2-1b`."""
    return re.sub(r"v(?=\d)", "", re.sub("[^a-z0-9]", "", name.lower()))


def known_graphs() -> Iterator[ModelGraph]:
    """Yield the graph of every known model."""
    return (model_spec(name) for name in KNOWN_MODELS)
