"""How long the solver takes, on one core with the profile loaded.

    python bench/solver_speed.py [--model llama-3-8b] [--profile NAME]... [--rounds N] [--json FILE]

Measured on this machine: a plan of ten prompt lengths and decoding (bound: 1 s), a prepared solver
(what the runtime does at start), its answer for a length never seen (bound: 2 ms), and how much
longer than with every row cut allowed those answers are predicted to take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hetero.backends.host.files import atomic_write
from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.planner import Planner, Scenario
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.request import PlanRequest

TEN_LENGTHS = (64, 128, 135, 256, 300, 512, 525, 600, 1000, 1024)
PLAN_BOUND_S = 1.0
QUERY_BOUND_S = 2e-3
LONGEST = 1024


class Speed(NamedTuple):
    """Seconds (median, 99 % and worst of the queries), and the loss of prepared cuts."""

    profile: str
    plan_s: float
    plan_worst_s: float
    prepare_s: float
    query_s: float
    query_p99_s: float
    query_worst_s: float
    queries: int
    mean_loss: float
    worst_loss: float

    @property
    def met(self) -> bool:
        """Whether both bounds hold, for the median plan and the slowest query."""
        return self.plan_s <= PLAN_BOUND_S and self.query_worst_s <= QUERY_BOUND_S


def measure(spec: ModelGraph, profile: DeviceProfile, rounds: int) -> Speed:
    """All figures of one profile."""
    request = PlanRequest(seq_lens=TEN_LENGTHS)
    plans = [_timed(lambda: make_plan(spec, profile, request)) for _ in range(rounds)]
    planner = Planner(spec, profile)
    lengths = PlanRequest(seq_lens=spread_lengths(planner.sizes, LONGEST), explain=False)
    prepares = [_timed(lambda: prepare_solver(spec, profile, lengths)) for _ in range(rounds)]
    queries: list[float] = []
    for turn in range(rounds):
        solver = prepare_solver(spec, profile, lengths)
        queries += _queries(solver, range(33 + turn, LONGEST, 11))
    queries.sort()
    losses = _losses(solver, planner)
    return Speed(
        profile.name,
        statistics.median(plans),
        max(plans),
        statistics.median(prepares),
        statistics.median(queries),
        queries[int(0.99 * len(queries))],
        queries[-1],
        len(queries),
        statistics.mean(losses),
        max(losses),
    )


def _queries(solver: PreparedSolver, lengths: range) -> list[float]:
    solver.plan_for(LONGEST)  # the first query of a process imports and allocates
    return [_timed(lambda m=m: solver.plan_for(m)) for m in lengths]  # type: ignore[misc]


def _losses(solver: PreparedSolver, planner: Planner) -> list[float]:
    """Predicted time with prepared cuts over that with all, less one."""
    scenarios = [Scenario("prefill", m) for m in range(33, LONGEST, 31)]
    return [solver.solution_for(s).seconds / planner.solve(s).seconds - 1 for s in scenarios]


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(found: list[Speed]) -> str:
    """Markdown."""
    lines = [
        "| profile | plan of ten lengths, s (worst) | prepared solver, s | query, ms: median | "
        "99 % | worst | loss of prepared cuts: mean | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {x.profile} | {x.plan_s:.2f} ({x.plan_worst_s:.2f}) | {x.prepare_s:.2f} | "
        f"{1e3 * x.query_s:.2f} | {1e3 * x.query_p99_s:.2f} | {1e3 * x.query_worst_s:.2f} | "
        f"{100 * x.mean_loss:.1f} % | {100 * x.worst_loss:.1f} % |"
        for x in found
    ]
    return "\n".join(lines)


def main() -> int:
    """Print; exit 1 if a bound is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--profile", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    spec = model_spec(options.model)
    names = options.profile or ["snapdragon-8-gen-3", "snapdragon-8-gen-3-strong-npu"]
    found = [measure(spec, DeviceProfile.load(name), options.rounds) for name in names]
    print(table(found))
    if options.json is not None:
        rows = [x._asdict() for x in found]
        atomic_write(options.json, json.dumps(rows, indent=1) + "\n")
    return 0 if all(x.met for x in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
