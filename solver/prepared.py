"""`PreparedSolver`: plans for prompt lengths never seen, within what is prepared (docs/solver.md).

What takes time to prepare is fixed first: the row cuts of every matmul and the rows that live on
each device. Within them the best plan of one length takes a millisecond or two.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Final

from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DECODE_TOKENS, DeviceProfile
from hetero.solver.build import assemble, entry
from hetero.solver.chooser import Chooser
from hetero.solver.cuts import row_cuts
from hetero.solver.drift import Factors
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.joint import JointSpace
from hetero.solver.memory import Held, held_by_op
from hetero.solver.options import Option
from hetero.solver.plan import Phase
from hetero.solver.planner import Planner, shortest
from hetero.solver.prompts import Prompt, solve_prompt
from hetero.solver.request import DECODE, MOST_LENGTHS, PlanRequest, scenarios_of
from hetero.solver.residency import mask_of
from hetero.solver.sizing import planner_for
from hetero.solver.solution import Scenario, Solution
from hetero.solver.together import solve_within

CUTS: Final = 4  # row cuts of one matmul that are prepared
LONGEST: Final = 2048  # tokens whose GPU times are looked up ahead on devices without graphs
KEPT: Final = 256  # plans of single lengths that are remembered


def spread_lengths(graph_sizes: Sequence[int], longest: int) -> tuple[int, ...]:
    """Lengths that stand for all prompts of up to `longest` tokens: the graphs, a little more than
    each, and between them.
    """
    sizes = [g for g in graph_sizes if g > DECODE_TOKENS] or [32, 64, 128, 256, 512, 1024]
    wanted = {m for g in sizes for m in (g, g + max(g // 16, 1), g + g // 4, g + g // 2)}
    found = sorted(m for m in wanted if m <= longest) or [longest]
    return tuple(found[:: -(-len(found) // MOST_LENGTHS)])


def prepare_solver(
    spec: ModelGraph, profile: DeviceProfile, request: PlanRequest, *, cuts: int = CUTS
) -> PreparedSolver:
    """A solver for any prompt length, with at most `cuts` row cuts of each matmul, chosen for the
    lengths of the request. Raises `PlanError` or `ProfileError`.
    """
    request.check()
    planner, notes = planner_for(spec, profile, request, apart=False)
    return PreparedSolver(planner, request, cuts=cuts, notes=notes)


class PreparedSolver:
    """Solves one length at a time with prepared row cuts and residency.

    `plan` is the plan that it was prepared with; `plan_for` has entries of the same kind for any
    token count. `rows` are the row cuts that may be used, `held` the rows on each device. Not for
    several threads at once.
    """

    def __init__(
        self,
        planner: Planner,
        request: PlanRequest,
        *,
        cuts: int = CUTS,
        notes: Sequence[str] = (),
    ) -> None:
        said = list(notes)
        calls = request.in_calls(planner.step_tokens)
        scenarios = scenarios_of(calls.seq_lens)
        self._objective = planner.objective(*request.weights)
        names: list[OpName] = [x.name for x in planner.spec.matmuls]
        rows = {x: row_cuts(planner, x, scenarios, self._objective, cuts) for x in names}
        self.rows = rows
        self._planner = planner.with_rows(rows)
        solutions = solve_within(self._planner, scenarios, self._objective, calls, said)
        self.held = held_by_op(self._planner, solutions)
        self._chooser = Chooser(planner.overheads, planner.settings.rules, self._objective)
        self._rest = {s.scenario.phase: s.rests.device for s in solutions}
        self._block: list[OpName] = [name for name in names if name != "lm_head"]
        self._joint = self._join()
        heads = {s.scenario.phase: s.options.get("lm_head") for s in solutions}
        self._heads = {phase: x and x.open() for phase, x in heads.items()}
        self._plans: dict[tuple[Phase, int], ExecutionPlan] = {}
        longest = shortest(planner.step_tokens, planner.longest_with(self._rest["prefill"]))
        found = assemble(self._planner, solutions, request, said)
        self.plan = found.model_copy(update={"step_tokens": longest, "step_sizes": ()})
        self._head_entries = tuple(op for op in self.plan.ops if op.op == "lm_head")

    def plan_for(self, m: int, phase: Phase = "prefill") -> ExecutionPlan:
        """The plan of one call of m tokens, in at most 2 ms (Llama-3-8B, one core of a PC).

        Raises `PlanError` for more tokens than two graphs hold: `plan.steps` cuts such prompts.
        """
        if (phase, m) not in self._plans:
            if len(self._plans) >= KEPT:
                self._plans.pop(next(iter(self._plans)))
            collecting = gc.isenabled()
            gc.disable()  # a prompt waits, and a collection costs as much as several plans
            try:
                self._plans[phase, m] = self._solve(Scenario(phase, m))
            finally:
                if collecting:
                    gc.enable()
        return self._plans[phase, m]

    def drifted(self, factors: Factors) -> PreparedSolver:
        """The same row cuts on devices that take so many times as long as the profile says.

        The GPU may compute any row of a matmul that it has rows of (it maps the packed weights),
        the NPU only rows that it holds. `plan` has decoding and the first length of this one's;
        `plan_for` the others.
        """
        found = copy.copy(self)
        found.held = {
            name: Held(held.npu, 0 if held.gpu < self._planner.shape(name)[0] else held.gpu)
            for name, held in self.held.items()
        }
        found._planner = self._planner.drifted(factors)
        found._joint = found._join()
        found._plans = {}
        found._heads = {}
        options = found.solution_for(DECODE).options
        if (head := options.get("lm_head")) is not None:
            found._heads = dict.fromkeys(self._heads, head.open())
            found._head_entries = tuple(
                entry(found._planner, Scenario(op.phase, 1), "lm_head", head, with_candidates=False)
                for op in self._head_entries
            )
        first = min(op.m for op in self.plan.ops if op.phase == "prefill" and op.m is not None)
        parts = (found.plan_for(1, "decode"), found.plan_for(first))
        ops = [op for part in parts for op in part.ops if op.op != "lm_head"]
        found.plan = self.plan.model_copy(
            update={"ops": (*ops, *found._head_entries), "totals": (), "residency": {}}
        )
        return found

    def _solve(self, scenario: Scenario) -> ExecutionPlan:
        options = self.solution_for(scenario).options
        ops = [
            entry(self._planner, scenario, name, options[name], with_candidates=False)
            for name in self._block
        ]
        return self.plan.model_copy(update={"ops": (*ops, *self._head_entries), "totals": ()})

    def prompt(self, tokens: int, context: int = 0) -> Prompt:
        """A prompt of any length behind `context` tokens, in the plan's calls."""
        return solve_prompt(self.plan.steps(tokens), self.solution_for, context)

    def solution_for(self, scenario: Scenario) -> Solution:
        """The best options of one call and its predicted seconds."""
        if self._joint is not None and scenario.m <= self._joint.longest:
            options = self._joint.options(scenario.m, self._chooser)
        else:
            options = {name: self._options(name, scenario.m) for name in self._block}
        if (head := self._heads.get(scenario.phase)) is not None:
            options["lm_head"] = [head]
        elif "lm_head" in self.held:
            options["lm_head"] = self._options("lm_head", 1)
        rest = self._rest[scenario.phase]
        return self._planner.solve(scenario, self._objective, options=options, rest=rest)

    def _join(self) -> JointSpace | None:
        spaces = {name: self._planner.space(name) for name in self._block}
        if not all(space.has_npu for space in spaces.values()):
            return None
        for space in spaces.values():
            space.kernels.remember("npu", space.sizes, space.rows.tolist(), space.k)
        longest = self._planner.longest_with("gpu")
        return JointSpace(spaces, self.held, longest or LONGEST)

    def _options(self, name: OpName, m: int) -> list[Option]:
        held = self.held[name]
        space = self._planner.space(name)
        grid = space.grid(m)
        mask = mask_of(grid, held, m, space.n)
        return self._chooser.options(space, m, grid=grid, mask=mask, gpu_alone=held.gpu == 0)
