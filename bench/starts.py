"""Seconds of `hetero generate` with an empty cache, and with what that left.

python bench/starts.py demo --later 3
python bench/before_after.py --rounds 3 COMMIT starts.py demo
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Annotated

import typer
from common import Tokens, finish, one_command, table


def start_s(model: str, cache: str, tokens: int) -> float:
    """Return the seconds of one process, from its start to its end."""
    command = [sys.executable, "-m", "hetero", "generate", model, "Once upon a time"]
    before = time.perf_counter()
    subprocess.run(
        [*command, "--max-tokens", str(tokens)],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        cwd=cache,  # `-m` looks for packages where it runs
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - before


def starts(
    model: Annotated[str, typer.Argument()] = "demo",
    tokens: Tokens = 20,
    later: Annotated[int, typer.Option(help="starts after the first; their median counts")] = 3,
) -> None:
    """Time the first start of a model on this machine and later ones, kernels included."""
    with tempfile.TemporaryDirectory() as cache:
        first = start_s(model, cache, tokens)
        rest = [start_s(model, cache, tokens) for _ in range(later)]
    table("start|seconds", [["first", f"{first:.3f}"], ["later", f"{statistics.median(rest):.3f}"]])
    finish()


app = one_command(starts)

if __name__ == "__main__":
    app()
