"""What `hetero profile` shows while it measures, and of a profile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import typer
from rich.progress import Progress, ProgressColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from hetero.cli.options import shown, stderr
from hetero.cli.tables import show
from hetero.profiler.device_overheads import BANDWIDTH_REPEATS
from hetero.profiler.files import cached_profile_path, own_profile_path
from hetero.profiler.options import Event
from hetero.profiler.quality import grade
from hetero.profiler.records import DeviceProfile
from hetero.profiler.tables import TableData


def report(taken: DeviceProfile, path: Path, as_json: bool) -> None:
    """What was measured and what it comes to; exit code 1 for a profile that is no good."""
    quality = grade(taken)
    if as_json:
        print(json.dumps({"out": str(path), **summary(taken)}), flush=True)
    else:
        print_summary(taken)
        for said in quality.sentences:
            stderr.print(shown(said), style="bold" if said.startswith("Bad") else "")
        print(path)
    if not quality.good:
        print(
            "hetero: this profile is bad: take it again with a longer --budget, on a machine that "
            "does nothing else",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    if not as_json:
        stderr.print(shown(_next_command(path)))


def summary(profile: DeviceProfile) -> dict[str, Any]:
    """What a script wants to know of a fresh profile."""
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


# Parts of a profile, in plain words.
LABELS: Final = {
    "environment": "looking at this machine",
    "gpu stages": "sizes that the GPU pads to",
    "npu stages": "sizes that the NPU pads to",
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
    **dict.fromkeys(BANDWIDTH_REPEATS, "both devices at once"),
}


class TimeBar(ProgressColumn):
    """A bar that fills with the time that has passed of the budget, whatever is measured."""

    def render(self, task: Task) -> ProgressBar:
        """Return the bar now; pulsing where there is no budget."""
        if not task.total:
            return ProgressBar(total=None, pulse=True, width=24, animation_time=task.get_time())
        return ProgressBar(
            total=task.total, completed=min(task.elapsed or 0.0, task.total), width=24
        )


class TimeLeft(ProgressColumn):
    """Minutes and seconds that are left of the budget."""

    def render(self, task: Task) -> Text:
        """As text."""
        if not task.total:
            return Text("")
        left_s = task.total - (task.elapsed or 0.0)
        if left_s <= 0:
            return Text("longer than planned")
        minutes, seconds = divmod(int(left_s), 60)
        return Text(f"at most {minutes}:{seconds:02} left")


@contextmanager
def progress(budget_s: float | None) -> Iterator[Callable[[Event], None]]:
    """A bar on stderr with what is measured, how many matmuls, and the time that is left."""
    columns = (TimeBar(), TimeLeft(), TextColumn("{task.description}", markup=False))
    silent = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=silent) as bar:
        shown = bar.add_task("opening devices", total=budget_s)

        def show(event: Event) -> None:
            count = f" {event.done}/{event.total}" if event.what == "matmuls" else ""
            bar.update(shown, description=LABELS.get(event.what, event.what) + count)

        yield show


def _next_command(path: Path) -> str:
    named = "" if path in (own_profile_path(), cached_profile_path()) else f" --profile {path}"
    return f"next: hetero plan MODEL{named}"
