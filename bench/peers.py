"""hetero beside its peers, and its own ways to run a model beside each other.

    pip install -e '.[peers]'
    python bench/peers.py --model llama-3.2-1b --profile host -p 256 -n 32 -r 3
    python bench/peers.py --model qwen3.5-0.8b --layers 8 --only 2,auto,OpenCL,tensor
    python bench/peers.py levels --profile host      # tensor level, single devices, strategies
    python bench/peers.py starts --file-type Q4_K_M  # a file to its first text

Without a subcommand: hetero, llama.cpp and OpenVINO GenAI read one GGUF file, of random weights or
`--file`, and compute with int8 activations (`w4a8`, `gguf-a8`). ONNX Runtime GenAI, which reads no
quantised GGUF, has the same shapes in 4 bits of its own (`parts/genai_models.py`). Every engine has
a process of its own; rounds are interleaved; two threads mean both cores. A peer that is not
installed, or that fails, is named instead of measured.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from common import MIB, Prompt, Rounds, Tokens, Worker, finish, new_app, spread, table
from parts import engines
from parts.gguf_files import write_random
from parts.gguf_models import shallow_config, write_random_model
from parts.gguf_starts import starts
from parts.levels import levels

from hetero.backends.formats import WeightFormat
from hetero.models import model_spec

app = new_app(__doc__)
app.command("levels")(levels)
app.command("starts")(starts)
WARM_UP_TOKENS = 4
BASE = "llama.cpp, 2 threads"
MODES = {
    "hetero": "hetero, tensor level",
    "auto": "hetero, auto",
    "gpu": "hetero, OpenCL core",
    "npu": "hetero, ONNX Runtime core",
}
COMPUTED = {"Q4_0": "w4a8", "Q4_K_M": "gguf-a8", "Q8_0": "w8a16"}
Samples = dict[str, list[float]]


def make_workers(
    model: str,
    profile: str | None,
    length: int,
    context: int,
    kv: list[str],
    folder: Path,
    file_type: str,
    layers: int,
    file: Path | None,
    steps: bool,
) -> Iterator[Worker]:
    """Everything that is compared; files are written to `folder`."""
    path = file or folder / "random.gguf"
    config = shallow_config(model, layers)
    if not file and (layers or config.mixers or config.experts):
        write_random_model(config, path, context=context, file_type=file_type)
    elif not file:
        write_random(model_spec(model, WeightFormat.W4A8), path, context, file_type)
    cores = sorted(os.sched_getaffinity(0))
    for cached in kv:
        said, both = "" if cached == kv[0] else f", {cached}", {"kv": cached, "context": context}
        both["path"] = str(path)
        for threads in (1, 2):
            name, pinned = f"llama.cpp, {threads} thread{'s' * (threads > 1)}", cores[-threads:]
            yield Worker(name + said, engines.LlamaCpp, threads=threads, cores=pinned, **both)
        if not steps:  # it decodes behind a prompt of its own only
            name = "OpenVINO GenAI, 2 threads" + said
            given = {"path": str(path), "kv": cached, "threads": 2, "cores": cores[-2:]}
            yield Worker(name, engines.OpenVino, **given)
        if not steps and not file and cached == "f16":  # it reads no quantised file
            given = {"model": model, "layers": layers, "folder": folder}
            given |= {"context": context, "threads": 2, "cores": cores[-2:]}
            yield Worker("ONNX Runtime GenAI, 2 threads", engines.OnnxGenAi, **given)
        for device, name in MODES.items():
            given = {"profile": profile, "length": length, "device": device}
            given["weights"] = COMPUTED[file_type]
            yield Worker(name + said, engines.Hetero, **given, **both)


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
            if test not in samples:
                continue
            ratios = (a / b for a, b in zip(samples[test], found[base][test], strict=True))
            ratio, nbytes = f"{statistics.median(ratios):.2f}", memory[name]
            yield [name, test, *spread(samples[test]), ratio, f"{nbytes / MIB:.0f}"]


def versions() -> Iterator[str]:
    """The installed peers, with their versions."""
    for package in ("llama-cpp-python", "openvino-genai", "onnxruntime-genai"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"


@app.callback(invoke_without_command=True, no_args_is_help=False)
def peers(
    ctx: typer.Context,
    model: str = "llama-3.2-1b",
    profile: Annotated[str | None, typer.Option(help="with the model's shapes at w4a8")] = None,
    p: Prompt = 256,
    n: Tokens = 32,
    r: Rounds = 3,
    only: Annotated[str, typer.Option(help="parts of engines' names: 'llama.cpp,auto'")] = "",
    file_type: Annotated[str, typer.Option(help=", ".join(COMPUTED))] = "Q4_0",
    kv: Annotated[str, typer.Option(help="formats of everybody's caches: 'f16,q8'")] = "f16",
    layers: Annotated[int, typer.Option(help="the model's first ones, 0 for all")] = 0,
    file: Annotated[Path | None, typer.Option(help="a GGUF file instead of random weights")] = None,
    steps: Annotated[bool, typer.Option(help="the prompt once, rounds of decoding")] = False,
) -> None:
    """hetero and its peers on the same weights, quantisation, cores and prompts, interleaved."""
    if ctx.invoked_subcommand is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        made = [
            worker
            for worker in make_workers(
                model,
                profile,
                p,
                max(4096, p + (r if steps else 1) * (n + 8)),
                kv.split(","),
                Path(folder),
                file_type,
                layers,
                file,
                steps,
            )
            if any(part in worker.name for part in only.split(","))
        ]
        workers = list(started(made, p))
        found: dict[str, Samples] = {worker.name: {} for worker in workers}
        for turn in range(r):
            print(f"round {turn + 1} of {r}", file=sys.stderr, flush=True)
            for worker in workers:
                ask = ("steps", n) if steps else ("round", p, n)
                for test, speed in worker.ask(*ask).items():
                    found[worker.name].setdefault(test, []).append(speed)
                last = ", ".join(f"{x} {v[-1]:.2f}" for x, v in found[worker.name].items())
                print(f"  {worker.name}: {last}", file=sys.stderr, flush=True)
        memory = {worker.name: worker.ask("memory") for worker in workers}
        for worker in workers:
            worker.stop()
    if not workers:
        raise SystemExit("no engine ran: see the lines above")
    base = BASE if BASE in found else workers[0].name
    measured = file.name if file else f"{model} {file_type}"
    print(f"measured; {measured}, caches {kv}, prompt {p}, decode {n}, {r} rounds\n")
    head = f"engine|test|tokens/s (median)|min|max|× {base}|PSS MiB"
    table(head, rows(found, memory, base))
    finish(f"peers: {', '.join(versions()) or 'none installed'}")


if __name__ == "__main__":
    app()
