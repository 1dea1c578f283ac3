"""What a plan takes by another profile: the same tiles, that profile's times.

For a plan that was written by hand, and for one that is compared with measurements: a profile taken
beside them knows how fast the devices were just then.
"""

from __future__ import annotations

import numpy as np

from hetero.profiler.records import DeviceProfile, Phase
from hetero.solver.build import PlanRequest, prepare
from hetero.solver.model_spec import ModelSpec
from hetero.solver.options import INF, Objective, Option
from hetero.solver.pieces import Pieces
from hetero.solver.plan import ExecutionPlan, OpName, OpPlan, PlanError
from hetero.solver.planner import Planner, Scenario
from hetero.solver.tilings import Chooser, Rules

Step = tuple[Phase, int]


def repredict(plan: ExecutionPlan, spec: ModelSpec, profile: DeviceProfile) -> dict[Step, float]:
    """Seconds of the plan's steps (phase and tokens, as in `plan.totals`) by this profile.

    Raises `PlanError` where the profile's devices cannot run a tile.
    """
    request = PlanRequest(precision=plan.precision, margin=-INF)
    planner, _ = prepare(spec, profile, request, apart=False)
    if plan.graph_sizes:
        planner = planner.with_graph_sizes(plan.graph_sizes)
    cuts: dict[OpName, set[int]] = {entry.op: set() for entry in plan.ops}
    for entry in plan.ops:
        cuts[entry.op] |= {t.rows[1] for t in entry.tiles if t.device == "npu"}
    planner = planner.with_rows({name: sorted(rows) for name, rows in cuts.items()})
    found: dict[Step, float] = {}
    for total in plan.totals:
        options = {
            entry.op: _option(planner, entry)
            for entry in plan.ops
            if entry.phase == total.phase and entry.m in (total.m, None)
        }
        scenario = Scenario(total.phase, total.m)
        rest = plan.rest.prefill if total.phase == "prefill" else plan.rest.decode
        found[total.phase, total.m] = planner.evaluate(scenario, options, rest).seconds
    return found


def _option(planner: Planner, entry: OpPlan) -> Option:
    """The entry's tiling with the times of the planner's profile."""
    space, m = planner.space(entry.op), entry.m or 1
    npu = [tile.resolved(m) for tile in entry.tiles if tile.device == "npu"]
    grid = space.grid(m, every=True)
    chooser = Chooser(planner.sync, Rules(margin=-INF), Objective())
    mask = np.zeros(grid.together_s.shape, dtype=bool)
    wanted: Pieces | None = None
    if npu:
        spans = tuple((tile.tokens[0], tile.tokens[1] or m) for tile in npu)
        wanted = Pieces(spans, tuple(tile.graph_size for tile in npu))
        known = [grid.choices.pieces(i) == wanted for i in range(len(grid.cuts))]
        mask[np.ix_(known, grid.rows == npu[0].rows[1])] = True
    for option in chooser.options(space, m, grid=grid, mask=mask):
        if option.pieces == wanted:
            return option
    raise PlanError(
        f"{entry.op} at {m} tokens: profile {planner.profile.name} has no times for its tiles, "
        "choose a profile of the same kind of devices"
    )
