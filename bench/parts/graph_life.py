"""Seconds of an NPU graph from its set-up to its release, by token count."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any

import numpy as np
import typer
from common import finish, integers, random_weight, table

from hetero.backends.formats import WeightFormat
from hetero.backends.memory import new_tensor
from hetero.backends.ops import MatMul
from hetero.backends.registry import open_device


def graph_life(
    npu: Annotated[str, typer.Option(help="qnn (emulated without a Hexagon) or ort-cpu")] = "qnn",
    shapes: Annotated[str, typer.Option(help="n×k")] = "1024x1024,2048x2048",
    tokens: Annotated[str, typer.Option("-m", help="token counts")] = "1,32,256,1024",
    weights: str = "w4a16",
) -> None:
    """Figures 2 of mllm-NPU and 9 of HeteroLLM: set up, build and optimise, run, free."""
    counts, form = integers(tokens), WeightFormat(weights)
    device, set_up_s = timed(lambda: open_device(npu, graph_sizes=tuple(counts)))
    rows = []
    with closing(device):
        for shape in shapes.split(","):
            n, k = integers(shape.replace("x", ","))
            weight = random_weight(form.storage, n, k)
            op = MatMul(n=n, k=k, weight_format=form)
            rows += [[shape, m, *life(device, op, weight, m)] for m in counts]
    where = "emulated" if npu == "qnn" else "measured"
    print(f"{where}; {npu}, {weights}, set up in {set_up_s:.2f} s; seconds\n")
    table("n × k|tokens|build and optimise|first run|next run|free", rows)
    finish(
        "paper (mllm-NPU, figure 2; HeteroLLM, figure 9): a graph belongs to one token count, and "
        "to build and optimise one takes seconds on the phone, more for more tokens"
    )


def life(device: Any, op: MatMul, weight: Any, m: int) -> list[str]:
    """Seconds of a graph's stages."""
    x, y = new_tensor((m, op.k)), new_tensor((m, op.n))
    x.array[:] = np.random.default_rng(m).standard_normal((m, op.k))
    references = [device.prepare(op, {"weight": weight})]
    call, built_s = timed(lambda: references[0].bind({"x": x, "y": y}, m))
    _, first_s = timed(call.run)
    _, next_s = timed(call.run)
    references.append(call)
    del call
    _, freed_s = timed(references.clear)
    return [f"{seconds:.4f}" for seconds in (built_s, first_s, next_s, freed_s)]


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result, and the seconds that it took."""
    before = time.perf_counter()
    result = run()
    return result, time.perf_counter() - before
