"""Plans that follow one named strategy, for the runtime to execute and to compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.solver.baselines import force, longest_step, online_s
from hetero.solver.build import assemble
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.joint_plan import agree, cuts_of, solve_jointly, with_used_cuts
from hetero.solver.names import NamedStrategy
from hetero.solver.plan import Total
from hetero.solver.planner import Planner
from hetero.solver.request import PlanRequest, scenarios_of
from hetero.solver.sizing import planner_for
from hetero.solver.solution import Scenario, Solution

# Strategies that say something about one token; the others decode at layer level.
_DECODES = {"auto": "auto", "gpu-only": "gpu-only", "npu-only": "npu-only", "row-cut": "row-cut",
            "hybrid-cut": "row-cut"}  # fmt: skip


def strategy_plan(
    spec: ModelGraph,
    profile: DeviceProfile,
    strategy: NamedStrategy,
    token_counts: Sequence[int],
    request: PlanRequest | None = None,
) -> ExecutionPlan:
    """Return the plan of one strategy for prompts of these lengths, and for decoding.

    See docs/explanation/solver.md.

    Raises `PlanError` where the strategy is unknown or the profile cannot run it.
    """
    if strategy not in get_args(NamedStrategy):
        known = ", ".join(get_args(NamedStrategy))
        raise PlanError(f"unknown strategy {strategy!r}: choose one of {known}")
    if not token_counts or min(token_counts) < 1:
        raise PlanError(f"prompt lengths are token counts from 1 on, got {list(token_counts)}")
    request = replace(request or PlanRequest(), seq_lens=tuple(token_counts), length_weights=())
    planner, notes = planner_for(spec, profile, request, unfused=False, experts=strategy == "auto")
    longest = longest_step(planner, strategy)
    calls = request.in_calls(longest)
    if strategy == "auto":
        wanted, objective = scenarios_of(calls.seq_lens), planner.objective(*request.weights)
        planner, solutions = solve_jointly(planner, wanted, objective, calls, notes)
    else:
        planner = planner.with_heads(())  # which cuts no attention
        planner, solutions = solve_strategy(planner, strategy, sorted(set(calls.seq_lens)))
    plan = assemble(planner, solutions, request, notes, strategy=strategy, longest=longest)
    totals = tuple(_with_preparation(planner, t, strategy) for t in plan.totals)
    fixed = {"step_sizes": ()} if strategy == "chunked" else {}  # all but the last are alike
    return plan.model_copy(update={"totals": totals} | fixed)


def solve_strategy(
    planner: Planner, strategy: NamedStrategy, lengths: Sequence[int]
) -> tuple[Planner, list[Solution]]:
    """Solve the prefill of these lengths and decoding; return the planner as well.

    It has the row cuts of the solutions.

    All cuts are prepared, so each costs the tiles across it a call: a length takes another's cut
    where that is cheaper (`build.solve_jointly`).
    """
    solutions = _solve_alone(planner, strategy, lengths)
    cuts = cuts_of(planner, solutions)
    if not planner.sizes or not any(cuts.values()):
        return planner, solutions
    return with_used_cuts(planner, cuts, lambda limited: _solve_alone(limited, strategy, lengths))


def _solve_alone(
    planner: Planner, strategy: NamedStrategy, lengths: Iterable[int]
) -> list[Solution]:
    """Solve each length and decoding by itself, with one device for the other operators."""
    prefill = [force(planner, Scenario("prefill", m), strategy) for m in lengths]
    decode = force(planner, Scenario("decode", 1), _DECODES.get(strategy, "layer"))
    return agree(planner, [*prefill, decode], planner.objective())


def _with_preparation(planner: Planner, total: Total, strategy: NamedStrategy) -> Total:
    """Return the prompts of `online-prepare` pay for preparing their graphs too."""
    if total.phase == "decode":
        return total
    seconds = total.predicted_s + sum(online_s(planner, m, strategy) for m in total.steps)
    return total.model_copy(update={"predicted_s": seconds, "tokens_per_s": total.m / seconds})
