"""Predicted against measured: plans, the profiler's predictors, single kernels.

python bench/predictions.py plans --model random:qwen2.5-0.5b --weights w4a8 -p 300
python bench/predictions.py accuracy --held-budget 6m
python bench/predictions.py left-out
python bench/predictions.py kernels --model demo
python bench/predictions.py phases --profile host-amx --profile measured.json
python bench/predictions.py small random:qwen2.5-0.5b SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import itertools
import statistics
from typing import Annotated

import typer
from common import CONTEXT, Rounds, context_of, finish, new_app, open_engine, table, timeline
from parts.accuracy import accuracy
from parts.hand_over import hand_over
from parts.in_turns import plans
from parts.left_out import left_out
from parts.small import phases, small

from hetero.backends.formats import WeightFormat
from hetero.backends.host.affinity import pinned
from hetero.backends.host.clock import SystemClock
from hetero.measuring.profiling import model_shapes
from hetero.models import open_model
from hetero.placement.device_set import open_devices
from hetero.profiler.grid import Task
from hetero.profiler.workload import TaskRunner, Workload
from hetero.runtime.engine import Engine
from hetero.solver.handmade import single_device

app = new_app(__doc__)
app.command("plans")(plans)
app.command("accuracy")(accuracy)
app.command("left-out")(left_out)
app.command("small")(small)
app.command("phases")(phases)
app.command("hand-over")(hand_over)
STEPS = 4  # of a round, of one token; of more, one


def measure_step(engine: Engine, m: int, times: dict[str, list[float]]) -> None:
    """One step; the mean over the layers of every matmul in `times`, from the end of the kernel
    before it, by the driver's clock.
    """
    context = context_of(engine)
    context.truncate(CONTEXT if m == 1 else 0)
    engine.decode(context, 5) if m == 1 else engine.prefill(context, [5] * m)
    spans = [span for span in timeline(engine) if span.what == "gpu"]
    found: dict[str, list[float]] = {}
    for before, span in itertools.pairwise(spans):
        if span.role in times:
            found.setdefault(span.role, []).append(span.end_s - before.end_s)
    for name, seconds in found.items():
        times[name].append(statistics.mean(seconds))


@app.command("kernels")
def kernels(
    model: str = "random:qwen2.5-0.5b",
    weights: str = "w4a8",
    m: Annotated[int, typer.Option("-m", help="tokens of a step; 1 decodes")] = 1,
    r: Rounds = 24,
) -> None:
    """The GPU's matmuls in a step beside the same shapes as the profiler times them, in turns.

    A ratio other than 1 is something that a step has and the profiler has not, or the other way
    round.
    """
    loaded = open_model(model, weights=weights)
    engine = open_engine(single_device(loaded.spec(), "gpu"), loaded, max(CONTEXT, m) + 64)
    others = open_devices("gpu")
    workload = Workload(others.devices, clock=SystemClock())
    engine.prefill(context_of(engine), [5] * CONTEXT)
    engine.runner.start_trace()
    shapes = {shape.name: shape for shape in model_shapes(loaded.spec())}
    steps: dict[str, list[float]] = {name: [] for name in shapes}
    profiled: dict[str, list[float]] = {name: [] for name in shapes}
    runners: dict[str, TaskRunner] = {}
    with pinned(others.control_core):
        for name, shape in shapes.items():
            tokens = loaded.spec().tokens_of(name, m)
            task = Task("gpu", WeightFormat(weights), "plain", tokens, shape.n, shape.k)
            runners[name] = workload.runner(task)
            workload.warm_up(runners[name])
    for _ in range(r):
        for _ in range(STEPS if m == 1 else 1):
            measure_step(engine, m, steps)
        with pinned(others.control_core):
            for name, runner in runners.items():
                profiled[name] += [workload.time(runner) for _ in range(2)]
    print(f"measured; {model} {weights}, {m} tokens, medians of {r} rounds\n")
    rows = []
    for name, shape in shapes.items():
        us = [1e6 * statistics.median(times[name]) for times in (steps, profiled)]
        shown = [f"{us[0]:.1f}", f"{us[1]:.1f}", f"{us[0] / us[1]:.3f}"]
        rows.append([name, shape.n, shape.k, *shown])
    table("matmul|n|k|in a step us|by the profiler us|ratio", rows)
    finish()
    engine.close()
    others.close()


if __name__ == "__main__":
    app()
