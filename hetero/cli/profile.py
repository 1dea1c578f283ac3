"""`hetero profile` (also `hetero-profile`) and `hetero report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hetero.cli.options import GpuOption, JsonOption, NpuOption, stderr
from hetero.errors import UserError

FormatsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--weights",
        metavar="NAME",
        help="A format; repeat for several.",
        show_default="w4a16",
    ),
]


SocOption = Annotated[
    str | None,
    typer.Option(
        "--soc",
        metavar="CHIP",
        help="A chip that is not here, such as sm8650; else a name for the profile.",
    ),
]
ShapesOption = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="Measure exactly this model's shapes."),
]


def profile_command(
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write.", show_default="this machine's")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything, in a minute.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Such as 90s, 10m, 1h.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run ended.")] = False,
    add: Annotated[
        bool, typer.Option("--add", help="Measure kernels that the finished file lacks.")
    ] = False,
    model: ShapesOption = None,
    weights: FormatsOption = None,
    soc: SocOption = None,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure this device once; the solver and the runtime predict from it."""
    from hetero.cli.work.profile import progress, report
    from hetero.measuring.compiler_mode import compiled_profile, is_compiled_for
    from hetero.measuring.profiling import complete_profile, parse_budget, profile_device
    from hetero.profiler.files import own_profile_path
    from hetero.profiler.journal import journal_path
    from hetero.profiler.options import DEFAULT_BUDGET_S, QUICK_BUDGET_S
    from hetero.profiler.records import DeviceProfile
    from hetero.terminal.notices import notify

    path = out or own_profile_path()
    if add:
        others = {"quick": quick, "budget": budget, "resume": resume, "model": model}
        _refuse_beside_add(others | {"weights": weights, "soc": soc})
    if soc is not None and is_compiled_for(soc):
        with progress(None) as show:
            taken = compiled_profile(soc, out, model=model, progress=show)
        report(taken, out or Path(f"{soc}.json"), as_json)
        return
    if add:
        with stderr.status("measuring"):
            taken, notes = complete_profile(path, gpu=gpu, npu=npu)
        for said in notes or ["it has all kernels that these devices have"]:
            notify(f"{path}: {said}")
        report(taken, path, as_json)
        return
    budget_s = parse_budget(budget) if budget is not None else None
    journal = journal_path(path)
    begun = journal is not None and journal.exists()
    if resume and not begun and path.is_file():
        notify(f"{path} is finished, nothing is measured (without --resume it is taken again)")
        report(DeviceProfile.load(path), path, as_json)
        return
    if begun and not resume:
        notify(f"the run that was interrupted is started over: with --resume {path} goes on")
    limit_s = budget_s or (QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S)
    try:
        with progress(limit_s) as show:
            taken = profile_device(
                path,
                quick=quick,
                budget_s=budget_s,
                resume=resume,
                gpu=gpu,
                npu=npu,
                model=model,
                weights=weights or ["w4a16"],
                name=soc or "host",
                progress=show,
            )
    except KeyboardInterrupt:
        if journal is not None and journal.exists():
            notify("what was measured is kept: the same command with --resume goes on")
        raise
    report(taken, path, as_json)


def _refuse_beside_add(others: Mapping[str, object]) -> None:
    """Raise `UserError` for an option that says what is measured of a new profile."""
    given = next((name for name, value in others.items() if value), None)
    if given is not None:
        raise UserError(
            "--add measures what a finished profile lacks, on the shapes and formats that it has: "
            f"leave out --{given}"
        )


def report_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile or a plan (JSON).")],
    out: Annotated[Path, typer.Option("--out", help="File to write (.html; a plan: .md, .json).")],
) -> None:
    """Draw a saved profile or plan as one self-contained page."""
    from hetero.placement.planning import load_either
    from hetero.profiler.records import DeviceProfile

    loaded = load_either(str(file))
    if isinstance(loaded, DeviceProfile):
        from hetero.profiler.report import write_report  # matplotlib takes a second

        write_report(loaded, out)
    else:
        loaded.report(out)
    print(out)
