"""Time the hand-over of decoding to another device at a depth, and compare the tokens."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Annotated

import numpy as np
import typer
from common import Prompt, Rounds, Tokens, context_of, finish, open_engine, table, token_ids

from hetero.backends.protocol import KINDS, DeviceKind
from hetero.models import LoadedModel, open_model
from hetero.profiler.model_graph import ModelGraph
from hetero.runtime.engine import Engine
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import single_device
from hetero.solver.plan import DecodeBand

HEAD = "from|to|step before, ms|first step there, ms|step after, ms|more, steps|same tokens"


def band_on(spec: ModelGraph, depth: int, device: DeviceKind) -> DecodeBand:
    """Decode steps of a device alone behind so many tokens."""
    plan = single_device(spec, device)
    ops = tuple(op for op in plan.ops if op.phase == "decode" and op.op not in spec.sampled)
    return DecodeBand(depth_from=depth, device=device, devices=(device,), ops=ops)


def decode(engine: Engine, p: int, n: int) -> tuple[list[int], list[float]]:
    """Greedy tokens behind a prompt, and the seconds of each step."""
    context = context_of(engine)
    context.truncate(0)
    logits = engine.prefill(context, token_ids(p, engine.config.vocab_size))
    tokens, seconds = [int(np.argmax(logits))], list[float]()
    for _ in range(n):
        start_s = time.perf_counter()
        logits = engine.decode(context, tokens[-1])
        seconds.append(time.perf_counter() - start_s)
        tokens.append(int(np.argmax(logits)))
    return tokens, seconds


def measured(
    plan: ExecutionPlan, loaded: LoadedModel, p: int, n: int, rounds: int
) -> tuple[list[int], list[list[float]]]:
    """Tokens and the seconds of the steps of each round, after one that warms up."""
    with open_engine(plan, loaded, p + n + 1) as engine:
        runs = [decode(engine, p, n) for _ in range(rounds + 1)]
    return runs[0][0], [seconds for _, seconds in runs[1:]]


def hand_over(
    model: str = "random:qwen2.5-0.5b",
    weights: Annotated[str, typer.Option(help="tokens are equal in f32")] = "w4a16",
    p: Prompt = 256,
    n: Tokens = 64,
    r: Rounds = 5,
) -> None:
    """Decode on one device and, half of the tokens later, on the other: the step that moves."""
    loaded = open_model(model, weights=weights)
    spec, rows = loaded.spec(), []
    for first, second in itertools.permutations(KINDS, 2):
        stays = single_device(spec, first)
        moves = stays.model_copy(update={"bands": (band_on(spec, p + n // 2, second),)})
        wanted, _ = measured(stays, loaded, p, n, 0)
        tokens, runs = measured(moves, loaded, p, n, r)
        before, there, after = (
            statistics.median(x for seconds in runs for x in seconds[part])
            for part in (
                slice(1, n // 2),
                slice(n // 2, n // 2 + 1),
                slice(n // 2 + 1, None),
            )
        )
        shown = [f"{1e3 * x:.2f}" for x in (before, there, after)]
        more = (there - after) / before
        rows.append([first, second, *shown, f"{more:.2f}", "yes" if tokens == wanted else "no"])
    print(f"measured; {model}, {weights}, {p} tokens and {n} more, {r} rounds\n")
    table(HEAD, rows)
    finish()
