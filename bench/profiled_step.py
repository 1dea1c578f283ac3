"""The GPU's matmuls in a step beside the same shapes as the profiler times them.

    python bench/profiled_step.py [--model random:qwen2.5-0.5b] [--weights w4a8] [-m 1] [-r 24]

Minutes of a shared machine differ by more than the two ways of timing do, so they take turns in one
process: some steps of `-m` tokens (1: decoding) with all matmuls on the GPU, then two timings of
every shape. A step's time of a matmul runs from the end of the kernel before it, by the driver's
clock. A ratio other than 1 is something that a step has and the profiler has not, or the other way
round.
"""

from __future__ import annotations

import argparse
import json
import statistics

from hetero.backends.host.affinity import pinned
from hetero.backends.host.clock import SystemClock
from hetero.backends.ops import WeightFormat
from hetero.contexts.context import Context
from hetero.measuring.benchmark import environment
from hetero.measuring.profiling import model_shapes
from hetero.models import open_model
from hetero.placement.device_set import open_devices
from hetero.profiler.grid import Task
from hetero.profiler.workload import Runner, Workload
from hetero.runtime.engine import Engine
from hetero.solver.handmade import single_device

CONTEXT = 256
STEPS = 4  # of a round, of one token; of more, one
Times = dict[str, list[float]]


def measure_step(engine: Engine, context: Context, m: int, times: Times) -> None:
    """One step; the mean over the layers of every matmul in `times`."""
    if m == 1:
        context.truncate(CONTEXT)
        engine.decode(context, 5)
    else:
        context.truncate(0)
        engine.prefill(context, [5] * m)
    step = engine.last_step
    end_s: float | None = None
    found: Times = {}
    for launch, completion in zip(step.launches, step.completions, strict=True):
        span = None if completion is None else completion.span()
        if span is None:
            continue
        name = launch.node.rsplit(".", maxsplit=1)[-1]
        if end_s is not None and name in times:
            found.setdefault(name, []).append(span[1] - end_s)
        end_s = span[1]
    for name, seconds in found.items():
        times[name].append(statistics.mean(seconds))


def main() -> None:
    """Parse, measure, print a Markdown table and the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--weights", default="w4a8", choices=[f.value for f in WeightFormat])
    parser.add_argument("-m", type=int, default=1, help="tokens of a step")
    parser.add_argument("-r", type=int, default=24)
    arguments = parser.parse_args()
    loaded = open_model(arguments.model, weights=arguments.weights)
    weight_format = WeightFormat(arguments.weights)
    opened = open_devices("gpu")
    engine = Engine(
        loaded.weights,
        single_device(loaded.spec(), "gpu"),
        opened.devices,
        max_seq_len=max(CONTEXT, arguments.m) + 64,
        control_core=opened.control_core,
    )
    others = open_devices("gpu")
    workload = Workload(others.devices, clock=SystemClock())
    context = engine.new_context()
    engine.prefill(context, [5] * CONTEXT)
    engine.devices["gpu"].set_timing(True)
    shapes = {shape.name: shape for shape in model_shapes(loaded.spec())}
    steps: Times = {name: [] for name in shapes}
    profiled: Times = {name: [] for name in shapes}
    runners: dict[str, Runner] = {}
    with pinned(others.control_core):
        for name, shape in shapes.items():
            tokens = 1 if name == "lm_head" else arguments.m
            task = Task("gpu", weight_format, "plain", tokens, shape.n, shape.k)
            runners[name] = workload.runner(task)
            workload.warm_up(runners[name])
    for _ in range(arguments.r):
        for _ in range(STEPS if arguments.m == 1 else 1):
            measure_step(engine, context, arguments.m, steps)
        with pinned(others.control_core):
            for name, runner in runners.items():
                profiled[name] += [workload.time(runner) for _ in range(2)]
    print("measured; medians\n\n| matmul | n | k | in a step us | by the profiler us | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, shape in shapes.items():
        step_s, profiled_s = statistics.median(steps[name]), statistics.median(profiled[name])
        cells = f"{1e6 * step_s:.1f} | {1e6 * profiled_s:.1f} | {step_s / profiled_s:.3f}"
        print(f"| {name} | {shape.n} | {shape.k} | {cells} |")
    print(json.dumps(environment()))
    engine.close()
    others.close()


if __name__ == "__main__":
    main()
