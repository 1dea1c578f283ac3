"""Decoding steps in chains beside the same steps call by call, in one process."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer
from common import LLAMA, Rounds, Tokens, finish, in_turns, run_steps, spread, table

from hetero.generation.llm import LLM


def chains(
    model: str = LLAMA,
    weights: str = "w4a8",
    gpu: Annotated[str, typer.Option(help="backend of the one device")] = "opencl-cores",
    p: Annotated[int, typer.Option("-p", help="tokens of context")] = 256,
    n: Tokens = 24,
    r: Rounds = 7,
) -> None:
    """What it gains that calls hand over without the driver."""
    with LLM(model, weights=weights, device="gpu", gpu=gpu, max_seq_len=p + n + 8) as llm:
        engine = llm.engine

        def decode(fused: bool) -> float:
            engine.runner.fuses = fused
            return statistics.median(run_steps(engine, n, p))

        ways = {"call by call": lambda: decode(False), "chains": lambda: decode(True)}
        found = in_turns(ways, r)
    print(f"{model}, {weights}, {gpu}, behind {p} tokens, measured; medians of {n} steps\n")
    rows = [[name, *spread(seconds, 1e3, 3)] for name, seconds in found.items()]
    table("a step|ms (median)|min|max", rows)
    gains = [a / b for a, b in zip(found["call by call"], found["chains"], strict=True)]
    median, least, most = spread(gains)
    finish(f"chains: {median} x as fast (median of {r} rounds; {least} to {most})\n")
