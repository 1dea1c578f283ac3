"""A bundle that was solved by its chip's profile, on the emulated chip and this machine's OpenCL.

python bench/bundles.py demo --soc sm8650 --profile snapdragon-8-gen-3
python bench/bundles.py llama-3.2-1b --layers 2

With --layers, the model is a known one of random weights with so many layers and a vocabulary of
4096: its matrices are large enough for the chip's own profile to cut them in decoding, too.

Its text is compared with that of the same model on the NPU of a PC. Times of planning and starting
are measured here; the speed of an emulator is not that of a chip, and is not shown.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from common import finish, one_command, table
from parts.gguf_files import write_random

from hetero import LLM, DeviceProfile
from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import KINDS
from hetero.models.graph import model_graph
from hetero.models.random_models import known_config
from hetero.profiler.scaling import scaled
from hetero.solver.plan import PHASES

PROMPT = "Once upon a time there was a little fox. One day it went out to look for"
STARTED = """
import json, sys, time
start_s = time.perf_counter()
from hetero import LLM
with LLM(sys.argv[1]) as llm:
    opened_s = time.perf_counter()
    llm.generate("One day", max_tokens=1)
    now_s = time.perf_counter()
print(json.dumps([opened_s - start_s, now_s - start_s]))
"""


def start_s(bundle: Path) -> tuple[float, float]:
    """Return the seconds of a process until the bundle is open, and until its first token."""
    ran = subprocess.run(
        [sys.executable, "-c", STARTED, str(bundle)], check=True, stdout=subprocess.PIPE, text=True
    )
    opened_s, first_s = json.loads(ran.stdout.splitlines()[-1])
    return opened_s, first_s


def slower(profile: DeviceProfile, gpu: float) -> DeviceProfile:
    """Return the chip with a slower GPU: a small model is worth no cut on the chip as it is."""
    keys = product(KINDS, PHASES, {x.weight_format for x in profile.predictors})
    return scaled(profile, {key: gpu if key[0] == "gpu" else 1.0 for key in keys})


def few_layers(name: str, layers: int, folder: Path) -> str:
    """Write a known model of so many layers as a GGUF file, and return its path."""
    config = replace(known_config(name), num_layers=layers, vocab_size=4096)
    graph = model_graph(config, WeightFormat.W4A16, name)
    path = folder / f"{name}-{layers}-layers.gguf"
    write_random(graph, path, context=512)
    return str(path)


def bundles(
    model: Annotated[str, typer.Argument()] = "demo",
    soc: Annotated[str, typer.Option()] = "sm8650",
    profile: Annotated[str, typer.Option()] = "snapdragon-8-gen-3",
    gpu_slower: Annotated[float, typer.Option(help="Times of the profile's GPU, × this.")] = 1.0,
    layers: Annotated[int, typer.Option(help="Of a known model with random weights.")] = 0,
    graph_sizes: Annotated[str, typer.Option(help="Default: solved.")] = "",
    lengths: Annotated[int, typer.Option(help="Prompt lengths that are planned.")] = 200,
    tokens: Annotated[int, typer.Option("-n")] = 24,
    starts: Annotated[
        int, typer.Option(help="Of a process each, after one that is not timed.")
    ] = 3,
) -> None:
    """Compile, open and run a solved bundle: its cuts, its text, planning and starting it."""
    with tempfile.TemporaryDirectory() as folder:
        out, times = Path(folder) / "bundle", Path(folder) / "chip.json"
        model = few_layers(model, layers, Path(folder)) if layers else model
        slower(DeviceProfile.load(profile), gpu_slower).save(times)
        command = [sys.executable, "-m", "hetero.start", "compile", model, "--soc", soc]
        command += ["--profile", str(times), "--max-seq-len", "512", "--out", str(out)]
        command += ["--weights", "w4a16"]
        command += ["--graph-sizes", graph_sizes] if graph_sizes else []
        began_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        compiled_s = time.perf_counter() - began_s
        with LLM(model, device="npu", npu="ort-cpu", weights="w4a16", max_seq_len=512) as pc:
            wanted = pc.generate(PROMPT, max_tokens=tokens, temperature=0).text
        with LLM(str(out)) as llm:
            solver = llm.choice.solver
            assert solver is not None, llm.choice.notes
            same = llm.generate(PROMPT, max_tokens=tokens, temperature=0).text == wanted
            longest = llm.engine.placement.longest
            listed = {op.m for op in llm.plan.ops}
            new = [m for m in range(1, longest + 1) if m not in listed][:lengths]
            spent, cuts = [], {phase: Counter[str]() for phase in PHASES}
            for m in new:
                began_s = time.perf_counter()
                plan = solver.plan_for(m)
                spent.append(time.perf_counter() - began_s)
                cuts["prefill"].update(x.strategy for x in plan.ops if x.phase == "prefill")
            cuts["decode"].update(x.strategy for x in llm.plan.ops if x.phase == "decode")
        start_s(out)
        opened = [start_s(out) for _ in range(starts)]
    for phase, counts in cuts.items():
        print(f"{phase}: {', '.join(f'{name} {n}' for name, n in counts.most_common())}")
    rows = [
        ["same text as on the NPU of a PC", "yes" if same else "NO"],
        ["compiled in, s", f"{compiled_s:.1f}"],
        [
            f"planning one of {len(new)} new lengths, ms, median",
            f"{1e3 * statistics.median(spent):.2f}",
        ],
        ["the slowest, ms", f"{1e3 * max(spent):.2f}"],
        ["second start until open, s, median", f"{statistics.median(x for x, _ in opened):.2f}"],
        ["until the first token, s", f"{statistics.median(x for _, x in opened):.2f}"],
    ]
    table("what|measured here", rows)
    finish()
    if not same:
        raise typer.Exit(1)


app = one_command(bundles)

if __name__ == "__main__":
    app()
