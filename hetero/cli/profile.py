"""`hetero profile` (also `hetero-profile`) and `hetero report`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.progress import ProgressColumn

from hetero.cli.options import GpuOption, JsonOption, NpuOption, shown, stderr
from hetero.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Task
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    from hetero.profiler.options import Event
    from hetero.profiler.records import DeviceProfile

NO_THIRD: Final = "none"  # value of --measure-cpu
FormatsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--weights", metavar="NAME", help="A format; repeat for several.", show_default="w4a16"
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


RatesOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Measure nothing: fit a chip to what llama-bench printed (-o json, -o jsonl), or to a "
        "table of published rates (CSV).",
    ),
]


CheckOption = Annotated[
    Path | None,
    typer.Option(
        "--check",
        metavar="FILE",
        help="Measure nothing: check a profile that was sent, or the one in a doctor's report.",
    ),
]


CpuMeasuredOption = Annotated[
    str,
    typer.Option(
        "--measure-cpu",
        metavar="BACKEND",
        help="Measure a third device, too: ort-cpu, on the cores that the others leave.",
    ),
]


OldCpuOption = Annotated[str | None, typer.Option("--cpu", metavar="BACKEND", hidden=True)]


def profile_command(
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="this machine's")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Less of everything, in a minute.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Such as 90s, 10m, 1h.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run ended.")] = False,
    add: Annotated[
        bool, typer.Option("--add", help="Measure kernels that the finished file lacks.")
    ] = False,
    model: ShapesOption = None,
    weights: FormatsOption = None,
    soc: SocOption = None,
    rates: RatesOption = None,
    check: CheckOption = None,
    gpu: GpuOption = "auto",
    npu: NpuOption = "auto",
    measure_cpu: CpuMeasuredOption = NO_THIRD,
    cpu: OldCpuOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this device once; the solver and the runtime predict from it."""
    from hetero.measuring.compiler_mode import compiled_profile, is_compiled_for
    from hetero.measuring.profiling import parse_budget, profile_device
    from hetero.profiler.journal import journal_path
    from hetero.profiler.options import DEFAULT_BUDGET_S, QUICK_BUDGET_S
    from hetero.profiler.profile_files import own_profile_path
    from hetero.profiler.records import DeviceProfile
    from hetero.terminal.notices import notify

    own: dict[str, Any] = {"weights": weights, "measure-cpu": third_device(measure_cpu, cpu)}
    measuring = {"quick": quick, "budget": budget, "resume": resume, "model": model, **own}
    if check is not None:
        _refuse_to_measure("check", measuring | {"add": add, "from": rates, "out": out, "soc": soc})
        _check(check, as_json=as_json)
        return
    if rates is not None:
        _refuse_to_measure("from", measuring | {"add": add})
        _fit_rates(rates, out, soc, as_json=as_json)
        return
    path = out or own_profile_path()
    if add:
        _refuse_with_add(measuring | {"soc": soc})
        _complete(path, gpu, npu, as_json=as_json)
        return
    budget_s = None if budget is None else parse_budget(budget)
    limit_s = budget_s or (QUICK_BUDGET_S if quick else DEFAULT_BUDGET_S)
    if soc is not None and is_compiled_for(soc):
        _refuse_with_compiler({"resume": resume, **own})
        with progress(limit_s) as show:
            taken = compiled_profile(soc, out, model=model, budget_s=limit_s, progress=show)
        report(taken, out or Path(f"{soc}.json"), as_json)
        return
    journal = journal_path(path)
    begun = journal is not None and journal.exists()
    if resume and not begun and path.is_file():
        notify(f"{path} is finished, nothing is measured (without --resume it is taken again)")
        report(DeviceProfile.load(path), path, as_json)
        return
    if begun and not resume:
        notify(f"starting over an interrupted run: --resume continues {path}")
    try:
        with progress(limit_s) as show:
            taken = profile_device(
                path,
                quick=quick,
                budget_s=budget_s,
                resume=resume,
                gpu=gpu,
                npu=npu,
                cpu=own["measure-cpu"] or NO_THIRD,
                model=model,
                weights=weights or ["w4a16"],
                name=soc or "host",
                progress=show,
            )
    except KeyboardInterrupt:
        if journal is not None and journal.exists():
            notify("measurements are kept: the same command with --resume continues")
        raise
    report(taken, path, as_json)


