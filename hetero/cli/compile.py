"""`hetero compile`: NPU graphs of a model, ahead of time, for a named chip."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hetero.cli.options import JsonOption
from hetero.errors import UserError
from hetero.terminal import printable
from hetero.terminal.notices import notify

if TYPE_CHECKING:
    from hetero.compiling.jobs import Sharing
    from hetero.compiling.npu_graphs import Compilation
    from hetero.models.bundle import BundleManifest

PROMPT_TOKENS = 1024  # four calls of the largest graphs, as in mllm-NPU's section 3.2


def compile_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for generate.")],
    soc: Annotated[str, typer.Option(metavar="CHIP", help="Such as sm8650 (Snapdragon 8 Gen 3).")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory to write.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan; default: solved by the chip's profile.")
    ] = None,
    strategy: Annotated[
        Literal["auto", "layer"],
        typer.Option(metavar="NAME", help="auto: solved; layer: prompts' matmuls on the NPU."),
    ] = "auto",
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The chip's times; default: a shipped profile."),
    ] = None,
    seq_lens: Annotated[
        str | None, typer.Option(metavar="LIST", help="Prompt lengths to plan for first.")
    ] = None,
    graph_sizes: Annotated[
        str | None, typer.Option(metavar="LIST", help="Such as 32,128,256; default: solved.")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Longest context of the bundle.")
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="NAME", help="Weights and activations.")
    ] = "w4a16",
    share_weights: Annotated[
        bool | None,
        typer.Option(
            "--share-weights/--no-share-weights",
            help="One copy for all sizes; for devices only. Default: where it is needed to fit.",
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the graphs; default: what the NPU can hold."),
    ] = None,
    whole_caches: Annotated[
        bool, typer.Option("--whole-caches", help="Sliding windows keep all, as for serve.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it takes.")] = False,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of the prompt that --dry-run looks at.")
    ] = PROMPT_TOKENS,
    as_json: JsonOption = False,
) -> None:
    """Compile every NPU graph of MODEL for a chip, into a directory that `generate` runs."""
    from hetero.arguments import parse_size
    from hetero.compiling.npu_graphs import CompileRequest, prepare_by_default
    from hetero.placement.planning import locate_profile, parse_tokens
    from hetero.solver.execution_plan import ExecutionPlan

    request = CompileRequest(
        model,
        soc,
        plan=None if plan is None else ExecutionPlan.load(plan),
        profile=None if profile is None else locate_profile(profile)[0],
        strategy=strategy,
        weights=weights,
        graph_sizes=() if graph_sizes is None else parse_tokens(graph_sizes, "--graph-sizes"),
        seq_lens=() if seq_lens is None else parse_tokens(seq_lens, "--seq-lens"),
        max_bytes=None if max_size is None else parse_size(max_size),
        max_seq_len=max_seq_len,
        share_weights=share_weights,
        whole_caches=whole_caches,
    )
    compilation = prepare_by_default(request)
    for note in compilation.notes:
        notify(printable(note))
    name = printable(compilation.loaded.name)
    print(f"{name} for {soc}: {compilation.estimate.describe()}")
    print(compilation.describe_memory())
    if dry_run:
        shared = compilation.sharing(prompt_tokens)
        if shared is not None:
            print(shared.describe())
        finish(as_json, estimated(compilation, shared))
        return
    if out is None:
        raise UserError("--out is missing: name the directory to write, or use --dry-run")
    start = time.perf_counter()
    manifest = with_progress(compilation, out)
    seconds = time.perf_counter() - start
    print(
        f"{out}: {len(manifest.graphs)} files of graphs, {manifest.graphs_bytes / 2**20:,.0f} MiB, "
        f"in {seconds:.0f} s; run it with: hetero generate {out} PROMPT"
    )
    finish(as_json, {"out": str(out), "seconds": seconds, **manifest.model_dump(mode="json")})


def with_progress(compilation: Compilation, out: Path) -> BundleManifest:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from hetero.compiling.npu_graphs import compile_model

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
        "share_weights": compilation.share_weights,
        "domains": [asdict(domain) for domain in compilation.domains],
        "gpu_bytes": compilation.gpu_bytes,
        "cpu_bytes": compilation.cpu_bytes,
        "prompt": None if shared is None else shared.document(),
    }


def finish(as_json: bool, document: dict[str, object]) -> None:
    if as_json:
        print(json.dumps(document))
