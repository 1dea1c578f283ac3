"""What `hetero compile` shows and writes."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hetero.compiling.graphs import Compilation, compile_model
from hetero.compiling.jobs import Sharing
from hetero.models.bundle import BundleManifest


def with_progress(compilation: Compilation, out: Path) -> BundleManifest:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("weights", total=compilation.estimate.graphs)

        def note(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total, description=name)

        return compile_model(compilation, out, note)


def estimated(compilation: Compilation, shared: Sharing | None) -> dict[str, object]:
    estimate = compilation.estimate
    return {
        "graphs": estimate.graphs,
        "graphs_bytes": estimate.graphs_bytes,
        "weights_bytes": estimate.weights_bytes,
        "seconds": estimate.seconds,
        "peak_bytes": estimate.peak_bytes,
        "graph_sizes": list(compilation.sizes),
        "prompt": None if shared is None else shared.document(),
    }


def finish(as_json: bool, document: dict[str, object]) -> None:
    if as_json:
        print(json.dumps(document))