def third_device(named: str, old: str | None) -> str | None:
    """Return the backend to measure as a third device, which `--cpu` named until lately."""
    if old is None:
        return named if named != NO_THIRD else None
    if named not in (NO_THIRD, old):
        raise UserError(
            f"--measure-cpu {named} and --cpu {old}, its old name, disagree: leave out --cpu"
        )
    from hetero.terminal.notices import notify

    notify(
        "hetero profile --cpu is now called --measure-cpu (elsewhere --cpu names what may take "
        "rows); the next release does not read it"
    )
    return old if old != NO_THIRD else None


def _refuse_to_measure(option: str, others: Mapping[str, object]) -> None:
    """Raise `UserError` for an option of measuring."""
    given = next((name for name, value in others.items() if value), None)
    if given is not None:
        raise UserError(f"--{option} measures nothing: leave out --{given}")


def _check(path: Path, *, as_json: bool) -> None:
    """Print the findings of a contributed profile; exit with code 1 where one failed."""
    from hetero.cli.doctor import print_findings
    from hetero.measuring.profile_checks import check_profile

    findings = print_findings(check_profile(path), as_json, ("PASS", "FAIL"))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _fit_rates(rates: Path, out: Path | None, soc: str | None, *, as_json: bool) -> None:
    """Write the profile that is fitted to a file of rates."""
    from hetero.cli.tables import show
    from hetero.measuring.rate_profile import profile_of_rates, units_table
    from hetero.profiler.profile_files import refuse_folder
    from hetero.terminal.notices import notify

    with stderr().status("fitting"):
        taken, notes = profile_of_rates(rates, soc)
    path = out or Path(f"{taken.name}.json")
    refuse_folder(path)
    taken.save(path)
    for note in notes:
        notify(note)
    if as_json:
        units = [unit.model_dump(mode="json") for unit in taken.units]
        named = {"out": str(path), "name": taken.name, "fingerprint": taken.fingerprint}
        print(json.dumps({**named, "units": units, "notes": list(notes)}), flush=True)
        return
    show(units_table(taken.units), stderr())
    print(path)
    stderr().print(shown(_next_command(path)))


def _complete(path: Path, gpu: str, npu: str, *, as_json: bool) -> None:
    """Measure the kernels that a finished profile lacks."""
    from hetero.measuring.profiling import complete_profile
    from hetero.terminal.notices import notify

    with stderr().status("measuring"):
        taken, notes = complete_profile(path, gpu=gpu, npu=npu)
    for sentence in notes or ["it has all kernels that these devices have"]:
        notify(f"{path}: {sentence}")
    report(taken, path, as_json)


def _refuse_with_add(others: Mapping[str, object]) -> None:
    """Raise `UserError` for an option that only a new profile has."""
    given = next((name for name, value in others.items() if value), None)
    if given is not None:
        raise UserError(
            "--add measures what a finished profile lacks, on the shapes and formats that it has: "
            f"leave out --{given}"
        )


def _refuse_with_compiler(others: Mapping[str, object]) -> None:
    """Raise `UserError` for an option that a chip's compiler knows nothing of."""
    given = next((name for name, value in others.items() if value), None)
    if given is not None and others[given] != ["w4a16"]:
        raise UserError(
            "--soc asks the chip's compiler, for w4a16, and what it compiled is kept: leave out "
            f"--{given}"
        )


def report_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile or a plan (JSON).")],
    out: Annotated[Path, typer.Option(help="File to write (.html; a plan: .md, .json).")],
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


