"""From solved scenarios to an `ExecutionPlan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from hetero.backends.protocol import DeviceKind
from hetero.profiler.records import DeviceProfile
from hetero.solver.candidates import explain
from hetero.solver.curves import front, strategy_curves
from hetero.solver.memory import held_by_op, weight_memory
from hetero.solver.model_spec import ModelSpec
from hetero.solver.options import Option
from hetero.solver.place import tiles_of
from hetero.solver.plan import (
    ExecutionPlan,
    NamedStrategy,
    OpName,
    OpPlan,
    Residency,
    Rest,
    Total,
)
from hetero.solver.planner import Planner, Scenario, Solution
from hetero.solver.request import DEFAULT_REQUEST, PlanRequest, scenarios_of
from hetero.solver.sizing import planner_for
from hetero.solver.together import cuts_of, solve_together

Numbers: TypeAlias = Literal["predicted", "simulated"]
Clock = Callable[[], float]


def make_plan(
    spec: ModelSpec,
    profile: DeviceProfile,
    request: PlanRequest = DEFAULT_REQUEST,
    *,
    clock: Clock = time.perf_counter,
) -> ExecutionPlan:
    """Solve all lengths and decoding. Raises `PlanError` or `ProfileError`."""
    request.check()
    start_s = clock()
    planner, notes = planner_for(spec, profile, request)
    scenarios = scenarios_of(request.seq_lens)
    objective = planner.objective(*request.weights)
    planner, solutions = solve_together(planner, scenarios, objective, request, notes)
    notes += _share_notes(request, solutions)
    found = assemble(planner, solutions, request, notes)
    drawn = _drawn(planner.whole, request)
    return found.model_copy(update={"solve_s": clock() - start_s} | drawn)


def assemble(
    planner: Planner,
    solutions: Sequence[Solution],
    request: PlanRequest,
    notes: Sequence[str] = (),
    *,
    strategy: NamedStrategy = "auto",
) -> ExecutionPlan:
    """The document of these solutions."""
    spec, profile = planner.spec, planner.profile
    memory = weight_memory(planner, solutions)
    candidates, pipe = request.explain and strategy == "auto", strategy == "pipe"
    return ExecutionPlan(
        model=spec.name,
        strategy=strategy,
        step_tokens=planner.step_tokens,
        profile=profile.name,
        objective=request.objective,
        ops=tuple(entries(planner, solutions, with_candidates=candidates, pipe=pipe)),
        rest=rest_of(solutions),
        totals=tuple(total(planner, s) for s in solutions),
        graph_sizes=planner.sizes,
        memory_bytes=memory.total_bytes,
        memory=memory.model_copy(update={"budget_bytes": request.memory_budget_bytes}),
        residency=residency_of(planner, solutions),
        numbers=numbers_of(profile),
        precision=request.precision,
        weight_format=spec.weight_format,
        layers=spec.layers,
        max_gpu_share=request.max_gpu_share,
        margin=request.margin,
        profile_fingerprint=profile.fingerprint,
        model_fingerprint=planner.model_fingerprint,
        notes=tuple(notes),
    )


def _drawn(planner: Planner, request: PlanRequest) -> dict[str, object]:
    """What only a report needs."""
    if not request.curves:
        return {}
    scenarios = scenarios_of(request.seq_lens)
    found: dict[str, object] = {"curves": strategy_curves(planner, request.seq_lens)}
    if planner.power is not None:
        found["front"] = front(planner, scenarios)
    return found


def residency_of(planner: Planner, solutions: Iterable[Solution]) -> dict[OpName, Residency]:
    """Row cuts and the rows on each device, by matmul."""
    solutions = list(solutions)
    cuts = cuts_of(planner, solutions)
    return {
        name: Residency(
            cuts=cuts[name],
            npu_rows=held.npu,
            gpu_from=held.gpu,
        )
        for name, held in held_by_op(planner, solutions).items()
    }


def entries(
    planner: Planner,
    solutions: Iterable[Solution],
    *,
    with_candidates: bool = True,
    pipe: bool = False,
) -> Iterable[OpPlan]:
    """The plan's entries: one for each matmul and scenario; the output head once per phase."""
    heads: set[str] = set()
    for solution in solutions:
        scenario = solution.scenario
        for name, option in solution.options.items():
            if name == "lm_head" and scenario.phase in heads:
                continue
            heads.update([scenario.phase] if name == "lm_head" else [])
            yield entry(planner, scenario, name, option, with_candidates=with_candidates, pipe=pipe)


def entry(
    planner: Planner,
    scenario: Scenario,
    name: OpName,
    option: Option,
    *,
    with_candidates: bool,
    pipe: bool = False,
) -> OpPlan:
    """One matmul. The output head sees one token in either phase and holds for every length."""
    space = planner.space(name)
    head = name == "lm_head"
    m = 1 if head else scenario.m
    tiles = tiles_of(space, option, m, open_ended=head)
    energy = option.joules(planner.power) if planner.power is not None else None
    return OpPlan(
        phase=scenario.phase,
        m=None if head else m,
        op=name,
        n=space.n,
        k=space.k,
        strategy=option.strategy,
        tiles=tiles,
        predicted_s=option.seconds_alone(),
        gpu_s=option.gpu_s,
        npu_s=option.npu_s,
        energy_j=energy,
        candidates=explain(planner, name, m, option) if with_candidates else (),
        pipe=pipe,
    )


def total(planner: Planner, solution: Solution) -> Total:
    """Time of a step beside the best single device's."""
    scenario = solution.scenario
    kinds: tuple[DeviceKind, ...] = ("gpu", "npu")
    singles = {kind: s for kind in kinds if (s := planner.uncut.single(scenario, kind)) is not None}
    best = min(singles.values(), key=lambda s: s.seconds) if singles else solution
    return Total(
        phase=scenario.phase,
        m=scenario.m,
        predicted_s=solution.seconds,
        tokens_per_s=scenario.m / solution.seconds,
        best_single_device_s=best.seconds,
        single_devices={kind: s.seconds for kind, s in singles.items()},
        context=0 if scenario.phase == "prefill" else planner.settings.context,
        energy_j=solution.joules,
        best_single_device_j=best.joules,
        rest_s={
            "head": solution.rests.head.together_s,
            "attention": solution.rests.attention.together_s,
            "norm": solution.rests.norm.together_s,
            "activation": solution.rests.activation.together_s,
        },
    )


def numbers_of(profile: DeviceProfile) -> Numbers:
    """What kind of numbers a plan of this profile has."""
    simulated = any(d.numbers == "simulated" for d in profile.devices.values())
    return "simulated" if simulated else "predicted"


def rest_of(solutions: Sequence[Solution]) -> Rest:
    """The device of each phase; its scenarios agree."""
    found = {s.scenario.phase: s.rests.device for s in solutions}
    return Rest(prefill=found["prefill"], decode=found["decode"])


def _share_notes(request: PlanRequest, solutions: Sequence[Solution]) -> list[str]:
    if request.max_gpu_share >= 1:
        return []
    over = sorted(
        {
            f"{name} in {s.scenario.phase} at {s.scenario.m}"
            for s in solutions
            for name, option in s.options.items()
            if option.gpu_s > request.max_gpu_share * option.together_s * (1 + 1e-9)
        }
    )
    return (
        [f"only the GPU can compute {', '.join(over)}: its share is over the cap"] if over else []
    )
