"""A step in mode `hetero` whose plan uses the GPU alone, against the same step in mode `gpu`."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Annotated, Any

import typer
from common import Rounds, Tokens, finish, in_turns, run_steps, spread, table

from hetero.generation.llm import LLM
from hetero.runtime.engine import Engine


def unused_device(
    model: str = "demo",
    weights: str = "w4a8",
    p: Annotated[int, typer.Option("-p", help="tokens of context")] = 32,
    n: Tokens = 48,
    r: Rounds = 9,
) -> None:
    """What mode `hetero` pays in decode for a device that the plan does not use: layer level, which
    decodes on the GPU, against mode `gpu`, in one process, in turns.
    """
    options: dict[str, Any] = {"weights": weights, "gpu": "opencl", "adapt": False}
    with (
        LLM(model, device="gpu", **options) as alone,
        LLM(model, device="hetero", strategy="layer", **options) as both,
    ):
        engines = {"gpu": alone.engine, "hetero": both.engine}
        measured = {name: partial(_round, x, p, n) for name, x in engines.items()}
        found = in_turns(measured, r)
    ratios = [a / b for a, b in zip(found["gpu"], found["hetero"], strict=True)]
    print(f"{model}, {weights}, behind {p} tokens, measured; medians of {n} steps, {r} rounds\n")
    rows = [[name, *spread(seconds, 1e3, 3)] for name, seconds in found.items()]
    table("mode|step ms (median)|min|max", rows)
    median, least, most = spread(ratios, digits=3)
    finish(f"speed of hetero over gpu: {median} x (median of the rounds; {least} to {most})\n")


def _round(engine: Engine, behind: int, steps: int) -> float:
    return statistics.median(run_steps(engine, steps, behind))
