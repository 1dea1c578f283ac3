"""How long a GGUF file takes to its first text, in new processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from common import Rounds, finish, spread, table

from hetero.backends.formats import WeightFormat
from hetero.models import model_spec
from hetero.models.gguf import packed_store

from .gguf_files import write_random

HETERO = """
import hetero
with hetero.LLM(path) as llm:
    for piece in llm.stream(prompt, max_tokens=1):
        print(time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
"""
LLAMA = """
from llama_cpp import Llama
llm = Llama(path, verbose=False, n_ctx=2048, n_threads=2, n_threads_batch=2)
for piece in llm.create_completion(prompt, max_tokens=1, stream=True):
    print(time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
"""
SETUP = "import resource, sys, time\npath, prompt = sys.argv[1], [5, 6, 7, 8]\n"


def seconds_and_bytes(code: str, path: Path) -> tuple[float, float]:
    """From starting a process to its first text, and MiB of its largest resident set then."""
    start_s = time.time()  # the clock that two processes share
    done = subprocess.run(
        [sys.executable, "-P", "-c", SETUP + code, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    end_s, kib = done.stdout.split()[:2]
    return float(end_s) - start_s, float(kib) / 1024


def starts(
    model: str = "llama-3.2-1b",
    file_type: Annotated[str, typer.Option(help="Q4_0, Q8_0 or Q4_K_M")] = "Q4_0",
    r: Rounds = 3,
) -> None:
    """A file of random weights to its first text; first: without the packed weights of before."""
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write_random(model_spec(model, WeightFormat.W4A8), path, 2048, file_type)
        size = path.stat().st_size / 2**20
        seconds_and_bytes(HETERO, path)  # kernels are prepared, the file is in memory
        for _ in range(r):
            found.setdefault("llama.cpp", []).append(seconds_and_bytes(LLAMA, path))
            shutil.rmtree(packed_store.folder(), ignore_errors=True)
            found.setdefault("hetero, first", []).append(seconds_and_bytes(HETERO, path))
            seconds_and_bytes(HETERO, path)  # compares what was packed with the file, once
            found.setdefault("hetero, later", []).append(seconds_and_bytes(HETERO, path))
    base = spread([s for s, _ in found["llama.cpp"]])[0]
    print(f"measured; {model}, a file of {size:.0f} MiB, {file_type}, {r} rounds\n")
    rows = (
        [name, *(times := spread([s for s, _ in all_of])), f"{float(times[0]) / float(base):.2f}",
         f"{max(mib for _, mib in all_of):.0f}"]
        for name, all_of in found.items()
    )  # fmt: skip
    table("engine|s (median)|min|max|× llama.cpp|largest resident set, MiB", rows)
    finish()