def report(taken: DeviceProfile, path: Path, as_json: bool) -> None:
    """Print the results, and exit with code 1 for an unusable profile."""
    from hetero.profiler.quality import grade

    quality = grade(taken)
    if as_json:
        print(json.dumps({"out": str(path), **summary(taken)}), flush=True)
    else:
        print_summary(taken)
        for sentence in quality.sentences:
            stderr().print(shown(sentence), style="bold" if sentence.startswith("Bad") else "")
        print(path)
    if not quality.good:
        print(
            "hetero: this profile is bad: take it again with a longer --budget, on a machine that "
            "does nothing else",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    if not as_json:
        stderr().print(shown(_next_command(path)))


def summary(profile: DeviceProfile) -> dict[str, Any]:
    """Return the JSON document of a fresh profile."""
    from hetero.profiler.quality import grade

    return {
        "name": profile.name,
        "fingerprint": profile.fingerprint,
        "finished": profile.coverage.finished,
        "measured": profile.coverage.measured_tasks,
        "grid": profile.coverage.grid_tasks,
        "spent_s": profile.coverage.spent_s,
        "good": grade(profile).good,
        "verdict": list(grade(profile).sentences),
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
    """Print the results on stderr."""
    from hetero.cli.tables import show
    from hetero.profiler.table_data import TableData

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
        f"{profile.numbers} {coverage.measured_tasks} of {coverage.grid_tasks} matmuls in "
        f"{coverage.spent_s:.0f} s"
    )
    show(TableData(title, head, tuple(rows), lead=3, numbers=head[3:]), stderr())
    for bad in profile.quarantined:
        stderr().print(shown(f"wrong results on {bad.device}, not used: {bad.detail}"), style="red")
    for note in profile.notes:
        stderr().print(shown(note), style="dim")


# Parts of a profile, in plain words.
LABELS: Final = {
    "environment": "looking at this machine",
    "gpu stages": "sizes that the GPU pads to",
    "npu stages": "sizes that the NPU pads to",
    "cpu stages": "sizes that the CPU pads to",
    "gpu synchronisation": "what waiting for the GPU costs",
    "npu synchronisation": "what waiting for the NPU costs",
    "sleep": "how late a sleeping thread wakes",
    "every core": "OpenCL on every core",
    "preparation": "preparing kernels and graphs",
    "power": "looking for a power meter",
    "other kernels": "norms, attention and the like",
    "matmuls": "matrix multiplications",
    "stage checks": "checking the sizes that are padded to",
    "fitting": "fitting predictions",
}


class TimeBar(ProgressColumn):
    """A bar that fills with the elapsed share of the budget."""

    def render(self, task: Task) -> ProgressBar:
        """Return the current bar; pulsing where there is no budget."""
        from rich.progress_bar import ProgressBar

        if not task.total:
            return ProgressBar(total=None, pulse=True, width=24, animation_time=task.get_time())
        return ProgressBar(
            total=task.total, completed=min(task.elapsed or 0.0, task.total), width=24
        )


class TimeLeft(ProgressColumn):
    """The minutes and seconds left of the budget."""

    def render(self, task: Task) -> Text:
        """Return the bar as text."""
        from rich.text import Text

        if not task.total:
            return Text("")
        left_s = task.total - (task.elapsed or 0.0)
        if left_s <= 0:
            return Text("longer than planned")
        minutes, seconds = divmod(int(left_s), 60)
        return Text(f"at most {minutes}:{seconds:02} left")


@contextmanager
def progress(budget_s: float | None) -> Iterator[Callable[[Event], None]]:
    """Show a bar on stderr with the current task, the count of matmuls, and the time left."""
    from rich.progress import Progress, TextColumn

    from hetero.profiler.device_overheads import BANDWIDTH_REPEATS

    labels = LABELS | dict.fromkeys(BANDWIDTH_REPEATS, "both devices at once")
    columns = (TimeBar(), TimeLeft(), TextColumn("{task.description}", markup=False))
    silent = not stderr().is_terminal
    with Progress(*columns, console=stderr(), transient=True, disable=silent) as bar:
        shown = bar.add_task("opening devices", total=budget_s)

        def show(event: Event) -> None:
            count = f" {event.done}/{event.total}" if event.what == "matmuls" else ""
            bar.update(shown, description=labels.get(event.what, event.what) + count)

        yield show


def _next_command(path: Path) -> str:
    from hetero.profiler.profile_files import cached_profile_path, own_profile_path

    named = "" if path in (own_profile_path(), cached_profile_path()) else f" --profile {path}"
    return f"next: hetero plan MODEL{named}"
