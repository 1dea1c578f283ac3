"""The gain of a CPU besides GPU and NPU in a prompt, and what forbids it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hetero.backends.protocol import EVERY_KIND
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import numbers_of
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.planner import Planner, for_two, shortest
from hetero.solver.report.units import duration
from hetero.solver.request import PlanRequest
from hetero.solver.sizing import planner_for
from hetero.solver.solution import Scenario, Solution, uses_third

TOKENS: Final = 512  # of the prompt, where calls may be as long


def third_device_note(
    plan: ExecutionPlan,
    spec: ModelGraph,
    profile: DeviceProfile,
    request: PlanRequest,
    error: float | None,
) -> str:
    """Return what three devices would give a prompt alone, and why this plan has them or not.

    `error` is the mean one of predicting prompts on the CPU. Empty for profiles without a CPU, and
    where the request has no third device.
    """
    if "cpu" not in profile.devices or not request.third:
        return ""
    planner, _ = planner_for(spec, profile, replace(request, objective="latency"))
    tokens = shortest(TOKENS, planner.step_tokens, spec.max_position) or TOKENS
    prompt = Scenario("prefill", tokens)
    try:
        three, two = planner.solve(prompt), for_two(planner).solve(prompt)
    except PlanError:
        return ""
    said = [_gain(planner, three, two), _use(plan, three)]
    return "; ".join([*said, *_forbidden(profile, two.seconds / three.seconds, error)])


def _gain(planner: Planner, three: Solution, two: Solution) -> str:
    """Return the predicted times of a prompt whose weights are laid out for it alone."""
    what = f"a third device: a prompt of {three.scenario.m} tokens alone takes "
    numbers = numbers_of(planner.profile)
    if not uses_third(three):
        return f"{what}{duration(two.seconds)} ({numbers}), and no less with rows on the CPU"
    ideal = ideal_s(planner, three)
    return (
        f"{what}{duration(three.seconds)} on GPU, NPU and CPU ({numbers}), "
        f"{two.seconds / three.seconds:.2f} × without the CPU; the added rates of all three, less "
        f"what synchronisation takes, are {duration(ideal)} ({1 - ideal / three.seconds:.0%} less)"
    )


def _use(plan: ExecutionPlan, three: Solution) -> str:
    """Return whether the plan has rows on the CPU."""
    if "cpu" in plan.devices():
        return "this plan has rows on the CPU"
    if not uses_third(three):
        return "this plan has none"
    return (
        "this plan has none: its lengths, and answers, which share its cuts, would lose as much "
        "as they gain, or memory is limited"
    )


def _forbidden(profile: DeviceProfile, gain: float, error: float | None) -> list[str]:
    """Return what keeps opened models from using the CPU by this profile."""
    record = profile.devices["cpu"]
    if record.numbers not in ("fitted", "simulated"):
        return []
    engines = sorted({x.engine for x in profile.units if x.device == "cpu"})
    sure = ""
    if error is not None:
        less = ", which is more than it gains" if error > gain - 1 else ""
        sure = f", predicted with a mean error of {error:.0%} in prompts{less}"
    rates = f"are {' and '.join(engines)}'s{sure}" if engines else "were not measured"
    return [
        f"models that are opened take no third device by this profile: the CPU's rates {rates}, "
        "and ONNX Runtime computes there (measure it: hetero profile --measure-cpu ort-cpu)"
    ]


def ideal_s(planner: Planner, solution: Solution) -> float:
    """Return the seconds of a step whose matmuls take no longer than all devices' added rates.

    With what the solution has of synchronisation, and of all other operations.
    """
    seconds, m = solution.seconds, solution.scenario.m
    for name, option in solution.options.items():
        if name in planner.spec.sampled:
            continue
        n, k = planner.shape(name)
        alone = [planner.kernels.table(kind, [m], [n], k).seconds[0, 0] for kind in EVERY_KIND]
        added_s = 1 / sum(1 / float(x) for x in alone)
        seconds -= planner.spec.counts[name] * (option.elapsed_s - added_s)
    return seconds
