"""Solutions of several steps that one plan can have: their cuts, devices and memory agree."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Final

import numpy as np

from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import OpName
from hetero.solver import copies, residency
from hetero.solver.cuts import row_cuts
from hetero.solver.errors import PlanError
from hetero.solver.options import GPU, HOST, Objective, Option
from hetero.solver.plan import PHASES, Memory
from hetero.solver.planner import Planner, for_two, with_fused
from hetero.solver.request import PlanRequest
from hetero.solver.solution import Scenario, Solution
from hetero.solver.weight_memory import Limits, limits_of, weight_memory

EQUAL: Final = 1e-9  # relative: what sums in another order may differ by


def solve_jointly(
    planner: Planner,
    scenarios: Sequence[Scenario],
    objective: Objective,
    request: PlanRequest,
    notes: list[str],
) -> tuple[Planner, list[Solution]]:
    """Do `solve_within`, with the row cuts that serve all scenarios best, each at a cost.

    The planner returned has the cuts that are used, so that its costs are those of the plan. Under
    a memory limit that binds all rows are free again: which of them fit comes first.
    """
    if planner.sizes:
        limited, best = _with_cuts(planner, scenarios, objective, request)
        if edges := edges_of_mixed(planner, best):
            limited = planner.with_rows(cuts_of(planner, best) | edges)
            best = solve_free(limited, scenarios, objective)  # with the calls that it costs
            whole = with_fused(planner, edges)
            fused = _with_cuts(whole, scenarios, objective, request)
            if _cost(planner, request, fused[1]) <= _cost(planner, request, best):
                planner, (limited, best) = whole, fused
        limits = limits_of(planner.profile, request.memory_budget_bytes)
        if limits.hold(weight_memory(limited, best)):
            return _joint_with_few_copies(planner, limited, best, objective, request, notes)
    return planner, solve_within(planner, scenarios, objective, request, notes)


def _with_cuts(
    planner: Planner,
    scenarios: Sequence[Scenario],
    objective: Objective,
    request: PlanRequest,
) -> tuple[Planner, list[Solution]]:
    """Solve with few row cuts, which pay for the calls that they cost."""
    two = for_two(planner)
    limited, best = _with_own_cuts(two, scenarios, objective)
    if any(_loses(two, solution) for solution in best):
        limited, best = _with_paying_cuts(two, best, objective, request)
    if two is not planner:
        limited, best = _with_third(planner, limited, best, objective, request)
    return limited, best


def edges_of_mixed(
    planner: Planner, solutions: Sequence[Solution]
) -> dict[OpName, tuple[int, ...]]:
    """Return where the NPU's kernels end of matmuls that are fused in some steps and not in others.

    Kernels of the whole weight then end at the edges of the members' and theirs at its edges.
    """
    edges: dict[OpName, tuple[int, ...]] = {}
    for stage in planner.spec.block:
        steps = [s.options for s in solutions if stage.name in s.options]
        apart = [s.options for s in solutions if stage.name not in s.options]
        apart = [x for x in apart if stage.members and stage.members[0] in x]
        if not steps or not apart:
            continue
        starts = np.cumsum([0, *(planner.shape(x)[0] for x in stage.members)]).tolist()
        ends = {row for x in steps if x[stage.name].rows for row in x[stage.name].row_cuts}
        for name, start in zip(stage.members, starts, strict=False):
            own = (x[name] for x in apart if x[name].rows)
            ends |= {start + row for option in own for row in (0, *option.row_cuts)}
        edges[stage.name] = tuple(sorted(ends))
        for name, start in zip(stage.members, starts, strict=False):
            edges[name] = tuple(sorted(row - start for row in ends if row > start))
    return edges


def _joint_with_few_copies(
    planner: Planner,
    limited: Planner,
    best: list[Solution],
    objective: Objective,
    request: PlanRequest,
    notes: list[str],
) -> tuple[Planner, list[Solution]]:
    """Return the best solutions, or others with few copies, and the planner that has their cuts."""
    scenarios = [solution.scenario for solution in best]
    parts = [(planner, scenarios)]
    limits = limits_of(planner.profile)
    tight = copies.tighter(parts, weight_memory(limited, best), limits, request)
    if tight is None:
        return limited, best

    try:
        rows = _rows_with_few_copies(parts, objective, tight, request)
    except PlanError:
        return limited, best

    def solve(with_cuts: Planner) -> list[Solution]:
        (solved,) = residency.solve_with([(with_cuts, scenarios)], objective, rows)
        return agree(with_cuts, solved, objective)

    thrifty, fewer = with_used_cuts(planner, cuts_of(planner, solve(planner)), solve)
    if _are_worth([(limited, scenarios)], [best], [fewer], request, notes):
        return limited, best
    return thrifty, fewer


def _with_own_cuts(
    planner: Planner,
    scenarios: Sequence[Scenario],
    objective: Objective,
) -> tuple[Planner, list[Solution]]:
    """Solve with few row cuts for all scenarios (`cuts.py`), keeping only those in use."""
    count = len(scenarios)
    cuts = {x: row_cuts(planner, x, scenarios, objective, count) for x in planner.names()}
    return with_used_cuts(
        planner,
        cuts,
        lambda limited: solve_free(limited, scenarios, objective),
    )


def _loses(planner: Planner, solution: Solution) -> bool:
    """Return whether one device alone is faster than a step of a plan."""
    return _loss(planner, solution) > EQUAL


def _loss(planner: Planner, solution: Solution) -> float:
    """Return by how much of the best device's time a step of a plan is slower; at least 0."""
    return max(solution.seconds / planner.alone_s(solution.scenario) - 1, 0.0)


