"""hetero beside its peers, and its own ways to run a model beside each other.

    pip install -e '.[peers]'
    python bench/peers.py --model llama-3.2-1b --profile host -p 256 -n 32 -r 3
    python bench/peers.py levels --profile host      # tensor level, single devices, strategies

Without a subcommand: hetero and llama.cpp read one GGUF file of random Q4_0 weights, and compute
with int8 activations (`w4a8`). Every engine has a process of its own, and rounds are interleaved;
two threads mean both cores. A peer that is not installed, or that fails, is named instead of
measured.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from common import MIB, Prompt, Rounds, Tokens, Worker, finish, new_app, spread, table
from parts import engines
from parts.engines import CONTEXT
from parts.gguf_files import write_random
from parts.levels import levels

from hetero.backends.formats import WeightFormat
from hetero.models import model_spec

app = new_app(__doc__)
app.command("levels")(levels)
WARM_UP_TOKENS = 4
BASE = "llama.cpp, 2 threads"
MODES = {
    "hetero": "hetero, tensor level",
    "auto": "hetero, auto",
    "gpu": "hetero, OpenCL core",
    "npu": "hetero, ONNX Runtime core",
}
Samples = dict[str, list[float]]


def make_workers(model: str, profile: str | None, length: int, folder: Path) -> Iterator[Worker]:
    """Everything that is compared; files are written to `folder`."""
    spec, path = model_spec(model, WeightFormat.W4A8), folder / "random.gguf"
    write_random(spec, path, CONTEXT)
    cores = sorted(os.sched_getaffinity(0))
    for threads in (1, 2):
        name, pinned = f"llama.cpp, {threads} thread{'s' * (threads > 1)}", cores[-threads:]
        yield Worker(name, engines.LlamaCpp, path=str(path), threads=threads, cores=pinned)
    for device, name in MODES.items():
        given = {"path": str(path), "profile": profile, "length": length, "device": device}
        yield Worker(name, engines.Hetero, **given)


def started(workers: list[Worker], prompt: int) -> Iterator[Worker]:
    """Those that load and run; the others are named with the last line of their error."""
    for worker in workers:
        try:
            worker.start()
            worker.ask("round", prompt, WARM_UP_TOKENS)
        except (RuntimeError, EOFError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error) else "its process ended"
            print(f"not measured: {worker.name}: {reason}")
        else:
            yield worker


def rows(found: dict[str, Samples], memory: dict[str, int], base: str) -> Iterator[list[object]]:
    """Medians with spread, the median of the rounds' ratios to a peer, memory."""
    for test in ("prefill", "decode"):
        for name, samples in found.items():
            ratios = (a / b for a, b in zip(samples[test], found[base][test], strict=True))
            ratio, nbytes = f"{statistics.median(ratios):.2f}", memory[name]
            yield [name, test, *spread(samples[test]), ratio, f"{nbytes / MIB:.0f}"]


@app.callback(invoke_without_command=True, no_args_is_help=False)
def peers(
    ctx: typer.Context,
    model: str = "llama-3.2-1b",
    profile: Annotated[str | None, typer.Option(help="with the model's shapes at w4a8")] = None,
    p: Prompt = 256,
    n: Tokens = 32,
    r: Rounds = 3,
    only: Annotated[str, typer.Option(help="parts of engines' names: 'llama.cpp,auto'")] = "",
) -> None:
    """hetero and its peers on the same weights, quantisation, cores and prompts, interleaved."""
    if ctx.invoked_subcommand is not None:
        return
    if p + n > CONTEXT:
        raise typer.BadParameter(f"-p and -n together are at most {CONTEXT}, got {p + n}")
    with tempfile.TemporaryDirectory() as folder:
        made = [
            worker
            for worker in make_workers(model, profile, p, Path(folder))
            if any(part in worker.name for part in only.split(","))
        ]
        workers = list(started(made, p))
        found: dict[str, Samples] = {worker.name: {} for worker in workers}
        for turn in range(r):
            print(f"round {turn + 1} of {r}", file=sys.stderr, flush=True)
            for worker in workers:
                for test, speed in worker.ask("round", p, n).items():
                    found[worker.name].setdefault(test, []).append(speed)
                last = ", ".join(f"{x} {v[-1]:.2f}" for x, v in found[worker.name].items())
                print(f"  {worker.name}: {last}", file=sys.stderr, flush=True)
        memory = {worker.name: worker.ask("memory") for worker in workers}
        for worker in workers:
            worker.stop()
    if not workers:
        raise SystemExit("no engine ran: see the lines above")
    base = BASE if BASE in found else workers[0].name
    print(f"measured; {model} w4a8, prompt {p}, decode {n}, {r} rounds\n")
    head = f"engine|test|tokens/s (median)|min|max|× {base}|PSS MiB"
    table(head, rows(found, memory, base))
    finish()


if __name__ == "__main__":
    app()
