"""Options that several commands share, opening a model, and the progress bar."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.text import Text

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.registry import choices_text
from hetero.errors import UserError
from hetero.solver.names import NamedStrategy
from hetero.terminal import printable

if TYPE_CHECKING:
    from hetero.generation.llm import LLM
    from hetero.generation.options import SamplingOptions

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


class OrderChoice(StrEnum):
    """Values of --order."""

    FIFO = "fifo"
    PAPER = "paper"
    BEST = "best"


if TYPE_CHECKING:  # mypy reads no members from a comprehension

    class WeightsChoice(StrEnum):
        """Values of --weights: `auto`, or a `WeightFormat`."""

        AUTO = "auto"

else:
    WeightsChoice = StrEnum(
        "WeightsChoice", [("AUTO", "auto"), *((x.name, x) for x in WeightFormat)]
    )


# Panels of the help.
SAMPLING, DEVICES, OUTPUT = "Sampling", "Devices and plans", "Output"
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory, a .gguf file, OWNER/NAME of the hub, demo or random:NAME.",
    ),
]
DeviceOption = Annotated[
    DeviceChoice,
    typer.Option(
        "--device",
        help="What computes; auto: what is predicted fastest, hetero: both at every matmul.",
        rich_help_panel=DEVICES,
    ),
]
GpuOption = Annotated[
    str,
    typer.Option(
        "--gpu",
        metavar="BACKEND",
        help=f"{choices_text('gpu')}.",
        rich_help_panel=DEVICES,
    ),
]
NpuOption = Annotated[
    str,
    typer.Option(
        "--npu",
        metavar="BACKEND",
        help=f"{choices_text('npu')}.",
        rich_help_panel=DEVICES,
    ),
]
WeightsOption = Annotated[
    WeightsChoice | None,
    typer.Option(
        "--weights",
        help="Weights and activations.",
        show_default="MODEL's own, or w4a16",
        rich_help_panel=DEVICES,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="What predicts: a file or a shipped name.",
        show_default="this machine's",
        rich_help_panel=DEVICES,
    ),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help=f"Force one for comparison: {', '.join(get_args(NamedStrategy))}.",
        rich_help_panel=DEVICES,
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan of `hetero plan`.", rich_help_panel=DEVICES),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-seq-len",
        min=1,
        help="Longest prompt plus answer, in tokens.",
        show_default="MODEL's, up to 4096",
    ),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="0 is greedy.",
        show_default="0; chats: MODEL's",
        rich_help_panel=SAMPLING,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        help="Keep the k likeliest; 0: all.",
        show_default="0; chats: MODEL's",
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Keep this much probability.",
        show_default="1; chats: MODEL's",
        rich_help_panel=SAMPLING,
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Least share of the likeliest's.",
        show_default="0; chats: MODEL's",
        rich_help_panel=SAMPLING,
    ),
]
PenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="On tokens of the text; 1: none.",
        show_default="1; chats: MODEL's",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyOption = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        help="For each time a token was generated.",
        rich_help_panel=SAMPLING,
    ),
]
PresenceOption = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        help="For tokens that were generated at all.",
        rich_help_panel=SAMPLING,
    ),
]
BiasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=BIAS",
        help="To a token's logit; repeatable.",
        rich_help_panel=SAMPLING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Makes sampling repeatable.", rich_help_panel=SAMPLING),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs", min=0, help="With --json: this many alternatives.", rich_help_panel=OUTPUT
    ),
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="Ends the answer; may be repeated.")
]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print speeds and placement.", rich_help_panel=OUTPUT)
]
SpeculativeOption = Annotated[
    int,
    typer.Option(
        "--speculative",
        min=0,
        help="Tokens guessed ahead from the text; 0: none.",
        rich_help_panel=DEVICES,
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Answer as a chat, or go on from the text.",
        show_default="chat, if MODEL can",
    ),
]
SyncOption = Annotated[
    SyncChoice,
    typer.Option("--sync", help="How to wait for the GPU.", rich_help_panel=DEVICES),
]
AdaptOption = Annotated[
    bool,
    typer.Option(
        "--adapt/--no-adapt",
        help="Let cuts follow the devices' measured speeds.",
        rich_help_panel=DEVICES,
    ),
]
OrderOption = Annotated[
    OrderChoice,
    typer.Option("--order", help="Of the chunks of a long prompt.", rich_help_panel=DEVICES),
]
CacheOption = Annotated[
    CacheFormat | None,
    typer.Option(
        "--kv",
        help="Format of cached keys and values.",
        show_default="f16",
        rich_help_panel=DEVICES,
    ),
]
WholeOption = Annotated[
    bool,
    typer.Option(
        "--whole-caches",
        help="Layers with a window keep all.",
        rich_help_panel=DEVICES,
    ),
]
PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="[PROMPT]", help="What to answer; - or nothing: standard input."),
]
FileOption = Annotated[Path | None, typer.Option("--file", help="Read the prompt from this file.")]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="System message, for the chat template.")
]
EchoOption = Annotated[
    bool,
    typer.Option("--echo", help="Print the prompt, and go on from it.", rich_help_panel=OUTPUT),
]
ShareOption = Annotated[
    float,
    typer.Option(
        "--max-gpu-share",
        help="Most of the time that the GPU is busy, 0 to 1.",
        rich_help_panel=DEVICES,
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--memory-budget",
        metavar="SIZE",
        help="For weights, activations and caches, such as 4GiB.",
        rich_help_panel=DEVICES,
    ),
]
ShiftOption = Annotated[
    bool,
    typer.Option(
        "--context-shift",
        help="Forget half where the context is full.",
    ),
]
KeepOption = Annotated[
    int,
    typer.Option("--keep", min=0, help="First tokens that --context-shift leaves."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write a Chrome/Perfetto trace: GPU, NPU and control lanes.",
        rich_help_panel=OUTPUT,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Last line of stdout is JSON.", rich_help_panel=OUTPUT)
]


def open_llm(
    model: str,
    device: DeviceChoice,
    gpu: str,
    npu: str,
    weights: WeightsChoice | WeightFormat | None,
    plan: Path | None,
    max_seq_len: int | None,
    **options: Any,
) -> LLM:
    """Return the model, with a progress bar while it loads."""
    from hetero.generation.llm import LLM
    from hetero.terminal.notices import notify

    with progress_bar("loading") as advance:
        llm = LLM(
            model,
            device=device.value,
            gpu=gpu,
            npu=npu,
            weights=None if weights is None else weights.value,
            plan=str(plan) if plan is not None else None,
            max_seq_len=max_seq_len,
            progress=advance,
            **options,
        )
    for note in llm.choice.notes:
        notify(note)
    return llm


def sampling_given(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
) -> SamplingOptions:
    """Return the given options among those that a model has defaults for."""
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    return cast("SamplingOptions", {k: v for k, v in given.items() if v is not None})


def shown(text: str) -> Text:
    """Return the text of a file for a console, without markup and control characters."""
    return Text(printable(text))


def parse_strategy(name: str) -> NamedStrategy:
    """Return a known strategy. Raises `UserError` with the nearest name."""
    known = get_args(NamedStrategy)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown strategy {name!r}: {hint}choose one of {', '.join(known)}")
    return cast("NamedStrategy", name)


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """Show a progress bar on stderr, removed when done; yield a function of (done, total)."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )

    class Count(MofNCompleteColumn):
        """A count that is empty while the total is unknown."""

        def render(self, task: Task) -> Text:
            return Text("") if task.total is None else super().render(task)

    columns = (TextColumn(what), BarColumn(), Count(), TimeRemainingColumn())
    silent = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=silent) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def parse_biases(given: list[str] | None) -> dict[int, float]:
    """Parse `ID=BIAS` options. Raises `UserError`."""
    biases: dict[int, float] = {}
    for text in given or []:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UserError(
                f"--logit-bias must be a token id and a number such as 42=-5, got {text!r}"
            ) from None
    return biases
