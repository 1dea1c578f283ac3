"""What "Fast On-device LLM Inference with NPUs" (mllm-NPU) adds to a prefill at layer level.

python bench/mllm_npu.py order      # its section 3.4: chunks of a prompt out of order

A command makes `Variant`s of one prompt's prefill, `compare` runs them in turns and prints them
beside what the paper says of that step (`data/mllm_npu.toml`).
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import numpy as np
import typer
from common import (
    DATA,
    LLAMA,
    Prompt,
    context_of,
    finish,
    in_turns,
    new_app,
    open_engine,
    spread,
    table,
    timed,
    token_ids,
)

from hetero.models import open_model
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.runtime.schedule import Order, windows
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan

app = new_app(__doc__)
OTHER_LENGTHS = 5  # that are planned anew
CLAIMS = tomllib.loads((DATA / "mllm_npu.toml").read_text(encoding="utf-8"))
HEAD = (
    "prefill|s (median)|min|max|time × {}|NPU idle|same logits|"
    "ms to plan another length (median)|max"
)


class Variant:
    """One way to run a prompt: an engine, its logits, the NPU's idle shares."""

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self.engine, self.prompt = engine, prompt
        self.idle: list[float] = []
        self.logits: Any = None
        self.planned_s: list[float] = []

    def run(self) -> float:
        """Seconds of one prefill from the context's start."""
        context = context_of(self.engine)
        context.truncate(0)
        before, found = context.work.copy(), []
        seconds = timed(lambda: found.append(self.engine.prefill(context, self.prompt)))
        self.idle.append(context.work.since(before).idle_share("npu") or 0.0)
        self.logits = found[0].copy()
        return seconds

    def plan(self, tokens: int) -> None:
        """Lower what a prompt of another length runs that no prompt ran before."""
        engine, context = self.engine, context_of(self.engine)
        *_, last = windows(engine.plan.steps(tokens), engine.window)
        context.truncate(tokens - sum(last))
        if len(last) > 1:
            self.planned_s.append(timed(lambda: engine.window_step(context, last)))
        else:
            self.planned_s.append(timed(lambda: engine.step(context, "prefill", *last)))


def compare(variants: dict[str, Variant], tokens: int, rounds: int, claims: Sequence[str]) -> bool:
    """Run all in turns, print them over the first one, and the paper's words; whether all have the
    same logits, bit for bit.
    """
    found = in_turns({name: one.run for name, one in variants.items()}, rounds)
    for less in range(1, OTHER_LENGTHS + 1):
        for one in variants.values():
            one.plan(tokens - less)
    (base, first), *_ = variants.items()
    rows = []
    same = {name: np.array_equal(one.logits, first.logits) for name, one in variants.items()}
    for name, one in variants.items():
        ratio = statistics.median(np.divide(found[name], found[base]).tolist())
        shown = [f"{ratio:.3f}", f"{statistics.median(one.idle[1:]):.1%}"]
        planned, _, longest = spread(one.planned_s, 1e3, 1)
        answer = "yes" if same[name] else "NO"
        rows.append([name, *spread(found[name], digits=3), *shown, answer, planned, longest])
    table(HEAD.format(base), rows)
    finish(*claims)
    return all(same.values())


@app.callback()
def about() -> None:
    """Layer-level prefill as in mllm-NPU, step by step."""


@app.command("order")
def order(
    profile: Annotated[str, typer.Option(help="a file, or the name of a shipped profile")] = "host",
    model: str = LLAMA,
    weights: str = "w4a8",
    p: Prompt = 1024,
    chunk: Annotated[int, typer.Option(help="tokens of a chunk")] = 256,
    rounds: Annotated[int, typer.Option("-r", "--rounds", help="all take turns in each")] = 5,
) -> None:
    """Orders of a prompt's chunks: one after another (`fifo`), by the paper's eq. 6 (`paper`), by
    the best of three rules (`best`). Matmuls on the NPU, all else on the GPU (`chunked`).

    `NPU idle` is the part of the prefill in which it had nothing to do. Another length has another
    last chunk: what is planned is its steps, an order among them. Exits with 1 if logits differ.
    """
    loaded, taken = open_model(model, weights=weights), DeviceProfile.load(profile)
    request = PlanRequest(graph_sizes=(chunk,))
    plan = strategy_plan(loaded.spec(), taken, "chunked", [p], request)
    prompt, cost = token_ids(p, loaded.config.vocab_size), CostModel(taken)
    orders: dict[str, Order] = {name: name for name in get_args(Order)}
    variants = {
        name: Variant(open_engine(plan, loaded, p + chunk, order=name, cost=cost), prompt)
        for name in orders
    }
    windowed = variants["best"].engine.window
    print(f"measured; {model} {weights}, {p} tokens in calls of {chunk}, {windowed} in flight\n")
    same = compare(variants, p, rounds, CLAIMS["order"])
    for one in variants.values():
        one.engine.close()
    raise typer.Exit(not same)


if __name__ == "__main__":
    app()
