"""Cost of memory that is not coherent: the same plan with hand-overs by mapping and by copying."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from typing import Annotated

import typer
from common import Prompt, Rounds, Tokens, context_of, finish, table

from hetero.backends.opencl.coherence import MEMORY_MODELS, MEMORY_VARIABLE
from hetero.generation.llm import LLM


def memory_models(
    model: Annotated[str, typer.Argument()] = "demo",
    device: Annotated[str, typer.Option(help="gpu or hetero")] = "gpu",
    p: Prompt = 256,
    n: Tokens = 32,
    r: Rounds = 5,
) -> None:
    """Prompts and decoding with coherent, mapped and copied memory, in turns, in one process."""
    times: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        models = {}
        for name in MEMORY_MODELS:
            os.environ[MEMORY_VARIABLE] = name
            opened = LLM(model, device=device, gpu="opencl", max_seq_len=p + n)  # type: ignore[arg-type]
            models[name or "probed"] = stack.enter_context(opened)
        for turn in range(r + 1):
            for name, llm in models.items():
                seconds = _round(llm, p, n)
                for what, value in zip(("prompt", "step"), seconds, strict=True):
                    if turn:  # the first one warms up
                        times.setdefault((what, name), []).append(value)
        gpus = {name: llm.engine.devices["gpu"] for name, llm in models.items()}
        coherent = gpus["probed"].capabilities.coherent
    probed = "coherent" if coherent else "not coherent"
    print(f"measured; {model} on {device}, prompt {p}, {n} decoded, {r} rounds; probed: {probed}\n")
    rows = []
    for (what, name), values in times.items():
        ratios = [a / b for a, b in zip(times[what, "probed"], values, strict=True)]
        rows.append([what, name, f"{1e3 * statistics.median(values):.3f}",
                     *(f"{f(ratios):.3f}" for f in (statistics.median, min, max))])  # fmt: skip
    table("what|memory|ms (median)|speed, of probed (median)|min|max", rows)
    finish()


def _round(llm: LLM, p: int, n: int) -> tuple[float, float]:
    """Seconds of a prompt, and of the median step after it."""
    context = context_of(llm.engine)
    context.truncate(0)
    start_s = time.perf_counter()
    llm.engine.prefill(context, [5 + i % 200 for i in range(p)])
    prompt_s = time.perf_counter() - start_s
    steps = []
    for _ in range(n):
        start_s = time.perf_counter()
        llm.engine.decode(context, 7)
        steps.append(time.perf_counter() - start_s)
    return prompt_s, statistics.median(steps)
