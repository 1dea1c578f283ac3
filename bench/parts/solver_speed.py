"""How long the solver takes, on one core with the profile loaded."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from typing import Annotated

import typer
from common import finish, table, timed

from hetero.models import model_spec
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.build import make_plan
from hetero.solver.planner import Planner
from hetero.solver.prepared import prepare_solver, spread_lengths
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario

THREE = "snapdragon-x2-elite"  # has a CPU besides GPU and NPU
TEN_LENGTHS = (64, 128, 135, 256, 300, 512, 525, 600, 1000, 1024)
PLAN_BOUNDS_S = {"two": 0.3, "three": 1.0}  # of ten lengths, by the number of devices
QUERY_BOUND_S = 2e-3
LONGEST = 1024
HEAD = (
    "profile|plan of ten lengths, two devices, s (worst)|three, s (worst)|prepared solver, s|"
    "query, ms: median|99 %|worst|loss of prepared cuts: mean|worst"
)


def measure(spec: ModelGraph, profile: DeviceProfile, rounds: int) -> dict[str, list[float]]:
    """Seconds of plans, of preparing, of queries; predicted losses by prepared cuts.

    Plans are for two devices, and for three where the profile has a CPU.
    """
    kinds = ("two", "three") if "cpu" in profile.devices else ("two",)
    requests = {x: PlanRequest(seq_lens=TEN_LENGTHS, third=x == "three") for x in kinds}
    planner = Planner(spec, profile)
    lengths = PlanRequest(seq_lens=spread_lengths(planner.sizes, LONGEST), explain=False)
    found: dict[str, list[float]] = {"two": [], "three": [], "prepare": [], "query": []}
    for turn in range(rounds):
        for kind, request in requests.items():
            found[kind].append(timed(lambda r=request: make_plan(spec, profile, r)))  # type: ignore[misc]
        found["prepare"].append(timed(lambda: prepare_solver(spec, profile, lengths)))
        solver = prepare_solver(spec, profile, lengths)
        solver.plan_for(LONGEST)  # the first query of a process imports and allocates
        unseen = range(33 + turn, LONGEST, 11)
        found["query"] += [timed(lambda m=m, s=solver: s.plan_for(m)) for m in unseen]  # type: ignore[misc]
    scenarios = [Scenario("prefill", m) for m in range(33, LONGEST, 31)]
    lost = [solver.solution_for(s).seconds / planner.solve(s).seconds - 1 for s in scenarios]
    return found | {"loss": lost}


def cells(name: str, found: dict[str, list[float]]) -> Iterator[str]:
    """A row of the table."""
    queries, lost = sorted(found["query"]), found["loss"]
    yield name
    for plans in (found["two"], found["three"]):
        yield f"{statistics.median(plans):.2f} ({max(plans):.2f})" if plans else ""
    yield f"{statistics.median(found['prepare']):.2f}"
    for query_s in (statistics.median(queries), queries[int(0.99 * len(queries))], queries[-1]):
        yield f"{1e3 * query_s:.2f}"
    yield from (f"{100 * x:.1f} %" for x in (statistics.mean(lost), max(lost)))


def solver_speed(
    model: str = "llama-3-8b",
    profile: Annotated[list[str], typer.Option(help="several times")] = [],  # noqa: B006
    rounds: int = 5,
) -> None:
    """How long the solver takes: a plan of ten prompt lengths for two devices (bound 0.3 s) and for
    three (1 s), a length never seen (2 ms), and how much longer than with every row cut its answers
    are predicted to take.

    Exits with 1, and names them, if a median plan or the slowest query misses its bound.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    names = profile or ["snapdragon-8-gen-3", "snapdragon-8-gen-3-strong-npu", THREE]
    found = {x: measure(model_spec(model), DeviceProfile.load(x), rounds) for x in names}
    print(f"measured; {model}, {rounds} rounds; losses predicted\n")
    table(HEAD, [list(cells(name, times)) for name, times in found.items()])
    finish()
    missed = [
        f"{name}: a plan for {kind} devices takes {statistics.median(times[kind]):.2f} s, "
        f"the bound is {bound_s:g} s"
        for name, times in found.items()
        for kind, bound_s in PLAN_BOUNDS_S.items()
        if times[kind] and statistics.median(times[kind]) > bound_s
    ]
    missed += [
        f"{name}: a query takes {1e3 * max(times['query']):.2f} ms, the bound is 2 ms"
        for name, times in found.items()
        if max(times["query"]) > QUERY_BOUND_S
    ]
    print("", *(missed or ["all bounds are met"]), sep="\n")
    raise typer.Exit(bool(missed))
