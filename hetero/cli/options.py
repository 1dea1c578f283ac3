"""Options that several commands share, opening a model, and the progress bar."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from hetero.backends.formats import WeightFormat
from hetero.errors import UserError, one_sentence
from hetero.generation.llm import LLM
from hetero.solver.plan import NamedStrategy
from hetero.terminal import printable

stderr = Console(stderr=True)


class DeviceChoice(StrEnum):
    """Values of --device."""

    HETERO = "hetero"
    GPU = "gpu"
    NPU = "npu"
    AUTO = "auto"


class SyncChoice(StrEnum):
    """Values of --sync."""

    FAST = "fast"
    EVENT = "event"
    FINISH = "finish"
    COPY = "copy"


class CacheChoice(StrEnum):
    """Values of --kv."""

    F32 = "f32"
    F16 = "f16"


class OrderChoice(StrEnum):
    """Values of --order."""

    FIFO = "fifo"
    PAPER = "paper"
    BEST = "best"


class WeightsChoice(StrEnum):
    """Values of --weights."""

    AUTO = "auto"
    W4A16 = "w4a16"
    W4A8 = "w4a8"
    W8A16 = "w8a16"
    W8A8 = "w8a8"
    F16 = "f16"
    F32 = "f32"


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A directory, a .gguf file, `demo` or `random:NAME`."),
]
DeviceOption = Annotated[
    DeviceChoice | None, typer.Option("--device", help="What computes.  [default: hetero]")
]
GpuOption = Annotated[str, typer.Option("--gpu", help="GPU backend.")]
NpuOption = Annotated[str, typer.Option("--npu", help="NPU backend.")]
WeightsOption = Annotated[
    WeightsChoice | None,
    typer.Option("--weights", help="Weights and activations.  [default: MODEL's own, or w4a16]"),
]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="A profile: a file or a shipped name.")
]
StrategyOption = Annotated[
    str | None,
    typer.Option("--strategy", help="Force one for comparison (auto, layer, row-cut …)."),
]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="An execution plan (JSON).")]
ContextOption = Annotated[
    int | None, typer.Option("--max-seq-len", min=1, help="Longest prompt plus answer, tokens.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest; 0: all.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Keep this much probability.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="Keep what is this likely or more.")]
PenaltyOption = Annotated[float, typer.Option("--repetition-penalty", help="1: none.")]
FrequencyOption = Annotated[
    float, typer.Option("--frequency-penalty", help="For every time a token was generated.")
]
PresenceOption = Annotated[
    float, typer.Option("--presence-penalty", help="For tokens that were generated at all.")
]
BiasOption = Annotated[
    list[str] | None, typer.Option("--logit-bias", help="ID=BIAS, added to a token's logit.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
LogprobsOption = Annotated[
    int | None, typer.Option("--logprobs", min=0, help="With --json: this many alternatives.")
]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="Ends the answer.")]
StatsOption = Annotated[bool, typer.Option("--stats", help="Print speeds and placement.")]
SpeculativeOption = Annotated[
    int, typer.Option("--speculative", min=0, help="Tokens guessed ahead from the text; 0: none.")
]
SyncOption = Annotated[SyncChoice, typer.Option("--sync", help="How to wait for the GPU.")]
AdaptOption = Annotated[
    bool, typer.Option("--adapt/--no-adapt", help="Let cuts follow the devices' measured speeds.")
]
OrderOption = Annotated[
    OrderChoice, typer.Option("--order", help="Of a long prompt's chunks on the devices.")
]
CacheOption = Annotated[CacheChoice, typer.Option("--kv", help="How keys and values are cached.")]
ShareOption = Annotated[
    float,
    typer.Option("--max-gpu-share", help="Most of the time that the GPU is busy, 0 to 1."),
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--memory-budget", help="For weights, activations and caches, such as 4GiB."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", help="Write a Chrome/Perfetto trace: GPU, NPU and control lanes."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Last line of stdout is JSON.")]


def open_llm(
    model: str,
    device: DeviceChoice | None,
    gpu: str,
    npu: str,
    weights: WeightsChoice | WeightFormat | None,
    plan: Path | None,
    max_seq_len: int | None,
    **options: Any,
) -> LLM:
    """The model, with a progress bar while it loads."""
    with progress_bar("loading") as advance:
        llm = LLM(
            model,
            device=None if device is None else device.value,
            gpu=gpu,
            npu=npu,
            weights=None if weights is None else weights.value,
            plan=str(plan) if plan is not None else None,
            max_seq_len=max_seq_len,
            progress=advance,
            **options,
        )
    why = (llm.choice.reason,) if device is DeviceChoice.AUTO else ()
    for said in dict.fromkeys((*llm.choice.notes, *why)):
        print(f"hetero: {one_sentence(said)}", file=sys.stderr)
    return llm


def shown(text: str) -> Text:
    """What a file says, for a console: neither markup nor control characters of it count."""
    return Text(printable(text))


def parse_strategy(name: str) -> NamedStrategy:
    """A known strategy. Raises `UserError` with the nearest name."""
    known = get_args(NamedStrategy)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown strategy {name!r}: {hint}choose one of {', '.join(known)}")
    return cast("NamedStrategy", name)


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """A progress bar on stderr, gone when done; yields a function of (done, total)."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    silent = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=silent) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def parse_biases(given: list[str] | None) -> dict[int, float]:
    """`ID=BIAS` options. Raises `UserError`."""
    found: dict[int, float] = {}
    for text in given or []:
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise UserError(
                f"--logit-bias must be a token id and a number such as 42=-5, got {text!r}"
            ) from None
    return found