def _with_paying_cuts(
    planner: Planner, best: list[Solution], objective: Objective, request: PlanRequest
) -> tuple[Planner, list[Solution]]:
    """Take away the cuts of each matmul that cost other steps more calls than they gain in theirs.

    Each step counts as the request weighs it, but none may lose more than the margin to one device.
    """
    scenarios = [solution.scenario for solution in best]
    cost = partial(_cost, planner, request)
    cuts = cuts_of(planner, best)
    for name in [name for name, rows in cuts.items() if rows]:
        fewer = cuts | {name: ()}
        solutions = solve_free(planner.with_rows(fewer), scenarios, objective)
        if cost(solutions) < cost(best):
            cuts, best = fewer, solutions
    return with_used_cuts(planner, cuts, lambda x: solve_free(x, scenarios, objective))


def _cost(
    planner: Planner, request: PlanRequest, solutions: Iterable[Solution]
) -> tuple[float, float]:
    """Return what steps lose beyond the margin to one device, and their cost as they come."""
    lost = cost = 0.0
    for solution in solutions:
        lost += max(_loss(planner, solution) - request.margin, 0.0)
        cost += request.weight(solution.scenario) * solution.path.cost
    return lost, cost


def _with_third(
    planner: Planner,
    limited: Planner,
    best: list[Solution],
    objective: Objective,
    request: PlanRequest,
) -> tuple[Planner, list[Solution]]:
    """Return the same with row cuts for three devices in place of those for two, where they pay.

    Each matmul, and the members of a fused one, is tried with what the longest prompt wants of it,
    on a few of the steps.
    """
    scenarios = [solution.scenario for solution in best]
    prompts = [x for x in best if x.scenario.phase == "prefill"]
    places = sorted({0, len(prompts) // 2, len(prompts) - 1})
    some = [*(prompts[i].scenario for i in places), *scenarios[len(prompts) :]]
    cuts = before = cuts_of(planner, best)
    least = _cost(planner, request, [x for x in best if x.scenario in some])
    for stage in planner.spec.block:
        for names in filter(None, ((stage.name,), stage.members)):
            wanted = {x: _for_three(planner, x, prompts[-1], objective) for x in names}
            if not any(wanted.values()):
                continue
            more = cuts | {name: rows for name, rows in wanted.items() if rows}
            tried = _cost(planner, request, solve_free(planner.with_rows(more), some, objective))
            if tried < least:
                least, cuts = tried, more
    if cuts == before:
        return limited, best
    solved = with_used_cuts(planner, cuts, lambda x: solve_free(x, scenarios, objective))
    better = _cost(planner, request, solved[1]) < _cost(planner, request, best)
    return solved if better else (limited, best)


def _for_three(
    planner: Planner, name: OpName, step: Solution, objective: Objective
) -> tuple[int, ...]:
    """Return the row cuts of a matmul's best option for three devices; none where none gains.

    It is entered from the device of the operators between matmuls, which continues after it.
    """

    def cost(option: Option) -> float:
        if step.non_matmul.device == "gpu":
            return objective.cost_alone(option, GPU)
        return objective.cost(option, HOST)

    options = planner.candidates(name, planner.spec.tokens_of(name, step.scenario.m), objective)
    three = [x for x in options if x.cpu_rows and cost(x) < math.inf]
    return min(three, key=cost).row_cuts if three else ()


def with_used_cuts(
    planner: Planner,
    cuts: dict[OpName, tuple[int, ...]],
    solve: Callable[[Planner], list[Solution]],
) -> tuple[Planner, list[Solution]]:
    """Reduce the row cuts until the solutions use all that are left.

    Return the planner that has those, and its solutions.
    """
    while True:
        limited = planner.with_rows(cuts)
        solutions = solve(limited)
        cuts_in_use = cuts_of(planner, solutions)
        used = {name: cuts_in_use.get(name, ()) for name in cuts}
        if used == cuts:
            return limited, solutions
        cuts = used


def solve_within(
    planner: Planner,
    scenarios: Sequence[Scenario],
    objective: Objective,
    request: PlanRequest,
    notes: list[str],
) -> list[Solution]:
    """Return the best solutions that one plan can have.

    One device for the other operators of a phase, weights within the memory budget and within what
    each device can hold, few of them on both (`copies.py`).
    """
    (solutions,) = solve_separately([(planner, scenarios)], objective, request, notes)
    return solutions


def solve_separately(
    parts: Sequence[residency.Part],
    objective: Objective,
    request: PlanRequest,
    notes: list[str],
) -> list[list[Solution]]:
    """Do the same as `solve_within` for planners whose weights are stored separately."""
    best = [solve_free(planner, scenarios, objective) for planner, scenarios in parts]
    (planner, _), *_ = parts
    limits = limits_of(planner.profile, request.memory_budget_bytes)
    memory = _memory(parts, best)
    if not limits.hold(memory):
        notes += _limit_notes(planner, memory, limits)
        rows = residency.choose_rows(parts, objective, limits, request.weight)
        best = _agree(parts, residency.solve_with(parts, objective, rows), objective)
        memory = _memory(parts, best)
    tight = copies.tighter(parts, memory, limits, request)
    if tight is None:
        return best
    try:
        rows = _rows_with_few_copies(parts, objective, tight, request)
    except PlanError:
        return best
    fewer = _agree(parts, residency.solve_with(parts, objective, rows), objective)
    return best if _are_worth(parts, best, fewer, request, notes) else fewer


def _rows_with_few_copies(
    parts: Sequence[residency.Part], objective: Objective, tight: Limits, request: PlanRequest
) -> list[residency.Residents]:
    """Return the rows on each device within the limit of copies, chosen by a few of the steps."""
    weights = [copies.representatives(scenarios, request) for _, scenarios in parts]
    some = [(x, list(own)) for (x, _), own in zip(parts, weights, strict=True)]
    count = ChainMap(*weights).__getitem__
    return residency.choose_rows(
        some, objective, tight, count, places=copies.PLACES, gap=copies.GAP
    )


def _are_worth(
    parts: Sequence[residency.Part],
    best: Sequence[Sequence[Solution]],
    fewer: Sequence[Sequence[Solution]],
    request: PlanRequest,
    notes: list[str],
) -> bool:
    """Return whether the copies of the best solutions gain what they must, with a note of it."""
    (planner, _), *_ = parts
    slower = copies.slowdown(chain.from_iterable(best), chain.from_iterable(fewer), request)
    kept = slower >= copies.worth(limits_of(planner.profile), request) or any(
        _loses_more(x, *pair, request)
        for (x, _), mine, other in zip(parts, best, fewer, strict=True)
        for pair in zip(mine, other, strict=True)
    )
    memory = _memory(parts, best), _memory(parts, fewer)
    notes.append(copies.note_of(*memory, copies.weights_of(parts), slower, kept=kept))
    return kept


def _loses_more(planner: Planner, best: Solution, other: Solution, request: PlanRequest) -> bool:
    """Return whether the other step loses more than the margin to one device, unlike the best."""
    if other.seconds <= best.seconds * (1 + EQUAL):
        return False
    return _loss(planner, other) > max(_loss(planner, best) + EQUAL, request.margin)


def _agree(
    parts: Sequence[residency.Part], solved: Sequence[Sequence[Solution]], objective: Objective
) -> list[list[Solution]]:
    return [agree(x, s, objective) for (x, _), s in zip(parts, solved, strict=True)]


def _memory(parts: Sequence[residency.Part], solved: Sequence[Sequence[Solution]]) -> Memory:
    return memory_of([(x, s) for (x, _), s in zip(parts, solved, strict=True)])


def memory_of(parts: Iterable[tuple[Planner, Sequence[Solution]]]) -> Memory:
    """Return the bytes of weights of planners whose weights are stored separately.

    The output head is the last one's alone.
    """
    *others, (last, solutions) = parts
    each = [weight_memory(x, [s.without_head() for s in solved]) for x, solved in others]
    each.append(weight_memory(last, solutions))
    fields = ("gpu_bytes", "npu_bytes", "cpu_bytes", "twice_bytes", "graphs_bytes")
    return Memory(**{name: sum(getattr(x, name) for x in each) for name in fields})


def solve_free(
    planner: Planner, scenarios: Sequence[Scenario], objective: Objective
) -> list[Solution]:
    """Do the same as `solve_within`, without a limit of memory."""
    return _with_one_non_matmul_device(
        planner, objective, [planner.solve(s, objective) for s in scenarios]
    )


def _limit_notes(planner: Planner, memory: Memory, limits: Limits) -> Iterable[str]:
    """Return which limits the best plans exceed."""
    if memory.total_bytes > limits.both:
        yield "the memory budget limits the cuts"
    for kind, nbytes, limit in (
        ("GPU", memory.gpu_bytes, limits.gpu),
        ("NPU", memory.npu_bytes, limits.npu),
        ("CPU", memory.cpu_bytes, limits.cpu),
    ):
        if nbytes > limit:
            fewer = "; fewer --graph-sizes, or auto, may be faster" if memory.graphs_bytes else ""
            graphs = f" in graphs of {len(planner.sizes)} sizes" if fewer and kind == "NPU" else ""
            yield (
                f"the {kind} holds {limit / 2**30:.2f} GiB of weights at most, the best cuts want "
                f"{nbytes / 2**30:.2f} GiB{graphs}: that limits the cuts{fewer if graphs else ''}"
            )


def _with_one_non_matmul_device(
    planner: Planner, objective: Objective, solutions: list[Solution]
) -> list[Solution]:
    """Return all lengths of a phase with one device for non-matmul ops, the best together."""
    prefill = [s for s in solutions if s.scenario.phase == "prefill"]
    kinds = _able(planner, prefill)
    if len({s.non_matmul.device for s in prefill}) < 2:
        return solutions
    tried = [
        [planner.solve(s.scenario, objective, non_matmul_device=k) for s in prefill] for k in kinds
    ]
    best = min(tried, key=lambda group: sum(s.path.cost for s in group))
    return [*best, *(s for s in solutions if s.scenario.phase == "decode")]


def _able(planner: Planner, solutions: Sequence[Solution]) -> list[DeviceKind]:
    """Return the devices of non-matmul ops that some solutions have, and all could have."""
    return [
        kind
        for kind in sorted({s.non_matmul.device for s in solutions})
        if all(kind in planner.non_matmul_devices(s.scenario.m) for s in solutions)
    ]


def agree(planner: Planner, solutions: Sequence[Solution], objective: Objective) -> list[Solution]:
    """Return the same options with one, the better, device for the other operators of a phase."""
    agreed: list[Solution] = []
    for phase in PHASES:
        members = [s for s in solutions if s.scenario.phase == phase]
        kinds = _able(planner, members)
        tried = [
            [
                planner.evaluate(s.scenario, s.options, k, objective, heads=planner.heads)
                for s in members
            ]
            for k in kinds
        ]
        agreed += min(tried, key=lambda group: sum(s.path.cost for s in group)) if kinds else []
    return agreed


def cuts_of(planner: Planner, solutions: Iterable[Solution]) -> dict[OpName, tuple[int, ...]]:
    """Return where the rows of each matmul are cut in some solution."""
    cuts: dict[OpName, set[int]] = {}
    for solution in solutions:
        for name, option in solution.options.items():
            cuts.setdefault(name, set()).update(option.row_cuts)
    return {
        name: tuple(sorted(r for r in rows if 0 < r < planner.shape(name)[0]))
        for name, rows in cuts.items()
    }
