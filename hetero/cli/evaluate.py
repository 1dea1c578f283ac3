"""`hetero eval`: perplexity, and agreement with a float reference, for each weight format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
    from hetero.profiler.table_data import TableData

REFERENCE = WeightFormat.F32
FormatsOption = Annotated[
    list[CacheFormat] | None,
    typer.Option("--kv", help="Compare formats of cached keys and values with f32; repeat."),
]
WindowOption = Annotated[
    int, typer.Option("--window", help="Tokens scored at a time; 0: 512, or what fits.")
]
StrideOption = Annotated[
    int | None,
    typer.Option("--stride", help="From window to window.", show_default="half a window"),
]
ReferenceOption = Annotated[
    str | None,
    typer.Option("--reference", metavar="MODEL", help="Float model.", show_default="MODEL as f32"),
]


CountsOption = Annotated[
    Path | None,
    typer.Option(
        "--count-experts",
        metavar="FILE",
        help="No score: write how often the text's tokens choose each routed expert.",
    ),
]


def eval_command(
    model: ModelArgument,
    text: Annotated[Path | None, typer.Option(help="A text file in UTF-8.")] = None,
    choices: Annotated[
        Path | None, typer.Option(help="Questions with several answers, as JSON lines, instead.")
    ] = None,
    weights: Annotated[list[WeightFormat] | None, typer.Option(help="Repeat to compare.")] = None,
    reference: ReferenceOption = None,
    no_reference: Annotated[
        bool, typer.Option("--no-reference", help="Perplexity only: half the time.")
    ] = False,
    window: WindowOption = 0,
    stride: StrideOption = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=MIN_TOKENS, help="Score this much of the text.")
    ] = None,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="Ask this many of the questions.")
    ] = None,
    count_experts: CountsOption = None,
    kv: FormatsOption = None,
    device: DeviceOption = DeviceChoice.NPU,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    profile: ProfileOption = None,
    max_seq_len: ContextOption = None,
    memory_budget: BudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of MODEL over a text, top-1 agreement and KL divergence from its float32 self.

    With --choices the share of questions whose right answer is the most likely one.
    """
    from hetero.models import default_weights

    formats = weights or [WeightFormat(default_weights(model))]
    opened = partial(open_llm, device=device.value, gpu=gpu, npu=npu, max_seq_len=max_seq_len)
    opened = partial(opened, profile=profile, memory_budget=memory_budget, kv=CacheFormat.F32.value)
    if (text is None) == (choices is None):
        raise UserError("eval scores a --text or the answers of --choices: give one of them")
    if text is None:
        assert choices is not None
        if reference or no_reference or window or stride or max_tokens or count_experts:
            raise UserError(
                "--reference, --no-reference, --window, --stride, --max-tokens and "
                "--count-experts are for --text: leave them out"
            )
        asked: list[dict[str, Any]] = [{"kv": x.value, "weights": formats[0]} for x in kv or ()]
        asked = asked or [{"weights": x} for x in formats]
        print_accuracies(choices, partial(opened, model), asked, max_questions, as_json)
        return
    if max_questions is not None:
        raise UserError("--max-questions is for --choices: leave it out")
    if count_experts is not None:
        write_counts(count_experts, partial(opened, model, weights=formats[0]), text, max_tokens)
        return
    sizes: Any = {"limit": max_tokens, "window": window, "stride": stride}
    if kv:
        own = partial(opened, model, weights=formats[0])
        with own() as exact:
            caches = {x: {"kv": x.value} for x in kv}
            print_qualities(against(exact, own, caches, text, **sizes), as_json, "caches")
        return
    base: LLM | None = None
    try:
        compared = None if no_reference else reference_of(model, reference)
        if compared is not None:
            base = opened(compared, weights=REFERENCE)
        ways = {choice: {"weights": choice} for choice in formats}
        print_qualities(against(base, partial(opened, model), ways, text, **sizes), as_json)
    finally:
        if base is not None:
            base.close()


def write_counts(path: Path, opened: Callable[[], LLM], text: Path, limit: int | None) -> None:
    """Count which experts the tokens of a text choose, and write it for `hetero plan`."""
    from hetero.measuring.evaluation import read_tokens
    from hetero.measuring.expert_counts import count_experts
    from hetero.terminal.notices import notify

    with opened() as llm, progress_bar("counting experts") as advance:
        routing = count_experts(llm, read_tokens(llm, text, limit), progress=advance)
    routing.save(path)
    notify(
        f"{path} is written, of {routing.tokens} tokens: the busiest experts have "
        f"{routing.busiest:.1f} times an equal share; `hetero plan --experts {path}` uses it"
    )


def print_accuracies(
    path: Path,
    opened: Callable[..., LLM],
    ways: Sequence[dict[str, Any]],
    limit: int | None,
    as_json: bool,
) -> None:
    """Ask a file's questions of a model that is opened in several ways, and print the shares."""
    from hetero.cli.tables import show_or_print
    from hetero.measuring.choices import accuracy, read_questions, table_rows
    from hetero.profiler.table_data import TableData

    questions, shares = read_questions(path, limit), {}
    for options in ways:
        name = str(next(iter(options.values())))
        with opened(**options) as llm, progress_bar(f"asking {name}") as advance:
            shares[name] = accuracy(llm, questions, progress=advance)
    if as_json:
        print(json.dumps({k: asdict(v) for k, v in shares.items()}))
        return
    head = ("kv" if "kv" in ways[0] else "weights", "questions", "acc", "acc_norm")
    rows = tuple(table_rows(shares))
    show_or_print(TableData("", head, rows, numbers=head[1:]), after=[QUESTION_BRACKETS])


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


QUESTION_BRACKETS = "in brackets: 95 % intervals over questions of this kind"
BRACKETS = "in brackets: 95 % intervals over tokens of this text, as if those were independent"
