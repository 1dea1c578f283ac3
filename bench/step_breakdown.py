"""Where a step's time goes, operator by operator, beside what the plan predicted.

    python bench/step_breakdown.py --profile host [--weights w4a16] [--model random:llama-3.2-1b]
        [--strategy auto|gpu-only|npu-only|...] [--plan FILE] [-p 256] [-n 40] [--context 256]

Decoding by default, a prompt of P tokens with `-p`. All columns are milliseconds of one step (all
layers), medians over N steps: the NPU's times by the host around each call, `waits` and `submits`
the control thread's, and then, in N more steps that keep the GPU's clock (which costs some time),
the GPU's. A gate's time on the GPU is the GPU waiting. `between` is what no kernel accounts for
from the first kernel's start to the last one's end. The profile's reference kernels are timed
before and after: the last lines say how much slower each device is now than in the profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict

import numpy as np
from context_of import context_of
from tensor_level import Drift

from hetero.measuring.benchmark import environment
from hetero.models import LoadedModel, open_model
from hetero.placement.device_set import open_devices
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.runtime.engine import Engine
from hetero.runtime.program import AHEAD, RUN, SUBMIT, WAIT
from hetero.solver.plan import ExecutionPlan, Phase
from hetero.solver.strategy_plans import strategy_plan

Cells = dict[tuple[str, str], float]  # (operator, column) -> seconds of a step
COLUMNS = ("gpu predicted", "gpu", "npu predicted", "npu", "waits", "submits")


def role(node: str) -> str:
    """An operator's name without its layer."""
    return node.rsplit(".", maxsplit=1)[-1]


def predicted(engine: Engine, profile: DeviceProfile, phase: Phase, m: int, context: int) -> Cells:
    """The plan's seconds of every operator, all layers together."""
    cost, found = CostModel(profile), defaultdict[tuple[str, str], float](float)
    kind = engine.plan.rest.prefill if phase == "prefill" else engine.plan.rest.decode
    times = {op.op: op for op in engine.plan.ops if op.phase == phase and op.m in (m, None)}
    for node in engine.nodes:
        if node.plan_op is None:
            seconds = float(cost.other_s(kind, node.op, m, context).seconds)
            found[role(node.name), f"{kind} predicted"] += seconds
            continue
        for name in [node.plan_op] if node.plan_op in times else [x for x, _ in node.members]:
            found[role(node.name), "gpu predicted"] += times[name].gpu_s or 0.0
            found[role(node.name), "npu predicted"] += times[name].npu_s or 0.0
    return found


def on_host(engine: Engine) -> Cells:
    """Seconds of the last step on the control thread; the NPU's calls are among them."""
    step, stamps = engine.last_step, engine.last_run.stamps
    found = defaultdict[tuple[str, str], float](float)
    for at, (code, index, _, _) in enumerate(step.program):
        launch = step.launches[index]
        column = {RUN: launch.kind, WAIT: "waits", SUBMIT: "submits", AHEAD: "submits"}.get(code)
        if column is not None:
            found[role(launch.node), column] += stamps[at + 1] - stamps[at]
    found["step", ""] = stamps[-1] - stamps[0]
    return found


def on_gpu(engine: Engine) -> Cells:
    """Seconds of the last step by the GPU's clock; nothing without one."""
    found, spans = defaultdict[tuple[str, str], float](float), []
    for launch, completion in zip(
        engine.last_step.launches, engine.last_step.completions, strict=True
    ):
        if completion is not None and (span := completion.span()) is not None:
            spans.append(span)
            found[role(launch.node), launch.kind] += span[1] - span[0]
    if spans:
        busy_s = sum(end - start for start, end in spans)
        found["between", "gpu"] = max(s[1] for s in spans) - min(s[0] for s in spans) - busy_s
    return found


def run(engine: Engine, phase: Phase, m: int, context: int, steps: int) -> Cells:
    """Medians of every cell, and of the whole step as ("step", "")."""
    rng = np.random.default_rng(0)
    cells = defaultdict[tuple[str, str], list[float]](list)
    where = context_of(engine)
    engine.prefill(where, rng.integers(3, 1000, max(context, 1)).tolist())
    for look in (on_host, on_gpu):
        for i in range(steps + 2):
            where.truncate(context if i % 16 == 0 or phase == "prefill" else len(where))
            tokens = rng.integers(3, 1000, m).tolist()
            engine.prefill(where, tokens) if phase == "prefill" else engine.decode(where, tokens[0])
            if i >= 2:
                for key, seconds in look(engine).items():
                    cells[key].append(seconds)
        engine.start_trace()  # the devices' own clocks, from here on
    return {key: statistics.median(values) for key, values in cells.items()}


def table(found: Cells) -> list[str]:
    """Markdown, one line for each operator in the order of the step, and their sum."""
    names = list(dict.fromkeys(name for name, _ in found))
    lines = ["| operator | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name in names:
        cells = [f"{1e3 * found[name, c]:.2f}" if (name, c) in found else "" for c in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    sums = [sum(s for (_, c), s in found.items() if c == column) for column in COLUMNS]
    return [*lines, "| **sum** | " + " | ".join(f"{1e3 * s:.2f}" for s in sums) + " |"]


def open_engine(plan: ExecutionPlan, loaded: LoadedModel, longest: int) -> Engine:
    """An engine on the devices that the plan names."""
    kinds = plan.devices()
    opened = open_devices("hetero" if len(kinds) == 2 else next(iter(kinds)))
    core = opened.control_core
    return Engine(loaded.weights, plan, opened.devices, max_seq_len=longest, control_core=core)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:llama-3.2-1b")
    parser.add_argument("--profile", required=True)
    parser.add_argument("--weights", default="w4a16")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--plan", help="a plan's file, instead of a strategy")
    parser.add_argument("-p", type=int, help="tokens of a prompt; decoding without")
    parser.add_argument("-n", type=int, default=40)
    parser.add_argument("--context", type=int, default=256)
    arguments = parser.parse_args()
    phase: Phase = "prefill" if arguments.p else "decode"
    m, context = arguments.p or 1, 0 if arguments.p else arguments.context
    profile, loaded = (
        DeviceProfile.load(arguments.profile),
        open_model(arguments.model, weights=arguments.weights),
    )
    made = strategy_plan(loaded.spec(), profile, arguments.strategy, [arguments.p or 256])
    plan = ExecutionPlan.load(arguments.plan) if arguments.plan else made
    drift = Drift(profile)
    drift.measure("plan")
    with open_engine(plan, loaded, max(m, context) + 128) as engine:
        cells = run(engine, phase, m, context, arguments.n)
        total_s = cells.pop(("step", ""))
        cells |= predicted(engine, profile, phase, m, context)
    drift.measure("plan")
    wanted_s = next((t.predicted_s for t in plan.totals if (t.phase, t.m) == (phase, m)), 0.0)
    print(f"measured; {arguments.model} {arguments.weights} {phase} {m}, {arguments.n} steps")
    print("\n".join(table(cells)))
    print(f"step: measured {1e3 * total_s:.2f} ms, predicted {1e3 * wanted_s:.2f} ms")
    for (kind, of), ratio in drift.all().items():
        print(f"reference kernel, {kind} {of}: {ratio:.3f} x the profile's")
    print(json.dumps(environment()))


if __name__ == "__main__":
    main()
