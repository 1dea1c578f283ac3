"""From solved scenarios to an `ExecutionPlan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hetero.backends.protocol import DeviceKind
from hetero.profiler.records import DeviceProfile
from hetero.solver import graph_sizes as sizes_module
from hetero.solver import residency
from hetero.solver.candidates import explain
from hetero.solver.chooser import Rules
from hetero.solver.curves import front, strategy_curves
from hetero.solver.cuts import row_cuts
from hetero.solver.kernels import Precision
from hetero.solver.memory import held_by_op, weight_memory
from hetero.solver.model_spec import ModelSpec
from hetero.solver.options import Objective, Option
from hetero.solver.place import tiles_of
from hetero.solver.plan import (
    PHASES,
    ExecutionPlan,
    NamedStrategy,
    OpName,
    OpPlan,
    PlanError,
    Residency,
    Rest,
    Total,
)
from hetero.solver.planner import Planner, Scenario, Settings, Solution, with_graph_sizes

Numbers: TypeAlias = Literal["predicted", "simulated"]
GraphSizes: TypeAlias = Sequence[int] | Literal["auto"] | None
DEFAULT_LENGTHS = (64, 256, 1024)
DECODE = Scenario("decode", 1)
Clock = Callable[[], float]


@dataclass(frozen=True)
class PlanRequest:
    """What `hetero plan` asks for; see INTERFACES for the meaning of each.

    `shared`: both devices work in every prompt (`Rules`); a memory budget comes first.
    `decode_tokens_per_prompt` weighs decoding against prompts where both share a memory budget;
    `curves` adds what a report draws: times by length and the latency-energy front.
    """

    seq_lens: tuple[int, ...] = DEFAULT_LENGTHS
    graph_sizes: GraphSizes = None
    objective: Literal["latency", "energy"] = "latency"
    precision: Precision = "auto"
    max_gpu_share: float = 1.0
    shared: bool = False
    memory_budget_bytes: int | None = None
    preparation_budget_s: float | None = None
    context: int = 256
    margin: float = 0.03
    decode_tokens_per_prompt: int = 64
    explain: bool = True
    curves: bool = False

    @property
    def weights(self) -> tuple[float, float]:
        """Of seconds and of joules in the objective."""
        return (0.0, 1.0) if self.objective == "energy" else (1.0, 0.0)

    def check(self) -> None:
        """Raises `PlanError` for a value that means nothing."""
        if not self.seq_lens or min(self.seq_lens) < 1:
            raise PlanError(
                f"prompt lengths are token counts from 1 on, got {list(self.seq_lens)}: give "
                "--seq-lens such as 64,256,1024"
            )
        if not 0 <= self.max_gpu_share <= 1:
            raise PlanError(f"--max-gpu-share is between 0 and 1, got {self.max_gpu_share:g}")
        if not 0 <= self.margin < 1:
            raise PlanError(f"the margin is a fraction from 0 to 1, got {self.margin:g}")
        if self.context < 0:
            raise PlanError(f"--context is a number of tokens, got {self.context}")


def make_plan(
    spec: ModelSpec,
    profile: DeviceProfile,
    request: PlanRequest = PlanRequest(),
    *,
    clock: Clock = time.perf_counter,
) -> ExecutionPlan:
    """Solve all lengths and decoding. Raises `PlanError` or `ProfileError`."""
    request.check()
    start_s = clock()
    planner, notes = prepare(spec, profile, request)
    scenarios = scenarios_of(request.seq_lens)
    objective = planner.objective(*request.weights)
    planner, solutions = solve_together(planner, scenarios, objective, request, notes)
    notes += _share_notes(request, solutions)
    found = assemble(planner, solutions, request, notes)
    drawn = _drawn(planner.whole, request)
    return found.model_copy(update={"solve_s": clock() - start_s} | drawn)


def scenarios_of(lengths: Iterable[int]) -> list[Scenario]:
    """Prompts of these lengths, each once and rising, and decoding."""
    return [*(Scenario("prefill", m) for m in sorted(set(lengths))), DECODE]


def solve_together(
    planner: Planner,
    scenarios: Sequence[Scenario],
    objective: Objective,
    request: PlanRequest,
    notes: list[str],
) -> tuple[Planner, list[Solution]]:
    """`solve_within`, with the row cuts that serve all scenarios best where each has a price.

    The planner returned has the cuts that are used, so that its costs are those of the plan. Under
    a memory budget that binds all rows are free again: which of them fit comes first.
    """
    if planner.sizes:
        free = replace(request, memory_budget_bytes=None)
        limited, solutions = _with_own_cuts(planner, scenarios, objective, free, notes)
        budget = request.memory_budget_bytes
        if budget is None or weight_memory(limited, solutions).total_bytes <= budget:
            return limited, solutions
    return planner, solve_within(planner, scenarios, objective, request, notes)


def _with_own_cuts(
    planner: Planner,
    scenarios: Sequence[Scenario],
    objective: Objective,
    request: PlanRequest,
    notes: list[str],
) -> tuple[Planner, list[Solution]]:
    """With few row cuts for all scenarios (`cuts.py`), and of these only those that are used."""
    count = len(scenarios)
    cuts = {x: row_cuts(planner, x, scenarios, objective, count) for x in planner.names()}
    return with_used_cuts(
        planner,
        cuts,
        lambda limited: solve_within(limited, scenarios, objective, request, notes),
    )


def with_used_cuts(
    planner: Planner,
    cuts: dict[OpName, tuple[int, ...]],
    solve: Callable[[Planner], list[Solution]],
) -> tuple[Planner, list[Solution]]:
    """Fewer and fewer row cuts until the solutions use all that are left: the planner that has
    those, and its solutions.
    """
    while True:
        limited = planner.with_rows(cuts)
        solutions = solve(limited)
        found = cuts_of(planner, solutions)
        used = {name: found.get(name, ()) for name in cuts}
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
    """The best solutions that one plan can have: one device for the other operators of a phase,
    weights within the memory budget.
    """
    solutions = _one_rest(planner, objective, [planner.solve(s, objective) for s in scenarios])
    budget = request.memory_budget_bytes
    if budget is not None and weight_memory(planner, solutions).total_bytes > budget:
        solutions = agree(
            planner, residency.solve(planner, scenarios, objective, budget, request), objective
        )
        notes.append("the memory budget limits the cuts")
    return solutions


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


def cuts_of(planner: Planner, solutions: Iterable[Solution]) -> dict[OpName, tuple[int, ...]]:
    """Where the rows of each matmul are cut in some solution."""
    found: dict[OpName, set[int]] = {}
    for solution in solutions:
        for name, option in solution.options.items():
            found.setdefault(name, set()).add(option.rows)
    return {
        name: tuple(sorted(r for r in rows if 0 < r < planner.shape(name)[0]))
        for name, rows in found.items()
    }


def prepare(
    spec: ModelSpec, profile: DeviceProfile, request: PlanRequest, *, apart: bool = True
) -> tuple[Planner, list[str]]:
    """A planner with the graph sizes that were asked for, and what to say about it."""
    rules = Rules(request.margin, request.max_gpu_share, request.shared)
    settings = Settings(request.precision, rules, request.context, apart)
    notes: list[str] = []
    if request.graph_sizes == "auto":
        chosen = sizes_module.choose(
            Planner(spec, profile, settings),
            dict.fromkeys(request.seq_lens, 1.0),
            preparation_budget_s=request.preparation_budget_s,
        )
        profile = with_graph_sizes(profile, chosen.sizes)
        notes.append(f"graph sizes chosen for these lengths: {chosen.describe()}")
    elif request.graph_sizes is not None:
        sizes = {*request.graph_sizes}
        if 1 in _graphs(profile):
            sizes.add(1)  # decoding keeps its graph
        profile = with_graph_sizes(profile, sizes)
    return Planner(spec, profile, settings), notes


def _graphs(profile: DeviceProfile) -> tuple[int, ...]:
    npu = profile.devices.get("npu")
    return npu.capabilities.graph_sizes if npu is not None else ()


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
        predicted_s=option.seconds(),
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


def _one_rest(planner: Planner, objective: Objective, solutions: list[Solution]) -> list[Solution]:
    """All lengths of a phase with one device for the rest, as a plan has it: the best together."""
    prefill = [s for s in solutions if s.scenario.phase == "prefill"]
    kinds = sorted({s.rests.device for s in prefill})
    if len(kinds) < 2:
        return solutions
    tried = [[planner.solve(s.scenario, objective, rest=k) for s in prefill] for k in kinds]
    best = min(tried, key=lambda found: sum(s.chain.cost for s in found))
    return [*best, *(s for s in solutions if s.scenario.phase == "decode")]


def agree(planner: Planner, solutions: Sequence[Solution], objective: Objective) -> list[Solution]:
    """The same options with one device for the other operators of each phase, the better one."""
    found: list[Solution] = []
    for phase in PHASES:
        members = [s for s in solutions if s.scenario.phase == phase]
        kinds = sorted({s.rests.device for s in members})
        tried = [
            [planner.evaluate(s.scenario, s.options, k, objective) for s in members] for k in kinds
        ]
        found += min(tried, key=lambda group: sum(s.chain.cost for s in group)) if kinds else []
    return found


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
