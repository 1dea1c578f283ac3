"""`PreparedThree`: calls solved within the rows that a plan for GPU, NPU and CPU has prepared."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Final

from hetero.profiler.model_graph import OpName
from hetero.solver.build import entries, share_of
from hetero.solver.chooser import Chooser
from hetero.solver.drift import Factors
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.options import Objective, Option
from hetero.solver.plan import Phase
from hetero.solver.planner import Planner
from hetero.solver.request import DECODE
from hetero.solver.residency import mask_of
from hetero.solver.solution import Scenario, Solution
from hetero.solver.third_device import Spans
from hetero.solver.weight_memory import ResidentRows

MAX_CACHED: Final = 256  # plans of single lengths that are remembered
NOWHERE_ELSE: Final = ResidentRows(0, 0)  # all rows are the GPU's


class PreparedThree:
    """Solves one call at a time with the cuts of a plan for three, for other lengths and speeds.

    The NPU computes rows that it holds, the CPU the spans that it has in some call of the plan, and
    the GPU, which maps the packed weights, any row of a matmul that it has rows of. So a matmul may
    leave the CPU or the NPU and come back, or take another call's cut. `rows` and `npu_head_counts`
    are those of the plan. Not for several threads at once.
    """

    def __init__(self, planner: Planner, plan: ExecutionPlan) -> None:
        self.plan = plan.model_copy(update={"step_sizes": ()})
        self.rows: dict[OpName, tuple[int, ...]] = {
            name: rows.cuts for name, rows in plan.residency.items()
        }
        counts = {x.heads.npu for x in plan.attention if x.heads.shared}
        self.npu_head_counts = tuple(sorted(counts))
        cuts = dict.fromkeys(planner.names(unfused=True), ()) | self.rows
        self._planner = planner.with_rows(cuts).with_heads(self.npu_head_counts)
        self._resident = {
            name: ResidentRows(rows.npu_rows, self._gpu_from(name, rows.gpu_from))
            for name, rows in plan.residency.items()
        }
        spans: dict[OpName, set[tuple[int, int]]] = defaultdict(set)
        for op in plan.ops:
            spans[op.op].update(tile.rows for tile in op.tiles if tile.device == "cpu")
        self._spans: dict[OpName, Spans] = {name: frozenset(x) for name, x in spans.items()}
        self._plans: dict[tuple[Phase, int], ExecutionPlan] = {}

    def _gpu_from(self, name: OpName, first: int) -> int:
        """Return the first row that the GPU may compute, where it has rows from `first` on."""
        n, _ = self._planner.shape(name)
        return 0 if first < n else n

    def plan_for(self, m: int, phase: Phase = "prefill") -> ExecutionPlan:
        """Return the entries of one call of m tokens."""
        if (phase, m) not in self._plans:
            if len(self._plans) >= MAX_CACHED:
                self._plans.pop(next(iter(self._plans)))
            self._plans[phase, m] = self._planned(Scenario(phase, m))
        return self._plans[phase, m]

    def drifted(self, factors: Factors) -> PreparedThree:
        """Return the same on devices that take so many times as long as the profile says.

        `plan` has decoding and the first length of this one's; `plan_for` the others.
        """
        changed = copy.copy(self)
        changed._planner, changed._plans = self._planner.drifted(factors), {}
        changed.plan = changed._planned(DECODE, Scenario("prefill", min(self.plan.listed_tokens)))
        return changed

    def _planned(self, *scenarios: Scenario) -> ExecutionPlan:
        solutions = [self.solution_for(x) for x in scenarios]
        update: dict[str, object] = {
            "ops": tuple(entries(self._planner, solutions)),
            "totals": (),
            "phases": (),
            "residency": {},
        }
        if self.npu_head_counts:
            prompts = (x for x in solutions if x.scenario.phase == "prefill")
            update["attention"] = tuple(share_of(self._planner, x) for x in prompts)
        return self.plan.model_copy(update=update)

    def solution_for(self, scenario: Scenario) -> Solution:
        """Return the best options of one call and its predicted seconds."""
        devices = self.plan.non_matmul
        others = devices.prefill if scenario.phase == "prefill" else devices.decode
        options = {name: self.options(name, scenario.m) for name in self._names()}
        return self._planner.solve(scenario, options=options, non_matmul_device=others)

    def _names(self) -> list[OpName]:
        """Return the matmuls that calls may have: the whole or the members that the plan has."""
        spec, names = self._planner.spec, list[OpName]()
        for stage in (*spec.block, *spec.tail):
            apart = bool(stage.members) and all(x in self._resident for x in stage.members)
            if stage.name in self._resident or not apart:
                names.append(stage.name)
            names += stage.members if apart else ()
        return names

    def options(self, name: OpName, m: int) -> list[Option]:
        """Return what a matmul may choose from in a call of m tokens."""
        tokens = self._planner.spec.tokens_of(name, m)
        space, resident = self._planner.space(name), self._resident.get(name, NOWHERE_ELSE)
        grid = space.grid(tokens)
        rules = self._planner.settings.rules
        chooser = Chooser(self._planner.overheads, rules, Objective(power=self._planner.power))
        return chooser.options(
            space,
            tokens,
            grid=grid,
            mask=mask_of(grid, resident, tokens, space.n),
            gpu_alone=resident.gpu == 0,
            spans=self._spans.get(name, frozenset()),
        )
