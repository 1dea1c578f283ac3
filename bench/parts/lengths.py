"""Prompts of a new length and of a known one; in fused launches and call by call."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer
from common import Rounds, context_of, finish, integers, spread, table, timed, token_ids

from hetero.generation.llm import LLM
from hetero.runtime.program import SUBMIT


def lengths(
    model: str = "demo",
    gpu: Annotated[str, typer.Option(help="backend of the one device")] = "opencl-cores",
    p: Annotated[str, typer.Option("-p", help="tokens of prompts, such as 16,256")] = "16,64,256",
    n: Annotated[int, typer.Option("-n", min=1, help="new lengths from each on")] = 10,
    r: Rounds = 5,
) -> None:
    """Compare prompts of a new length, as nearly every turn of a chat has, with known ones."""
    rows = []
    with LLM(model, device="gpu", gpu=gpu, max_seq_len=max(integers(p)) + n + 8) as llm:
        engine, context = llm.engine, context_of(llm.engine)

        def run(m: int, fused: bool) -> float:
            engine.runner.fuses = fused
            context.truncate(0)
            prompt = token_ids(m, engine.config.vocab_size)
            return timed(lambda: engine.prefill(context, prompt))

        run(8, True)
        for first in integers(p):
            new, known, single = list[float](), list[float](), list[float]()
            for m in range(first, first + n):
                new.append(run(m, True))
                run(m, False)
                for _ in range(r):
                    known.append(run(m, True))
                    single.append(run(m, False))
            times = [spread(x, 1e3, 2) for x in (new, known, single)]
            share = statistics.median(single) / statistics.median(known)
            run(first, True)
            made = sum(x.code == SUBMIT for x in engine.runner.last_step.program)
            rows.append([first, *(f"{a} ({b} to {c})" for a, b, c in times), f"{share:.2f}", made])
    print(f"{model}, {gpu}, measured; medians of {n} lengths from each on, {r} rounds, ms\n")
    table("tokens from|new|known|call by call|fused launches gain|submissions", rows)
    finish()
