"""`hetero bench` and `hetero sync-bench`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from hetero.cli.options import (
    DEVICES,
    OUTPUT,
    AdaptOption,
    BudgetOption,
    CacheOption,
    CpuOption,
    DeviceChoice,
    GpuOption,
    JsonOption,
    ModelArgument,
    NpuOption,
    OrderChoice,
    OrderOption,
    PlanOption,
    ProfileOption,
    ShareOption,
    SyncChoice,
    WeightsChoice,
    WeightsOption,
    WholeOption,
    parse_strategy,
    stderr,
)
from hetero.cli.tables import show_or_print
from hetero.measuring.constants import MAX_ROUNDS
from hetero.solver.names import MAX_TOKENS, NamedStrategy
from hetero.terminal import printable

if TYPE_CHECKING:
    from hetero.placement.device_set import DeviceMode


class OutputFormat(StrEnum):
    """Values of bench -o."""

    MD = "md"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"


DevicesOption = Annotated[
    list[DeviceChoice] | None,
    typer.Option(
        "--device",
        help="What computes; repeat to compare.",
        show_default="auto",
        rich_help_panel=DEVICES,
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help=f"Force one; repeat to compare: {', '.join(get_args(NamedStrategy))}.",
        rich_help_panel=DEVICES,
    ),
]
SyncsOption = Annotated[
    list[SyncChoice] | None,
    typer.Option(
        "--sync",
        help="How to wait for the GPU; repeat to compare.",
        show_default="fast",
        rich_help_panel=DEVICES,
    ),
]


DepthsOption = Annotated[
    list[int] | None,
    typer.Option(
        "-d",
        min=0,
        max=MAX_TOKENS,
        metavar="DEPTH",
        help="Tokens before each test; repeat for several.",
        show_default="none before -p, -p before -n",
    ),
]


def bench_command(
    model: ModelArgument,
    prompt_tokens: Annotated[
        int, typer.Option("-p", min=1, max=MAX_TOKENS, help="Prompt tokens.")
    ] = 256,
    decode_tokens: Annotated[
        int, typer.Option("-n", min=0, max=MAX_TOKENS, help="Decoded tokens.")
    ] = 64,
    depth: DepthsOption = None,
    rounds: Annotated[int, typer.Option("-r", min=1, max=1000, help="Rounds.")] = 5,
    device: DevicesOption = None,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    cpu: CpuOption = "auto",
    weights: WeightsOption = None,
    strategy: StrategiesOption = None,
    sync: SyncsOption = None,
    plan: PlanOption = None,
    profile: ProfileOption = None,
    max_gpu_share: ShareOption = 1.0,
    memory_budget: BudgetOption = None,
    adapt: AdaptOption = True,
    order: OrderOption = OrderChoice.BEST,
    kv: CacheOption = None,
    whole_caches: WholeOption = False,
    output: Annotated[
        OutputFormat, typer.Option("-o", help="Format.", rich_help_panel=OUTPUT)
    ] = OutputFormat.MD,
    as_json: JsonOption = False,
) -> None:
    """Measure prefill (pp) and decode (tg) speed; several --device take turns in one run."""
    from hetero.measuring.benchmark import BenchOptions, run_benchmark

    modes: tuple[DeviceMode, ...] = tuple(d.value for d in device or [DeviceChoice.AUTO])
    options = BenchOptions(
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        depths=tuple(sorted(set(depth or ()))),
        rounds=rounds,
        devices=tuple(dict.fromkeys(modes)),
        gpu=gpu,
        npu=npu,
        cpu=cpu,
        weights=None if weights in (None, WeightsChoice.AUTO) else weights.value,
        strategies=tuple(parse_strategy(name) for name in dict.fromkeys(strategy or ())),
        syncs=tuple(dict.fromkeys(s.value for s in sync or [SyncChoice.FAST])),
        plan=None if plan is None else str(plan),
        profile=profile,
        max_gpu_share=max_gpu_share,
        memory_budget=memory_budget,
        adapt=adapt,
        order=order.value,
        kv=kv,
        whole_caches=whole_caches,
    )
    with stderr().status("loading") as status:
        report = run_benchmark(model, options, note=status.update)
    match OutputFormat.JSON if as_json else output:
        case OutputFormat.MD:
            show_or_print(report.table(), [report.title], report.remarks())
        case OutputFormat.JSON:
            print(report.to_json())
        case OutputFormat.JSONL:
            print(report.to_jsonl())
        case OutputFormat.CSV:
            print(printable(report.to_csv()))


def sync_bench_command(
    gpu: GpuOption = "auto",
    rounds: Annotated[
        int | None,
        typer.Option(
            "-r",
            min=5,
            max=MAX_ROUNDS,
            help="Waits of each kind.",
            show_default="a second of each",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what a wait costs: each method's added latency and CPU time."""
    from hetero.measuring.sync_bench import run_sync_bench

    with stderr().status("measuring"):
        report = run_sync_bench(gpu=gpu, rounds=rounds)
    if as_json:
        print(report.to_json())
    else:
        show_or_print(report.table(), report.remarks())
