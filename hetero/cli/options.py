"""Options that several commands share, opening a model, and the progress bar."""

from __future__ import annotations

import difflib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_args, get_type_hints

import typer

from hetero.backends.formats import CacheFormat, WeightFormat
from hetero.backends.registry import choices_text
from hetero.errors import UserError
from hetero.generation.constants import DEFAULT_MAX_TOKENS
from hetero.runtime.kv.constants import SINKS
from hetero.solver.names import NamedStrategy
from hetero.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from hetero.generation.llm import LLM
    from hetero.generation.options import GenerateOptions, SamplingOptions


@cache
def stderr() -> Console:
    """Return what tables and bars are drawn on."""
    from rich.console import Console

    return Console(stderr=True)


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
MINUTE_S: Final = 60.0
PREPARING_S: Final = 300.0  # of a first start, behind what was asked for
MODEL_HELP: Final = (
    "A directory, a .gguf file, OWNER/NAME of the hub, pypi:PACKAGE, demo or random:NAME."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
DeviceOption = Annotated[
    DeviceChoice,
    typer.Option(
        help="What computes; auto: what is predicted fastest, hetero: both at every matmul.",
        rich_help_panel=DEVICES,
    ),
]
GpuOption = Annotated[
    str, typer.Option(metavar="BACKEND", help=f"{choices_text('gpu')}.", rich_help_panel=DEVICES)
]
NpuOption = Annotated[
    str, typer.Option(metavar="BACKEND", help=f"{choices_text('npu')}.", rich_help_panel=DEVICES)
]
CpuOption = Annotated[
    str,
    typer.Option(
        metavar="BACKEND",
        help="Takes rows of matmuls besides both, where planned: auto, none or ort-cpu.",
        rich_help_panel=DEVICES,
    ),
]
WeightsOption = Annotated[
    WeightsChoice | None,
    typer.Option(
        help="Weights and activations.",
        show_default="MODEL's own, or w4a16",
        rich_help_panel=DEVICES,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        metavar="PROFILE",
        help="What predicts: a file or a shipped name.",
        show_default="this machine's",
        rich_help_panel=DEVICES,
    ),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Force one for comparison: {', '.join(get_args(NamedStrategy))}.",
        rich_help_panel=DEVICES,
    ),
]
PlanOption = Annotated[
    Path | None, typer.Option(help="A plan of `hetero plan`.", rich_help_panel=DEVICES)
]
ExpertsOption = Annotated[
    Path | None,
    typer.Option(
        help="Counts of `hetero eval --count-experts`, to place experts by.",
        rich_help_panel=DEVICES,
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Longest prompt plus answer, in tokens.", show_default="MODEL's, up to 4096"
    ),
]
SyncOption = Annotated[
    SyncChoice, typer.Option(help="How to wait for the GPU.", rich_help_panel=DEVICES)
]
ShareOption = Annotated[
    float,
    typer.Option(help="Most of the time that the GPU is busy, 0 to 1.", rich_help_panel=DEVICES),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="For weights, activations and caches, such as 4GiB.",
        rich_help_panel=DEVICES,
    ),
]
AdaptOption = Annotated[
    bool,
    typer.Option(help="Let cuts follow the devices' measured speeds.", rich_help_panel=DEVICES),
]
OrderOption = Annotated[
    OrderChoice, typer.Option(help="Order of the chunks of a long prompt.", rich_help_panel=DEVICES)
]
CacheOption = Annotated[
    CacheFormat | None,
    typer.Option(
        help="Format of cached keys and values.", show_default="f16", rich_help_panel=DEVICES
    ),
]
WaitOption = Annotated[
    bool,
    typer.Option(
        "--wait-for-plan",
        help="Answer when the plan's kernels are ready.",
        envvar="HETERO_WAIT_FOR_PLAN",
        show_envvar=False,
        rich_help_panel=DEVICES,
    ),
]
WholeOption = Annotated[
    bool,
    typer.Option(
        "--whole-caches",
        help="Layers with a window keep all keys and values.",
        rich_help_panel=DEVICES,
    ),
]


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    """Options of speculative decoding, for `generate` and `chat`; see `expanded`."""

    speculative: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most tokens guessed ahead.",
            show_default="0; draft 7",
            rich_help_panel=DEVICES,
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that guesses tokens ahead, or a Gemma 4 assistant; mtp: the model's own "
            "head for it; early-exit:N: its first N layers.",
            rich_help_panel=DEVICES,
        ),
    ] = None
    draft_device: Annotated[
        DeviceChoice, typer.Option(help="What computes the draft model.", rich_help_panel=DEVICES)
    ] = DeviceChoice.AUTO

    def arguments(self) -> dict[str, Any]:
        """Return those that open a model as arguments of `LLM`."""
        return {"draft_model": self.draft_model, "draft_device": self.draft_device.value}


SystemOption = Annotated[str | None, typer.Option(help="System message, for the chat template.")]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print speeds and placement.", rich_help_panel=OUTPUT)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Last line of stdout is JSON.", rich_help_panel=OUTPUT)
]


