"""Seconds of `hetero generate` with an empty cache, and with what that left.

python bench/starts.py demo --later 3
python bench/starts.py demo --wait-for-plan    # the first text comes from the plan's devices
python bench/before_after.py --rounds 3 COMMIT starts.py demo
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Annotated, NamedTuple

import typer
from common import Tokens, finish, one_command, table


class Start(NamedTuple):
    """Seconds from a process's start to its first text, to its last, and to its end."""

    first_text_s: float
    last_text_s: float
    end_s: float


def start(model: str, cache: str, tokens: int, *options: str) -> Start:
    """Run one process, and time it."""
    command = [sys.executable, "-m", "hetero", "generate", model, "Once upon a time"]
    env = {**os.environ, "XDG_CACHE_HOME": cache}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # which would time Python's compiler
    before = time.perf_counter()
    with subprocess.Popen(
        [*command, "--max-tokens", str(tokens), *options],
        env=env,
        cwd=cache,  # `-m` looks for packages where it runs
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first_text_s = time.perf_counter() - before
        last_text_s = first_text_s
        while os.read(process.stdout.fileno(), 1 << 16):
            last_text_s = time.perf_counter() - before
    if process.returncode:
        raise SystemExit(f"hetero generate {model} ended with {process.returncode}")
    return Start(first_text_s, last_text_s, time.perf_counter() - before)


def starts(
    model: Annotated[str, typer.Argument()] = "demo",
    tokens: Tokens = 20,
    later: Annotated[int, typer.Option(help="starts after the first; their median counts")] = 3,
    wait_for_plan: Annotated[bool, typer.Option("--wait-for-plan", help="at each start")] = False,
) -> None:
    """Time the first start of a model on this machine and later ones, kernels included."""
    options = ["--wait-for-plan"] if wait_for_plan else []
    with tempfile.TemporaryDirectory() as cache:
        first = start(model, cache, tokens, *options)
        rest = [start(model, cache, tokens, *options) for _ in range(later)]
    medians = Start(*map(statistics.median, zip(*rest, strict=True)))
    rows = [
        [name, *(f"{x:.3f}" for x in of)] for name, of in (("first", first), ("later", medians))
    ]
    table("start|first text (s)|last text (s)|end (s)", rows)
    finish()


app = one_command(starts)

if __name__ == "__main__":
    app()
