"""The worth of parts of hetero: each is taken out, in turns with all of them.

python bench/ablations.py decode random:qwen2.5-0.5b    # signals, flags, contention
python bench/ablations.py starts random:qwen2.5-0.5b --device auto    # decisions, prewarming
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated
from unittest.mock import patch

import typer
from common import CONTEXT, Rounds, Tokens, finish, new_app, spread, table

from hetero.backends.opencl.device import OpenCLDevice
from hetero.generation.llm import LLM
from hetero.placement import choosing
from hetero.runtime.engine import Engine
from hetero.runtime.waits.contention import CoreContention
from hetero.runtime.waits.trials import Trials

app = new_app(__doc__)
ALL = "all"
PARTS = {
    "signals": (Trials, "signals", lambda _: {}),
    "flags": (Trials, "flags", lambda *_: {}),
    "contention": (CoreContention, "preempted", lambda *_: None),
    "decisions": (choosing, "_decision_key", lambda *_: None),
    "prewarm": (OpenCLDevice, "prewarm", lambda *_: nullcontext(False)),
}
HEAD = "without|ms (median)|min|max|ratio to all (median)|lower quartile|upper quartile"


@contextmanager
def without(part: str) -> Iterator[None]:
    """One of `PARTS` does nothing; `ALL`: every one works."""
    if part == ALL:
        yield
        return
    owner, name, instead = PARTS[part]
    with patch.object(owner, name, instead):
        yield


def rows_of(seconds: dict[str, list[float]]) -> Iterator[list[str]]:
    """Times, and ratios round by round."""
    for part, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[ALL], strict=True)]
        middle = [f"{x:.3f}" for x in statistics.quantiles(ratios, n=4, method="inclusive")]
        yield [part, *spread(times, 1e3), middle[1], middle[0], middle[2]]


def stepper(engine: Engine, tokens: int) -> Callable[[], float]:
    """Runs a round; returns its median step."""
    context = engine.new_context()
    engine.prefill(context, [5] * CONTEXT)

    def run() -> float:
        context.truncate(CONTEXT)
        times = []
        for _ in range(tokens + 1):
            start_s = time.perf_counter()
            engine.decode(context, 7)
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])

    return run


@app.command()
def decode(model: str, n: Tokens = 8, r: Rounds = 30, device: str = "hetero") -> None:
    """Steps of one engine for each part, all in this process; the first stays as a control."""
    parts = [ALL, "signals", "flags", "contention", "nothing"]
    models, runs = [], {}
    for part in parts:
        with without(ALL if part == "nothing" else part):
            models.append(LLM(model, device=device, max_seq_len=2 * CONTEXT))
            runs[part] = stepper(models[-1].engine, n)
    seconds: dict[str, list[float]] = {part: [] for part in parts}
    with without("contention"):
        forced = CoreContention.preempted
    for turn in range(r):
        for part in parts[turn % len(parts) :] + parts[: turn % len(parts)]:
            with (
                patch.object(CoreContention, "preempted", forced)
                if part == "contention"
                else (nullcontext())
            ):
                seconds[part].append(runs[part]())
    table(HEAD, rows_of(seconds))
    finish()
    for llm in models:
        llm.close()


@app.command()
def start(part: str, model: str, device: str) -> None:
    """One start in this process: seconds of wall and processor until the first token."""
    begun = time.perf_counter(), time.process_time()
    with without(part), LLM(model, device=device, max_seq_len=512) as llm:
        llm.generate("Once", max_tokens=1)
        print(json.dumps([time.perf_counter() - begun[0], time.process_time() - begun[1]]))


@app.command()
def starts(model: str, r: Rounds = 7, device: Annotated[str, typer.Option()] = "auto") -> None:
    """Warm starts in processes of their own, without the imports."""
    parts = [ALL, "decisions", "prewarm"]
    wall: dict[str, list[float]] = {part: [] for part in parts}
    used: dict[str, list[float]] = {part: [] for part in parts}
    for turn in range(r + 1):
        for part in parts:
            command = [sys.executable, __file__, "start", part, model, device]
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seconds, processor_s = json.loads(ran.stdout.splitlines()[-1])
            if turn:  # the first one fills the caches
                wall[part].append(seconds)
                used[part].append(processor_s)
    table(HEAD, rows_of(wall))
    print("\nProcessor time:\n")
    table(HEAD, rows_of(used))
    finish()


if __name__ == "__main__":
    app()