def _sampling(help: str, *, default: bool | str = True, metavar: str | None = None) -> Any:
    return typer.Option(help=help, show_default=default, metavar=metavar, rich_help_panel=SAMPLING)


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Options of opening a model, for what runs one; see `expanded`."""

    device: DeviceOption = DeviceChoice.AUTO
    gpu: GpuOption = "auto"
    npu: NpuOption = "auto"
    cpu: CpuOption = "auto"
    weights: WeightsOption = None
    plan: PlanOption = None
    experts: ExpertsOption = None
    profile: ProfileOption = None
    strategy: StrategyOption = None
    max_seq_len: ContextOption = None
    sync: SyncOption = SyncChoice.FAST
    max_gpu_share: ShareOption = 1.0
    memory_budget: BudgetOption = None
    adapt: AdaptOption = True
    order: OrderOption = OrderChoice.BEST
    kv: CacheOption = None

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of `LLM`. Raises `UserError`."""
        given = {key: x.value if isinstance(x, Enum) else x for key, x in vars(self).items()}
        plan = None if self.plan is None else str(self.plan)
        experts = None if self.experts is None else str(self.experts)
        strategy = None if self.strategy is None else parse_strategy(self.strategy)
        return {**given, "plan": plan, "experts": experts, "strategy": strategy}


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """Options of an answer, for `generate` and `chat`; see `expanded`."""

    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = DEFAULT_MAX_TOKENS
    stop: Annotated[list[str] | None, typer.Option(help="Ends the answer; may be repeated.")] = None
    context_shift: Annotated[
        bool, typer.Option("--context-shift", help="Forget half where the context is full.")
    ] = False
    keep: Annotated[int, typer.Option(min=0, help="First tokens that --context-shift leaves.")] = (
        SINKS
    )
    temperature: Annotated[float | None, _sampling("0 is greedy.", default="0; chats: MODEL's")] = (
        None
    )
    top_k: Annotated[
        int | None, _sampling("Keep the k likeliest; 0: all.", default="0; chats: MODEL's")
    ] = None
    top_p: Annotated[
        float | None,
        _sampling("Keep the likeliest of this probability.", default="1; chats: MODEL's"),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling("Least probability, of the likeliest's.", default="0; chats: MODEL's"),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling("Penalty of tokens of the text; 1: none.", default="1; chats: MODEL's"),
    ] = None
    frequency_penalty: Annotated[float, _sampling("For each time a token was generated.")] = 0.0
    presence_penalty: Annotated[float, _sampling("For tokens that were generated at all.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling("Added to a token's logit; repeatable.", metavar="ID=BIAS")
    ] = None
    seed: Annotated[int | None, _sampling("Makes sampling repeatable.")] = None

    def arguments(self) -> GenerateOptions:
        """Return those that no model has defaults for, as arguments of `LLM.generate`."""
        given = {key: x for key, x in vars(self).items() if key not in MODEL_SAMPLING}
        biases = parse_biases(self.logit_bias)
        return cast("GenerateOptions", {**given, "stop": self.stop or (), "logit_bias": biases})

    def sampling(self) -> SamplingOptions:
        """Return the given ones of those that a model has defaults for."""
        given = {key: x for key in MODEL_SAMPLING if (x := getattr(self, key)) is not None}
        return cast("SamplingOptions", given)


# Options that a model may have defaults for.
MODEL_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer with the fields of option classes as parameters.

    They replace each parameter which is one of the classes of options above.
    """
    hints = get_type_hints(command, include_extras=True)
    flat: dict[str, inspect.Parameter] = {}
    groups: dict[str, list[str]] = {}
    for name, given in inspect.signature(command).parameters.items():
        parameters = [given]
        if is_dataclass(hints[name]):
            parameters = list(inspect.signature(hints[name]).parameters.values())
            groups[name] = [x.name for x in parameters]
            hints |= get_type_hints(hints[name], include_extras=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        flat |= {x.name: x.replace(kind=keyword, annotation=hints[x.name]) for x in parameters}

    def run(**options: Any) -> None:
        made = {
            name: hints[name](**{field: options.pop(field) for field in fields})
            for name, fields in groups.items()
        }
        command(**options, **made)

    run.__doc__ = command.__doc__
    run.__annotations__ = {name: hints[name] for name in flat}
    run.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    return run


def open_llm(model: str, **options: Any) -> LLM:
    """Return the model, with a progress bar while it loads."""
    from hetero.generation.llm import LLM
    from hetero.terminal.notices import notify

    with progress_bar("loading") as advance:
        llm = LLM(model, progress=advance, **options)
    for note in llm.choice.notes:
        notify(note)
    return llm


def finish_preparing(llm: LLM) -> None:
    """Wait for what a first start prepares, so that the next one has it.

    Ctrl-C ends it; what is compiled by then stays in the cache.
    """
    from hetero.backends.host.time_limits import time_limit
    from hetero.terminal.notices import notify

    if llm.finish_preparing(0):
        return
    notify("still preparing OpenCL kernels for later starts (Ctrl-C leaves that to the next one)")
    with suppress(KeyboardInterrupt):
        llm.finish_preparing(time_limit(PREPARING_S))


def shown(text: str) -> Text:
    """Return the text of a file for a console, without markup and control characters."""
    from rich.text import Text

    return Text(printable(text))


def parse_strategy(name: str) -> NamedStrategy:
    """Return a known strategy. Raises `UserError` with the nearest name."""
    known = get_args(NamedStrategy)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown strategy {name!r}: {hint}choose one of {', '.join(known)}")
    return cast("NamedStrategy", name)


def _progress_lines(what: str) -> Callable[[int, int], None]:
    """Return a function of (done, total) that prints a line each minute."""
    from hetero.terminal.notices import notify

    start_s = printed_s = time.monotonic()

    def advance(done: int, total: int) -> None:
        nonlocal printed_s
        now_s = time.monotonic()
        if now_s - printed_s >= MINUTE_S:
            printed_s = now_s
            notify(f"{what}: {done} of {total} after {(now_s - start_s) / MINUTE_S:.0f} min")

    return advance


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """Show a progress bar on stderr, removed when done; yield a function of (done, total).

    Where stderr is no terminal, a line each minute.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield _progress_lines(what)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Count(MofNCompleteColumn):
        """A count that is empty while the total is unknown."""

        def render(self, task: Task) -> Text:
            return Text("") if task.total is None else super().render(task)

    columns = (TextColumn(what), BarColumn(), Count(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
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
