"""`hetero bench` of several devices in one run and of each alone, in turns.

python bench/contenders.py SmolLM2-135M-Instruct.Q4_1.gguf --rounds 3
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import Annotated

import typer
from common import Prompt, Tokens, finish, one_command, table


def speeds(
    model: str, devices: list[str], prompt: int, tokens: int
) -> dict[tuple[str, str], float]:
    """Return the medians of one run."""
    named = [word for device in devices for word in ("--device", device)]
    command = [sys.executable, "-m", "hetero.start", "bench", model, *named, "-r", "3", "--json"]
    command += ["-p", str(prompt), "-n", str(tokens)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(ran.stdout.splitlines()[-1])
    return {(row["test"], row["device"]): row["tokens_per_s_median"] for row in report["rows"]}


def contenders(
    model: str,
    devices: Annotated[str, typer.Option(help="comma-separated")] = "auto,gpu,hetero",
    prompt: Prompt = 256,
    tokens: Tokens = 64,
    rounds: Annotated[int, typer.Option(help="together and alone take turns")] = 3,
) -> None:
    """Speed of each device in a run of all, relative to a run of its own: 1 if none disturbs it."""
    names = devices.split(",")
    together: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    alone: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for key, speed in speeds(model, names, prompt, tokens).items():
            together[key].append(speed)
        for name in names:
            for key, speed in speeds(model, [name], prompt, tokens).items():
                alone[key].append(speed)
    rows = []
    for key, all_speeds in together.items():
        ratios = [a / b for a, b in zip(all_speeds, alone[key], strict=True)]
        medians = statistics.median(all_speeds), statistics.median(alone[key])
        shown = [statistics.median(ratios), min(ratios), max(ratios)]
        rows.append([*key, *(f"{x:.1f}" for x in medians), *(f"{x:.3f}" for x in shown)])
    table("test|device|together, tokens/s|alone|together / alone (median)|min|max", rows)
    finish()


app = one_command(contenders)

if __name__ == "__main__":
    app()
