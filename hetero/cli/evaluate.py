"""`hetero eval`: perplexity, and agreement with a float reference, for each weight format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.cli.options import (
    BudgetOption,
    ContextOption,
    DeviceChoice,
    DeviceOption,
    GpuOption,
    JsonOption,
    ModelArgument,
    NpuOption,
    ProfileOption,
    open_llm,
    progress_bar,
)
from hetero.errors import UserError
from hetero.measuring.constants import MIN_TOKENS

if TYPE_CHECKING:
    from hetero.generation.llm import LLM
    from hetero.measuring.evaluation import Evaluation, Interval
    from hetero.measuring.kv_quality import KvQuality
    from hetero.profiler.table_data import TableData

if TYPE_CHECKING:
    from hetero.generation.llm import LLM


class KvWay(StrEnum):
    """Values of --kv."""

    EIGHT = "8"
    FOUR = "4"
    TWO = "2"
    MIXED = "mixed"
    PAPER = "paper"


FormatsOption = Annotated[
    list[CacheFormat] | None,
    typer.Option("--kv", help="Compare formats of cached keys and values with f32; repeat."),
]


BitsOption = Annotated[
    list[KvWay] | None,
    typer.Option("--kv-bits", help="Bits of what contexts keep of them; repeat to compare."),
]


RatioOption = Annotated[
    float, typer.Option("--kv-ratio", min=0.25, max=1, help="Of mixed, of the bytes at 8.")
]


SeedsOption = Annotated[
    int, typer.Option("--kv-seeds", min=0, help="Random orders of densities in addition to mixed.")
]


WindowOption = Annotated[
    int, typer.Option("--window", help="Tokens scored at a time; 0: 512, or what fits.")
]


StrideOption = Annotated[
    int | None,
    typer.Option("--stride", help="From window to window.", show_default="half a window"),
]


SimulateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--simulate",
        metavar="FORM",
        help="int8 activations without a kernel: naive, smooth, per-token, activations, or "
        "what --outliers of quantize takes; repeat to compare.",
    ),
]
ReferenceOption = Annotated[
    str | None,
    typer.Option("--reference", metavar="MODEL", help="Float model.", show_default="MODEL as f32"),
]


def eval_command(
    model: ModelArgument,
    text: Annotated[Path, typer.Option("--text", help="A text file in UTF-8.")],
    weights: Annotated[
        list[WeightFormat] | None, typer.Option("--weights", help="Repeat to compare.")
    ] = None,
    simulate: SimulateOption = None,
    calibrate: Annotated[
        Path | None, typer.Option("--calibrate", help="For --simulate: another text than --text.")
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option("--calibration-tokens", min=32, help="Read this much of it.")
    ] = 4096,
    reference: ReferenceOption = None,
    no_reference: Annotated[
        bool, typer.Option("--no-reference", help="Perplexity only: half the time.")
    ] = False,
    window: WindowOption = 0,
    stride: StrideOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=MIN_TOKENS, help="Score this much of the text."),
    ] = None,
    kv: FormatsOption = None,
    kv_bits: BitsOption = None,
    kv_ratio: RatioOption = 0.5,
    kv_seeds: SeedsOption = 0,
    device: DeviceOption = DeviceChoice.NPU,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    profile: ProfileOption = None,
    max_seq_len: ContextOption = None,
    memory_budget: BudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of MODEL over a text, top-1 agreement and KL divergence from its float32 self."""
    from hetero.measuring.evaluation import read_tokens
    from hetero.models import default_weights

    formats = weights or []
    check_texts(simulate, calibrate, text)
    opened = partial(open_llm, device=device, gpu=gpu, npu=npu, plan=None, max_seq_len=max_seq_len)
    opened = partial(opened, profile=profile, memory_budget=memory_budget)
    opened = partial(opened, kv=CacheFormat.F32.value, whole_caches=bool(kv_bits))
    sizes: Any = {"limit": max_tokens, "window": window, "stride": stride}
    if kv or kv_bits:
        own = partial(opened, model, weights=(formats or [WeightFormat(default_weights(model))])[0])
        with own() as exact:
            if kv:
                caches = {x: {"kv": x.value} for x in kv}
                qualities = against(exact, own, caches, text, **sizes)
                print_qualities(qualities, as_json, "caches")
            if kv_bits:
                tokens = read_tokens(exact, text, max_tokens)
                print_kv(exact, tokens, kv_bits, kv_ratio, kv_seeds, window, as_json)
        return
    base: LLM | None = None
    try:
        compared = None if no_reference else reference_of(model, reference)
        if compared is not None:
            base = opened(compared, weights=REFERENCE)
        if not formats and not simulate:
            formats = [WeightFormat(default_weights(model))]
        ways = {choice: {"weights": choice} for choice in formats}
        evaluations = against(base, partial(opened, model), ways, text, **sizes)
        if simulate and calibrate is not None:
            texts = calibrate, text, calibration_tokens
            evaluations |= simulated(model, texts, simulate, base, **sizes)
    finally:
        if base is not None:
            base.close()
    print_qualities(evaluations, as_json)


