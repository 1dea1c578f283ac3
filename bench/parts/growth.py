"""What a longer context costs: decoding behind it, and prompts as long as it."""

from __future__ import annotations

import statistics
from typing import Annotated

import numpy as np
import typer
from common import LLAMA, Rounds, Tokens, finish, integers, run_prompt, run_steps, table

from hetero.generation.llm import LLM


def growth(
    model: str = LLAMA,
    weights: str = "w4a8",
    gpu: Annotated[str, typer.Option(help="backend of the one device")] = "opencl-cores",
    kv: str = "f16",
    contexts: str = "256,1024,2048,4096,8000",
    n: Tokens = 24,
    r: Rounds = 2,
) -> None:
    """Decoding behind contexts of several lengths, all of them in turns, and a line through it;
    prompts of these lengths, each from an empty context.
    """
    lengths = integers(contexts)
    decode: dict[int, list[float]] = {length: [] for length in lengths}
    prompts: dict[int, list[float]] = {length: [] for length in lengths}
    longest = max(lengths) + n + 8
    with LLM(model, weights=weights, device="gpu", gpu=gpu, kv=kv, max_seq_len=longest) as llm:
        engine = llm.engine
        row_bytes = engine.memory.context_bytes / longest
        run_prompt(engine, min(lengths))
        run_steps(engine, 4, min(lengths))
        for _ in range(r):
            for length in lengths:
                prompts[length].append(run_prompt(engine, length))
                decode[length].append(statistics.median(run_steps(engine, n, length)))
    steps_s = {length: statistics.median(decode[length]) for length in lengths}
    token_s = {length: statistics.median(prompts[length]) / length for length in lengths}
    slope, start = np.polyfit(lengths, [steps_s[x] for x in lengths], 1)
    line = {length: start + slope * length for length in lengths}
    print(f"{model}, {weights}, {gpu}, {kv}, measured, medians of {r} rounds of {n} steps\n")
    rows = [
        [
            str(length),
            f"{1e3 * steps_s[length]:.2f}",
            f"{steps_s[length] / line[length] - 1:+.1%}",
            f"{1e3 * token_s[length]:.2f}",
            f"{token_s[lengths[0]] / token_s[length]:.2f}",
        ]
        for length in lengths
    ]
    table("context|decode ms|off the line|prompt ms a token|speed × of the first", rows)
    finish(
        f"decode grows by {1e6 * slope:.2f} us a token of context, whose keys and values are "
        f"{row_bytes / 1024:.1f} KiB: {row_bytes / slope / 1e9:.1f} GB/s\n"
    )
