"""What `hetero eval` scores and shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetero.backends.formats import WeightFormat
from hetero.cli.options import (
    progress_bar,
)
from hetero.cli.tables import show_or_print
from hetero.compiling.calibration import calibration_sequences
from hetero.compiling.schemes import Schemes
from hetero.errors import UserError
from hetero.generation.llm import LLM
from hetero.measuring.evaluation import (
    DEFAULT_WINDOW,
    Evaluation,
    Interval,
    evaluate,
    read_tokens,
)
from hetero.measuring.kv_quality import RANDOM, KvQuality, kv_quality
from hetero.models.original import find_original, without_floats
from hetero.profiler.tables import TableData
from hetero.terminal.notices import notify

REFERENCE = WeightFormat.F32


def check_texts(simulate: list[str] | None, calibrate: Path | None, text: Path) -> None:
    if simulate and calibrate is None:
        raise UserError("--simulate needs scales from a text; give --calibrate TEXT, not --text's")
    if calibrate is not None and calibrate.resolve() == text.resolve():
        raise UserError(f"--calibrate and --text are both {text}; give two different texts")


def reference_of(model: str, named: str | None) -> str | None:
    """Return the MODEL that scores are compared with as f32; None, with a notice, where a quantised
    directory holds no floats and what it was made from is not here. Raises `UserError`.
    """
    manifest = without_floats(named or model)
    if manifest is None:
        return named or model
    holds = f"{named or model} holds {' and '.join(manifest.stored)}, no f32"
    if named is not None:
        raise UserError(f"--reference {holds}: give the float model that it was made from")
    original = find_original(model, manifest)
    if original is None:
        notify(f"{holds}: it is scored alone; for agreement give its float model with --reference")
    else:
        notify(f"{holds}: it is compared with {original}, which it was made from")
    return original


def against(
    base: LLM | None,
    opened: Callable[..., LLM],
    ways: Mapping[Any, dict[str, Any]],
    text: Path,
    *,
    limit: int | None,
    window: int | None,
    stride: int | None,
) -> dict[str, Evaluation]:
    """Return a model opened in several ways, each against `base`."""
    found = {}
    for name, options in ways.items():
        with opened(**options) as llm:
            tokens = read_tokens(llm, text, limit)
            size = window or min(DEFAULT_WINDOW, llm.max_seq_len)
            with progress_bar(f"scoring {name}") as advance:
                found[str(name)] = evaluate(
                    llm, tokens, reference=base, window=size, stride=stride, progress=advance
                )
    return found


def print_kv(
    llm: LLM,
    tokens: list[int],
    kv: Iterable[str],
    ratio: float,
    seeds: int,
    window: int,
    as_json: bool,
) -> None:
    size = window or min(256, llm.max_seq_len)
    ways = [str(way) for way in kv]
    kept = kv_quality(llm, tokens, ways, ratio=ratio, window=size, seeds=seeds)
    if as_json:
        print(json.dumps({k: asdict(v) for k, v in kept.items()}))
    else:
        show_or_print(_kv_table(kept), after=_by_chance(kept))


def simulated(
    model: str,
    texts: tuple[Path, Path, int],
    schemes: list[str],
    base: LLM | None,
    *,
    limit: int | None,
    window: int | None,
    stride: int | None,
) -> dict[str, Evaluation]:
    """Forms that have no kernel. `texts`: to calibrate, to score, tokens to calibrate by."""
    calibrate, text, count = texts
    found = {}
    loaded, _, sequences = calibration_sequences(model, calibrate, count)
    tokens = read_tokens(loaded, text, limit)
    size = window or min(DEFAULT_WINDOW, loaded.config.max_position)
    with progress_bar("calibrating") as advance:
        made = Schemes(loaded, sequences, size, advance)
        made.scales()
    for scheme in schemes:
        with progress_bar(f"scoring {scheme}") as advance:
            found[f"w8a8 {scheme} (simulated)"] = evaluate(
                made.model_of(scheme),
                tokens,
                reference=base,
                window=size,
                stride=stride,
                progress=advance,
            )
    return found


def _kv_table(found: dict[str, KvQuality]) -> TableData:
    head = (
        "keys and values", "bytes, x those at 8 bits", "perplexity", "top-1 agreement", "KL (nats)",
    )  # fmt: skip
    rows = (
        (
            name,
            f"{x.ratio:.3f}",
            f"{x.perplexity:.4f}",
            f"{x.top1_agreement:.2%}",
            f"{x.kl_mean:.6f}",
        )
        for name, x in found.items()
        if not name.startswith(RANDOM)
    )
    return TableData("", head, tuple(rows), numbers=head[1:])


def _by_chance(found: dict[str, KvQuality]) -> list[str]:
    by_chance = [x.kl_mean for name, x in found.items() if name.startswith(RANDOM)]
    if not by_chance:
        return []
    better = sum(found["mixed"].kl_mean < kl for kl in by_chance)
    return [
        f"mixed is closer than {better} of {len(by_chance)} random orders of its densities "
        f"(KL {min(by_chance):.6f} to {max(by_chance):.6f})"
    ]


def print_qualities(found: dict[str, Evaluation], as_json: bool, what: str = "weights") -> None:
    """A table of formats, or a line of JSON."""
    if as_json:
        print(json.dumps({k: asdict(v) for k, v in found.items()}))
    else:
        show_or_print(_table(found, what), after=[BRACKETS])


def _table(found: dict[str, Evaluation], what: str) -> TableData:
    head = (what, "tokens", "perplexity", "top-1 agreement", "KL mean (nats)", "KL p99")
    rows = []
    for name, x in found.items():
        compared = ("", "", "")
        if x.kl_mean is not None and x.top1_agreement is not None:
            compared = (
                f"{x.top1_agreement:.2%} {_between(x.top1_agreement_95, '.1%')}",
                f"{x.kl_mean:.5f} {_between(x.kl_mean_95, '.5f')}",
                f"{x.kl_p99:.5f}",
            )
        perplexity = f"{x.perplexity:.4f} {_between(x.perplexity_95, '.2f')}"
        rows.append((name, str(x.tokens), perplexity, *compared))
    return TableData("", head, tuple(rows), numbers=head[1:])


def _between(interval: Interval | None, form: str) -> str:
    """`(4.1 to 4.6)`."""
    return "" if interval is None else f"({interval[0]:{form}} to {interval[1]:{form}})"


BRACKETS = "in brackets: 95 % intervals over tokens of this text, as if those were independent"