REFERENCE = WeightFormat.F32


def check_texts(simulate: list[str] | None, calibrate: Path | None, text: Path) -> None:
    if simulate and calibrate is None:
        raise UserError("--simulate needs scales from a text; give --calibrate TEXT, not --text's")
    if calibrate is not None and calibrate.resolve() == text.resolve():
        raise UserError(f"--calibrate and --text are both {text}; give two different texts")


def reference_of(model: str, named: str | None) -> str | None:
    """Return the MODEL that scores are compared with as f32.

    None, with a notice, where a quantised directory has no floats and its original is not here.
    Raises `UserError`.
    """
    from hetero.models.original import find_original, without_floats
    from hetero.terminal.notices import notify

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
    from hetero.measuring.evaluation import DEFAULT_WINDOW, evaluate, read_tokens

    evaluations = {}
    for name, options in ways.items():
        with opened(**options) as llm:
            tokens = read_tokens(llm, text, limit)
            size = window or min(DEFAULT_WINDOW, llm.max_seq_len)
            with progress_bar(f"scoring {name}") as advance:
                evaluations[str(name)] = evaluate(
                    llm, tokens, reference=base, window=size, stride=stride, progress=advance
                )
    return evaluations


def print_kv(
    llm: LLM,
    tokens: list[int],
    kv: Iterable[str],
    ratio: float,
    seeds: int,
    window: int,
    as_json: bool,
) -> None:
    from hetero.cli.tables import show_or_print
    from hetero.measuring.kv_quality import kv_quality

    size = window or min(256, llm.max_seq_len)
    ways = [str(way) for way in kv]
    qualities = kv_quality(llm, tokens, ways, ratio=ratio, window=size, seeds=seeds)
    if as_json:
        print(json.dumps({k: asdict(v) for k, v in qualities.items()}))
    else:
        show_or_print(_kv_table(qualities), after=_by_chance(qualities))


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
    """Evaluate formats that have no kernel. `texts`: to calibrate, to score, calibration tokens."""
    from hetero.compiling.calibration import calibration_sequences
    from hetero.compiling.schemes import Schemes
    from hetero.measuring.evaluation import DEFAULT_WINDOW, evaluate, read_tokens

    calibrate, text, count = texts
    evaluations = {}
    loaded, _, sequences = calibration_sequences(model, calibrate, count)
    tokens = read_tokens(loaded, text, limit)
    size = window or min(DEFAULT_WINDOW, loaded.config.max_position)
    with progress_bar("calibrating") as advance:
        made = Schemes(loaded, sequences, size, advance)
        made.scales()
    for scheme in schemes:
        with progress_bar(f"scoring {scheme}") as advance:
            evaluations[f"w8a8 {scheme} (simulated)"] = evaluate(
                made.model_of(scheme),
                tokens,
                reference=base,
                window=size,
                stride=stride,
                progress=advance,
            )
    return evaluations


def _kv_table(by_name: dict[str, KvQuality]) -> TableData:
    from hetero.measuring.kv_quality import RANDOM
    from hetero.profiler.table_data import TableData

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
        for name, x in by_name.items()
        if not name.startswith(RANDOM)
    )
    return TableData("", head, tuple(rows), numbers=head[1:])


def _by_chance(by_name: dict[str, KvQuality]) -> list[str]:
    from hetero.measuring.kv_quality import RANDOM

    by_chance = [x.kl_mean for name, x in by_name.items() if name.startswith(RANDOM)]
    if not by_chance:
        return []
    better = sum(by_name["mixed"].kl_mean < kl for kl in by_chance)
    return [
        f"mixed is closer than {better} of {len(by_chance)} random orders of its densities "
        f"(KL {min(by_chance):.6f} to {max(by_chance):.6f})"
    ]


def print_qualities(by_name: dict[str, Evaluation], as_json: bool, what: str = "weights") -> None:
    """Print a table of formats, or a line of JSON."""
    from hetero.cli.tables import show_or_print

    if as_json:
        print(json.dumps({k: asdict(v) for k, v in by_name.items()}))
    else:
        show_or_print(_table(by_name, what), after=[BRACKETS])


def _table(by_name: dict[str, Evaluation], what: str) -> TableData:
    from hetero.profiler.table_data import TableData

    head = (what, "tokens", "perplexity", "top-1 agreement", "KL mean (nats)", "KL p99")
    rows = []
    for name, x in by_name.items():
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
    """Return `(4.1 to 4.6)`."""
    return "" if interval is None else f"({interval[0]:{form}} to {interval[1]:{form}})"


BRACKETS = "in brackets: 95 % intervals over tokens of this text, as if those were independent"
