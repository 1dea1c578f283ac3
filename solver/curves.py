"""Times by prompt length under every strategy, and the latency-energy front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from hetero.solver.baselines import force, longest_step, online_s
from hetero.solver.errors import PlanError
from hetero.solver.plan import Curve, CurvePoint, FrontPoint
from hetero.solver.planner import Planner
from hetero.solver.prompt_calls import split
from hetero.solver.prompts import solve_prompt
from hetero.solver.solution import Scenario

DRAWN: Final = (
    "auto", "gpu-only", "npu-only", "layer", "padding", "pipe", "chunked", "online-prepare",
    "row-cut", "sequence-cut", "multi-sequence-cut", "hybrid-cut",
)  # fmt: skip
WEIGHTS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def curve_lengths(planner: Planner, seq_lens: Iterable[int]) -> tuple[int, ...]:
    """Return the requested lengths, graph sizes, and lengths between and just above those."""
    wanted = set(seq_lens)
    longest = max(*wanted, 64) if planner.sizes else max(wanted)
    for g in planner.sizes:
        wanted |= {g, g + 13, g + g // 2}
    return tuple(sorted(m for m in wanted if 1 < m <= longest))


def strategy_curves(planner: Planner, seq_lens: Iterable[int]) -> tuple[Curve, ...]:
    """Return the prefill times of every strategy that this profile can run."""
    lengths = curve_lengths(planner, seq_lens)
    curves = []
    for strategy in DRAWN:
        points = tuple(_point(planner, strategy, m) for m in lengths)
        if any(p.seconds is not None for p in points):
            curves.append(Curve(strategy=strategy, points=points))
    return tuple(curves)


def _point(planner: Planner, strategy: str, m: int) -> CurvePoint:
    try:
        steps = split(m, (), longest_step(planner, strategy) or m)
        prompt = solve_prompt(steps, lambda scenario: force(planner, scenario, strategy))
    except PlanError:
        return CurvePoint(m=m, seconds=None)
    seconds = prompt.seconds + sum(online_s(planner, step, strategy) for step in steps)
    return CurvePoint(m=m, seconds=seconds, energy_j=prompt.joules)


def front(planner: Planner, scenarios: Sequence[Scenario]) -> tuple[FrontPoint, ...]:
    """Return plans between the fastest and the thriftiest.

    A sweep of weights without dominated points.
    """
    points: list[FrontPoint] = []
    for scenario in scenarios:
        fastest = planner.solve(scenario, planner.objective(1.0, 0.0))
        assert fastest.joules is not None
        best = float("inf")
        for weight in WEIGHTS:
            objective = planner.objective((1 - weight) / fastest.seconds, weight / fastest.joules)
            solution = planner.solve(scenario, objective)
            joules = solution.joules or 0.0
            if joules < best * (1 - 1e-6):
                best = joules
                points.append(
                    FrontPoint(
                        phase=scenario.phase,
                        m=scenario.m,
                        energy_weight=weight,
                        seconds=solution.seconds,
                        energy_j=joules,
                    )
                )
    return tuple(points)
