"""Cost of memory that is not coherent: the same plan with hand-overs by mapping and by copying."""

from __future__ import annotations

import os
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer
from common import (
    Prompt,
    Rounds,
    Tokens,
    context_of,
    finish,
    in_turns,
    run_steps,
    spread,
    table,
    timed,
)

from hetero.backends.opencl.coherence import MEMORY_MODELS, MEMORY_VARIABLE
from hetero.generation.llm import LLM
from hetero.runtime.engine import Engine


def memory_models(
    model: Annotated[str, typer.Argument()] = "demo",
    device: Annotated[str, typer.Option(help="gpu or hetero")] = "gpu",
    p: Prompt = 256,
    n: Tokens = 32,
    r: Rounds = 5,
) -> None:
    """Prompts and decoding with coherent, mapped and copied memory, in turns, in one process."""
    engines: dict[str, Engine] = {}
    with ExitStack() as stack:
        for name in MEMORY_MODELS:
            os.environ[MEMORY_VARIABLE] = name
            opened = LLM(model, device=device, gpu="opencl", max_seq_len=p + n)  # type: ignore[arg-type]
            engines[name or "probed"] = stack.enter_context(opened).engine
        prompts = in_turns({name: partial(_prompt_s, x, p) for name, x in engines.items()}, r)
        steps = in_turns({name: partial(_step_s, x, p, n) for name, x in engines.items()}, r)
        coherent = engines["probed"].devices["gpu"].capabilities.coherent
    probed = "coherent" if coherent else "not coherent"
    print(f"measured; {model} on {device}, prompt {p}, {n} decoded, {r} rounds; probed: {probed}\n")
    rows = []
    for what, times in (("prompt", prompts), ("step", steps)):
        for name, values in times.items():
            ratios = [a / b for a, b in zip(times["probed"], values, strict=True)]
            shown = spread(ratios, digits=3)
            rows.append([what, name, f"{1e3 * statistics.median(values):.3f}", *shown])
    table("what|memory|ms (median)|speed, of probed (median)|min|max", rows)
    finish()


def _prompt_s(engine: Engine, tokens: int) -> float:
    context = context_of(engine)
    context.truncate(0)
    return timed(lambda: engine.prefill(context, [5] * tokens))


def _step_s(engine: Engine, before: int, tokens: int) -> float:
    return statistics.median(run_steps(engine, tokens, before))
