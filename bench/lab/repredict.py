"""Times of a plan by another profile: the same tiles, that profile's times.

For a plan that was written by hand, and for one that is compared with measurements: a profile taken
with them knows how fast the devices were just then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DeviceProfile
from hetero.solver.baselines import npu_sequence, online_s
from hetero.solver.chooser import Chooser, Rules
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.npu_tiles import NpuTiles
from hetero.solver.options import INF, Objective, Option
from hetero.solver.placement import Placement
from hetero.solver.plan import Tile
from hetero.solver.planner import Planner
from hetero.solver.prompts import call_scenarios, prompt_of
from hetero.solver.request import PlanRequest
from hetero.solver.sizing import planner_for
from hetero.solver.solution import Scenario, Solution


def repredict(
    plan: ExecutionPlan, spec: ModelGraph, profile: DeviceProfile, steps: Iterable[Scenario] = ()
) -> dict[Scenario, float]:
    """Return the seconds of prompts and steps by this profile.

    The default are the plan's own. Prompts run in the plan's calls; those of `online-prepare`
    contain preparing their graphs.

    Raises `PlanError` where the plan says nothing of a step or the devices cannot run a tile.
    """
    asked = list(steps) or [Scenario(total.phase, total.m) for total in plan.totals]
    calls = {step: _calls(plan, step) for step in asked}
    request = PlanRequest(precision=plan.precision)
    planner, _ = planner_for(spec, profile, request, unfused=False)
    if plan.graph_sizes:
        planner = planner.with_graph_sizes(plan.graph_sizes)
    placement = Placement(plan, spec, {})
    tiles = {
        (step, entry.op): entry.tiles
        for scenarios in calls.values()
        for step in scenarios
        for entry in placement.entries(step.phase, step.m)
    }
    rows: dict[OpName, set[int]] = {}
    for (_, name), parts in tiles.items():
        rows.setdefault(name, set()).update(t.rows[1] for t in parts if t.device == "npu")
    prepared = planner
    planner = _with_graphs_of(planner, tiles.values())
    planner = planner.with_rows({name: sorted(cuts) for name, cuts in rows.items()})

    def solve(step: Scenario) -> Solution:
        options = {
            name: _option(planner, name, _tokens(step, name), parts)
            for (of, name), parts in tiles.items()
            if of == step
        }
        counts = plan.heads(step.m) if step.phase == "prefill" else None
        heads = counts.npu if counts is not None and counts.shared else 0
        return planner.evaluate(step, options, placement.non_matmul(step.phase), heads=heads)

    def preparation_s(step: Scenario) -> float:
        return online_s(prepared, step.m, plan.strategy) if step.phase == "prefill" else 0.0

    return {
        step: prompt_of(map(solve, scenarios)).seconds + sum(map(preparation_s, scenarios))
        for step, scenarios in calls.items()
    }


def _calls(plan: ExecutionPlan, step: Scenario) -> list[Scenario]:
    """Return the calls of a step: several of a prompt that is longer than one."""
    if step.phase == "decode":
        return [step]
    return call_scenarios(plan.steps(step.m), step.context or 0)


def _with_graphs_of(planner: Planner, partitions: Iterable[Sequence[Tile]]) -> Planner:
    """Return the planner with the graphs that are prepared while a prompt waits."""
    used = {t.graph_size for tiles in partitions for t in tiles if t.device == "npu"}
    late = {size for size in used if size is not None} - set(planner.sizes)
    return planner.with_graph_sizes((*planner.sizes, *late)) if late else planner


def _tokens(step: Scenario, name: OpName) -> int:
    return 1 if name == "lm_head" else step.m


def _option(planner: Planner, name: OpName, m: int, tiles: Sequence[Tile]) -> Option:
    """Return this tiling with the times of the planner's profile."""
    space = planner.space(name)
    npu = [tile for tile in tiles if tile.device == "npu"]
    grid = space.grid(m, every=True)
    chooser = Chooser(planner.overheads, Rules(margin=-INF), Objective())
    mask = np.zeros(grid.elapsed_s.shape, dtype=bool)
    wanted: NpuTiles | None = None
    if npu:
        spans = tuple((tile.tokens[0], tile.tokens[1] or m) for tile in npu)
        graphs = tuple(tile.graph_size or _graph(planner, *tile.tokens) for tile in npu)
        sizes = tuple(g for g in graphs if g is not None)
        if len(sizes) == len(tiles) > 1 and {tile.rows for tile in npu} == {(0, space.n)}:
            return npu_sequence(planner, space, sizes, m)
        wanted = NpuTiles(spans, graphs)
        known = [grid.choices.npu_tiles(i) == wanted for i in range(len(grid.cuts))]
        mask[np.ix_(known, grid.rows == npu[0].rows[1])] = True
    for option in chooser.options(space, m, grid=grid, mask=mask):
        if option.npu_tiles == wanted:
            return option
    raise PlanError(
        f"{name} at {m} tokens: profile {planner.profile.name} has no times for the plan's tiles: "
        "choose a profile of devices that can run them"
    )


def _graph(planner: Planner, start: int, stop: int | None) -> int | None:
    """Return the graph of a tile that leaves it open: the smallest that holds it.

    None where the NPU takes any token count.
    """
    return next((size for size in planner.sizes if start + size >= (stop or start)), None)
