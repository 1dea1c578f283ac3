"""`hetero plan`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hetero.backends.formats import CacheFormat
from hetero.cli.options import JsonOption, stderr


class ObjectiveChoice(StrEnum):
    """Values of --objective."""

    LATENCY = "latency"
    ENERGY = "energy"


class PrecisionChoice(StrEnum):
    """Values of --precision."""

    AUTO = "auto"
    A16 = "a16"
    A8 = "a8"
    ANY = "any"


def _ending(report: Path | None) -> Path | None:
    """Refuse a report that could not be written before anything is solved."""
    if report is not None:
        from hetero.solver.execution_plan import report_ending

        report_ending(report)
    return report


PlannedWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="NAME",
        help="Weights and activations.",
        show_default="what the file or directory holds, else w4a16",
    ),
]


PlannedCache = Annotated[
    CacheFormat | None,
    typer.Option(
        "--kv",
        help="Format of cached keys and values.",
        show_default="f16 where the profile timed it, else f32",
    ),
]


PlannedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="As for generate, or the name of known shapes, such as llama-3-8b.",
    ),
]


GraphMemory = Annotated[
    str | None,
    typer.Option(
        "--graph-memory",
        metavar="SIZE",
        help="With --graph-sizes auto: the most that graphs may hold, such as 1GiB.",
    ),
]


PreparationBudget = Annotated[
    float | None,
    typer.Option(
        "--preparation-budget",
        metavar="SECONDS",
        help="With --graph-sizes auto: the most seconds to prepare them.",
    ),
]


Explained = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="MATMUL",
        help="Every candidate of one: qkv, o, gate_up, down or lm_head.",
    ),
]


PlannedPrecision = Annotated[
    PrecisionChoice,
    typer.Option("--precision", help="Activations; auto: a8 only where a16 cannot run."),
]


ReportOption = Annotated[
    Path | None,
    typer.Option("--report", help="Write a report (.html, .md, .json).", callback=_ending),
]


PlannedProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="What predicts: a file or a shipped name.",
        show_default="this machine's",
    ),
]


def plan_command(
    model: PlannedModel,
    profile: PlannedProfile = None,
    seq_lens: Annotated[
        str,
        typer.Option(
            "--seq-lens", metavar="LIST", help="Prompt lengths; LENGTH:WEIGHT says how often."
        ),
    ] = "64,256,1024",
    graph_sizes: Annotated[
        str | None,
        typer.Option(
            "--graph-sizes", metavar="LIST", help="Token counts of NPU graphs, or `auto`: the best."
        ),
    ] = None,
    graph_memory: GraphMemory = None,
    preparation_budget: PreparationBudget = None,
    objective: Annotated[
        ObjectiveChoice, typer.Option("--objective", help="What is minimised.")
    ] = ObjectiveChoice.LATENCY,
    precision: PlannedPrecision = PrecisionChoice.AUTO,
    max_gpu_share: Annotated[
        float, typer.Option("--max-gpu-share", help="Most of a matmul's time that the GPU works.")
    ] = 1.0,
    memory_budget: Annotated[
        str | None,
        typer.Option("--memory-budget", metavar="SIZE", help="For weights, such as 4GiB."),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=0, help="Tokens before a decode step.")
    ] = 256,
    step_tokens: Annotated[
        int | None, typer.Option("--step-tokens", min=1, help="Longest call of a long prompt.")
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="Gain that a cut must bring over one device.")
    ] = 0.03,
    weights: PlannedWeights = None,
    kv: PlannedCache = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="PROFILE", help="Another profile, or a saved plan."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Save the plan (JSON).")] = None,
    report: ReportOption = None,
    explain: Explained = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best cut of every matmul of MODEL between GPU and NPU."""
    from hetero.cli.work.plan import other, parse_sizes, show_plan
    from hetero.placement.planning import parse_lengths, parse_size, planned, spec_on
    from hetero.solver.request import PlanRequest
    from hetero.terminal.notices import notify

    lengths, length_weights = parse_lengths(seq_lens, "--seq-lens")
    request = PlanRequest(
        seq_lens=lengths,
        length_weights=length_weights,
        graph_sizes=parse_sizes(graph_sizes),
        objective=objective.value,
        precision=precision.value,
        max_gpu_share=max_gpu_share,
        memory_budget_bytes=None if memory_budget is None else parse_size(memory_budget),
        graph_memory_bytes=None if graph_memory is None else parse_size(graph_memory),
        preparation_budget_s=preparation_budget,
        context=context,
        step_tokens=step_tokens,
        margin=margin,
        curves=report is not None,
    )
    spec, measured = spec_on(model, weights, profile, kv and kv.value)
    with stderr.status("solving"):
        found = planned(spec, measured, request)
    others = [] if compare is None else [other(compare, spec, request)]
    if out is not None:
        found.save(out)
    if report is not None:
        found.report(report, compare=others)
        notify(f"{report} is written: open it in a browser")
    show_plan(found, others, explain, as_json=as_json)
