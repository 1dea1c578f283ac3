"""A step that decodes for several contexts beside one that decodes for one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from common import Rounds, Tokens, finish, in_turns, integers, spread, table, timed

from hetero.generation.llm import LLM


def rows(
    model: str = "demo",
    weights: Annotated[str, typer.Option(help="format; of the demo its own")] = "w4a8",
    device: Annotated[str, typer.Option(help="gpu, npu or hetero")] = "gpu",
    gpu: Annotated[str, typer.Option(help="backend of the GPU")] = "auto",
    counts: Annotated[str, typer.Option(help="contexts")] = "1,2,3,4,8",
    p: Annotated[int, typer.Option("-p", help="tokens of each context")] = 42,
    n: Tokens = 40,
    r: Rounds = 7,
) -> None:
    """What the second context, and those after it, add to a step."""
    options = {} if model == "demo" else {"weights": weights}
    with LLM(model, device=device, gpu=gpu, max_seq_len=p + n + 8, **options) as llm:
        engine = llm.engine
        contexts = [engine.new_context() for _ in range(max(integers(counts)))]
        for i, context in enumerate(contexts):
            engine.prefill(context, [5 + (i + j) % 200 for j in range(p)])
        with engine.lock:
            engine.deployment.warm_rows(contexts)

        def steps(count: int) -> float:
            part = contexts[:count]
            step: Callable[[], object] = partial(engine.decode, contexts[0], 17)
            if count > 1:
                step = partial(engine.decode_rows, [(context, 17) for context in part])
            found = statistics.median(timed(step) for _ in range(n))
            for context in part:
                context.truncate(p)
            return found

        with engine.runner.control.on_core():
            found = in_turns({count: partial(steps, count) for count in integers(counts)}, r)
    one = statistics.median(found[min(found)])
    print(f"{model} on {device} ({gpu}), {p} tokens each, measured; medians of {n} steps\n")
    gains = {count: count * one / statistics.median(took) for count, took in found.items()}
    lines = [[k, *spread(took, 1e3, 3), f"{gains[k]:.2f}"] for k, took in found.items()]
    table("contexts|ms a step (median)|min|max|× tokens/s of one", lines)
    finish()
