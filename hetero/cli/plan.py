"""`hetero plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero.backends.formats import CacheFormat
from hetero.cli.options import JsonOption, stderr
from hetero.cli.quality_budget import TOKENS, QualityOption
from hetero.errors import UserError
from hetero.terminal import json_line

if TYPE_CHECKING:
    from hetero.placement.engine_arguments import OtherEngine
    from hetero.profiler.model_graph import ModelGraph
    from hetero.profiler.records import DeviceProfile
    from hetero.profiler.table_data import TableData
    from hetero.solver.execution_plan import ExecutionPlan
    from hetero.solver.request import GraphSizes, PlanRequest


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


class EngineChoice(StrEnum):
    """Values of --print-args."""

    LLAMA_CPP = "llama.cpp"
    GENIEX = "geniex"


def _ending(report: Path | None) -> Path | None:
    """Raise `UserError` for a report that could not be written, before anything is solved."""
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
        metavar="MODEL", help="As for generate, or the name of known shapes, such as llama-3-8b."
    ),
]


CountedExperts = Annotated[
    Path | None,
    typer.Option(
        "--experts",
        metavar="FILE",
        help="How often experts are chosen, of eval --count-experts.",
        show_default="equal shares",
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


PrintArguments = Annotated[
    EngineChoice | None,
    typer.Option(
        "--print-args", help="No plan: arguments of another engine, for its best device here."
    ),
]


CalibrateOption = Annotated[
    Path | None, typer.Option(help="With --quality: a text like those of the model's use.")
]


CalibrationTokens = Annotated[
    int | None,
    typer.Option(min=32, help="With --quality: read this much of it.", show_default=str(TOKENS)),
]


def plan_command(
    model: PlannedModel,
    profile: PlannedProfile = None,
    seq_lens: Annotated[
        str, typer.Option(metavar="LIST", help="Prompt lengths; LENGTH:WEIGHT says how often.")
    ] = "64,256,1024",
    graph_sizes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Token counts of NPU graphs, or `auto`: the best."),
    ] = None,
    graph_memory: GraphMemory = None,
    preparation_budget: PreparationBudget = None,
    objective: Annotated[
        ObjectiveChoice, typer.Option(help="What is minimised.")
    ] = ObjectiveChoice.LATENCY,
    precision: PlannedPrecision = PrecisionChoice.AUTO,
    max_gpu_share: Annotated[
        float, typer.Option(help="Most of a matmul's time that the GPU works.")
    ] = 1.0,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For weights, such as 4GiB.")
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens before a decode step.")] = 256,
    step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest call of a long prompt.")
    ] = None,
    margin: Annotated[
        float, typer.Option(help="Gain that a cut must bring over one device.")
    ] = 0.03,
    experts: CountedExperts = None,
    weights: PlannedWeights = None,
    kv: PlannedCache = None,
    quality: QualityOption = None,
    calibrate: CalibrateOption = None,
    calibration_tokens: CalibrationTokens = None,
    compare: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="Another profile, or a saved plan.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the plan (JSON).")] = None,
    report: ReportOption = None,
    explain: Explained = None,
    print_args: PrintArguments = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best cut of every matmul of MODEL between GPU and NPU."""
    from hetero.arguments import parse_size
    from hetero.cli.quality_budget import opened, with_quality
    from hetero.placement.planning import parse_lengths, planned, spec_on
    from hetero.placement.where_fastest import with_fastest
    from hetero.solver.expert_shares import Routing
    from hetero.solver.request import PlanRequest
    from hetero.terminal.notices import notify

    asked = {"calibrate": calibrate, "calibration-tokens": calibration_tokens}
    text = checked_quality(quality, asked, objective, print_args)
    given = None if text is None else opened(model, text, calibration_tokens or TOKENS)
    lengths, length_weights = parse_lengths(seq_lens, "--seq-lens")
    request = PlanRequest(
        third=True,
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
    if experts is not None:
        request = replace(request, routing=Routing.load(experts).checked(spec))
    if print_args is not None:
        show_arguments(print_args.value, spec, measured, request, as_json=as_json)
        return
    with stderr().status("solving"):
        finished = with_fastest(planned(spec, measured, request), spec, measured, request)
    if quality is not None and given is not None:
        finished = with_quality(finished, quality, given, measured)
    others = [] if compare is None else [other(compare, spec, request)]
    if out is not None:
        finished.save(out)
    if report is not None:
        finished.report(report, compare=others)
        notify(f"{report} is written: open it in a browser")
    show_plan(finished, others, explain, as_json=as_json)


def checked_quality(
    quality: float | None,
    asked: Mapping[str, object],
    objective: ObjectiveChoice,
    print_args: EngineChoice | None,
) -> Path | None:
    """Return the text of --quality.

    Raises `UserError` for options that it needs, or that do not go with it.
    """
    from hetero.cli.quality_budget import check_budget

    if quality is None:
        if given := [name for name, value in asked.items() if value is not None]:
            raise UserError(
                f"--{given[0]} is for --quality: give --quality KL too, or leave it out"
            )
        return None
    if objective is ObjectiveChoice.ENERGY:
        raise UserError("--quality buys time and bytes: leave out --objective energy")
    if print_args is not None:
        raise UserError("--print-args makes no plan: leave out --quality")
    calibrate = asked["calibrate"]
    return check_budget(quality, calibrate if isinstance(calibrate, Path) else None)


def show_arguments(
    engine: OtherEngine,
    spec: ModelGraph,
    profile: DeviceProfile,
    request: PlanRequest,
    *,
    as_json: bool,
) -> None:
    """Print the arguments of another engine on stdout, and why on stderr."""
    from hetero.placement.engine_arguments import engine_arguments
    from hetero.terminal.notices import notify

    request.check()
    best = engine_arguments(engine, spec, profile, request)
    if as_json:
        print(json.dumps(best.document(engine)), flush=True)
        return
    needed = "".join(f"; set {name}={value}" for name, value in best.environment.items())
    notify(best.reason + needed)
    print(" ".join(best.arguments), flush=True)


def parse_sizes(value: str | None) -> GraphSizes:
    """Parse `auto`, token counts, or nothing. Raises `UserError`."""
    from hetero.placement.planning import parse_tokens

    if value is None or value == "auto":
        return value  # type: ignore[return-value]
    return parse_tokens(value, "--graph-sizes")


def show_plan(
    plan: ExecutionPlan, others: list[ExecutionPlan], explain: str | None, *, as_json: bool
) -> None:
    if not as_json:
        _print_plan(plan, others, explain)
    else:
        _matching(plan, explain)
        print(json_line(plan.model_dump_json()), flush=True)


def other(name: str, spec: ModelGraph, request: PlanRequest) -> ExecutionPlan:
    from hetero.placement.planning import load_either, planned
    from hetero.profiler.records import DeviceProfile

    document = load_either(name)
    if isinstance(document, DeviceProfile):
        return planned(spec, document, request)
    return document


def _print_plan(plan: ExecutionPlan, others: list[ExecutionPlan], explain: str | None) -> None:
    from rich.console import Console

    from hetero.cli.tables import say, show
    from hetero.solver.report import brief, conclusion, content, fastest_table, units

    console = Console()
    if explain is not None:
        for title, candidates in _matching(plan, explain):
            show(candidates._replace(title=title), console)
        return
    say(
        f"{content.name(plan)}: {content.kind(plan)} numbers, plan {plan.plan_id}, "
        f"solved in {units.duration(plan.solve_s)}",
        console,
    )
    for sentence in conclusion.sentences(plan):
        say(sentence, console)
    tables = [
        fastest_table.table(plan),
        brief.gains(plan),
        content.modes(plan),
        brief.operators(plan),
    ]
    for table in (
        *tables,
        content.attention(plan),
        content.what_if(plan, others),
        content.memory(plan),
        content.quality(plan),
    ):
        if table is not None:
            show(table, console)
    for sentence in fastest_table.answers(plan):
        say(sentence, console)
    for note in plan.notes:
        say(f"note: {note}", console)


def _matching(plan: ExecutionPlan, explain: str | None) -> list[tuple[str, TableData]]:
    """Return the tables of candidates of one matmul. Raises `UserError` for an unknown name."""
    from hetero.solver.report import content

    if explain is None:
        return []
    known = sorted({op.op for op in plan.ops})
    if explain not in known:
        raise UserError(f"--explain {explain!r}: the plan's matmuls are {', '.join(known)}")
    tables = list(content.alternatives(plan))
    named = [op for op in plan.ops if op.candidates]
    return [(t.title, t) for op, t in zip(named, tables, strict=True) if op.op == explain]
