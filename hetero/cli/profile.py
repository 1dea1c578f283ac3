"""`hetero profile` (also `hetero-profile`) and `hetero report`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hetero.cli.options import shown, stderr
from hetero.cli.tables import show
from hetero.measuring.compiler_mode import compiled_profile, is_compiled_for
from hetero.measuring.profiling import parse_budget, profile_device
from hetero.placement.planning import load_either
from hetero.profiler.files import own_profile_path
from hetero.profiler.options import Event
from hetero.profiler.records import DeviceProfile
from hetero.profiler.tables import TableData


def profile_command(
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write (default: this machine's).")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything, in a minute.")
    ] = False,
    budget: Annotated[str | None, typer.Option("--budget", help="Such as 90s, 10m, 1h.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run ended.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="Measure exactly this model's shapes.")
    ] = None,
    weights: Annotated[
        list[str] | None, typer.Option("--weights", help="Formats; repeat for several.")
    ] = None,
    soc: Annotated[
        str | None,
        typer.Option("--soc", help="A chip that is not here, or just a name."),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="GPU backend.")] = "auto",
    npu: Annotated[str, typer.Option("--npu", help="NPU backend.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is JSON.")] = False,
) -> None:
    """Measure this device once; the solver and the runtime predict from it."""
    path = out or own_profile_path()
    if soc is not None and is_compiled_for(soc):
        with _progress() as show:
            taken = compiled_profile(soc, out, model=model, progress=show)
        _report(taken, out or Path(f"{soc}.json"), as_json)
        return
    budget_s = parse_budget(budget) if budget is not None else None
    with _progress() as show:
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
    _report(taken, path, as_json)


def _report(taken: DeviceProfile, path: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"out": str(path), **summary(taken)}), flush=True)
        return
    print_summary(taken)
    print(path)


def report_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile or a plan (JSON).")],
    out: Annotated[Path, typer.Option("--out", help="File to write (.html; a plan: .md, .json).")],
) -> None:
    """Draw a saved profile or plan as one self-contained page."""
    loaded = load_either(str(file))
    if isinstance(loaded, DeviceProfile):
        from hetero.profiler.report import write_report  # matplotlib takes a second

        write_report(loaded, out)
    else:
        loaded.report(out)
    print(out)


def summary(profile: DeviceProfile) -> dict[str, Any]:
    """What a script wants to know of a fresh profile."""
    return {
        "name": profile.name,
        "fingerprint": profile.fingerprint,
        "finished": profile.coverage.finished,
        "measured": profile.coverage.measured_tasks,
        "grid": profile.coverage.grid_tasks,
        "spent_s": profile.coverage.spent_s,
        "quarantined": [entry.detail for entry in profile.quarantined],
        "validation": [
            {
                "device": predictor.device,
                "weights": predictor.weight_format.value,
                **entry.model_dump(),
            }
            for predictor in profile.predictors
            for entry in predictor.validation
        ],
    }


def print_summary(profile: DeviceProfile) -> None:
    """What was measured, on stderr."""
    coverage = profile.coverage
    head = ("device", "weights", "phase", "mean error", "95 %", "memory", "arithmetic")
    rows = []
    for predictor in profile.predictors:
        regimes = predictor.regimes
        speed = f"{regimes.bytes_per_s / 1e9:.1f} GB/s" if regimes.bytes_per_s else ""
        flops = f"{regimes.flops_per_s / 1e9:.0f} GFLOP/s" if regimes.flops_per_s else ""
        for entry in predictor.validation:
            names = (predictor.device, predictor.weight_format.value, entry.phase)
            rows.append((*names, f"{entry.mape:.1%}", f"{entry.p95:.1%}", speed, flops))
    title = (
        f"measured {coverage.measured_tasks} of {coverage.grid_tasks} matmuls in "
        f"{coverage.spent_s:.0f} s"
    )
    show(TableData(title, head, tuple(rows), lead=3, numbers=head[3:]), stderr)
    for bad in profile.quarantined:
        stderr.print(shown(f"wrong results on {bad.device}, not used: {bad.detail}"), style="red")
    for note in profile.notes:
        stderr.print(shown(note), style="dim")


@contextmanager
def _progress() -> Iterator[Callable[[Event], None]]:
    """A bar on stderr with what is measured, how much of the grid, and the time that is left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    silent = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=silent) as bar:
        shown = bar.add_task("opening devices", total=None)

        def show(event: Event) -> None:
            minutes, seconds = divmod(int(event.left_s), 60)
            bar.update(
                shown,
                description=f"{event.what}, at most {minutes}:{seconds:02} left",
                completed=event.done,
                total=event.total or None,
            )

        yield show
