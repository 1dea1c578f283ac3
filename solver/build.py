"""Builds an `ExecutionPlan` from solved scenarios."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DeviceProfile, Phase
from hetero.solver.candidates import Reasons
from hetero.solver.curves import front, strategy_curves
from hetero.solver.decode_bands import Band, BandRequest, decode_bands
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.in_flight import in_flight_of
from hetero.solver.joint_plan import cuts_of, memory_of, solve_jointly
from hetero.solver.names import NamedStrategy
from hetero.solver.non_matmul import seconds_by_kind
from hetero.solver.options import Option
from hetero.solver.place import tiles_of
from hetero.solver.plan import (
    PHASES,
    AttentionShare,
    DecodeBand,
    HeadCounts,
    NonMatmulDevices,
    OpPlan,
    PlannedPhase,
    Residency,
    Total,
)
from hetero.solver.planner import Planner
from hetero.solver.prompt_calls import split
from hetero.solver.prompts import Prompt, call_scenarios, prompt_alone, prompt_of, steps_alone
from hetero.solver.request import DEFAULT_REQUEST, PlanRequest, scenarios_of
from hetero.solver.sizing import planner_for
from hetero.solver.solution import Scenario, Solution, uses_third
from hetero.solver.weight_memory import limits_of, resident_by_op, weight_memory

Numbers: TypeAlias = Literal["emulated", "predicted", "simulated", "fitted"]
Clock = Callable[[], float]


def make_plan(
    spec: ModelGraph,
    profile: DeviceProfile,
    request: PlanRequest = DEFAULT_REQUEST,
    *,
    clock: Clock = time.perf_counter,
) -> ExecutionPlan:
    """Solve all lengths and decoding. Raises `PlanError` or `ProfileError`.

    Calls longer than a graph need the GPU for the operators between matmuls. Where the NPU alone is
    faster than such prompts, calls that one graph holds are tried as well.
    """
    request.check()
    start_s = clock()
    plan = _solved(spec, profile, request)
    if _longer_than_a_graph(plan) and _loses_to_npu(plan):
        shorter = replace(request, step_tokens=plan.graph_sizes[-1], graph_sizes=plan.graph_sizes)
        plan = min(plan, _solved(spec, profile, shorter), key=lambda x: _expected_s(x, request))
    return plan.model_copy(update={"solve_s": clock() - start_s})


def _longer_than_a_graph(plan: ExecutionPlan) -> bool:
    sizes, longest = plan.graph_sizes, plan.step_tokens
    return bool(sizes) and longest is not None and longest > sizes[-1]


def _loses_to_npu(plan: ExecutionPlan) -> bool:
    """Return whether the NPU alone is faster than some prompt of a plan."""
    prompts = [total for total in plan.totals if total.phase == "prefill"]
    return any(x.single_devices.get("npu", math.inf) < x.predicted_s for x in prompts)


def _expected_s(plan: ExecutionPlan, request: PlanRequest) -> float:
    """Return seconds of the request's prompts, as often as each comes."""
    prompts = {total.m: total.predicted_s for total in plan.totals if total.phase == "prefill"}
    return sum(request.distribution[m] * prompts[m] for m in request.seq_lens)


def _solved(spec: ModelGraph, profile: DeviceProfile, request: PlanRequest) -> ExecutionPlan:
    planner, notes = planner_for(spec, profile, request)
    calls = request.in_calls(planner.step_tokens)
    objective = planner.objective(*request.weights)
    planner, solutions = solve_jointly(
        planner, scenarios_of(calls.seq_lens), objective, calls, notes
    )
    notes += _share_notes(request, solutions)
    plan = assemble(planner, solutions, request, notes)
    flights = in_flight_of(planner, solutions, request)
    update = {"in_flight": flights, "bands": _bands_of(planner, solutions, request)}
    return plan.model_copy(update=update | _drawn(planner.whole, request))


def assemble(
    planner: Planner,
    solutions: Sequence[Solution],
    request: PlanRequest,
    notes: Sequence[str] = (),
    *,
    strategy: NamedStrategy = "auto",
    longest: int | None = None,
    decoder: Planner | None = None,
) -> ExecutionPlan:
    """Return the document of solutions for the request's prompts.

    They run in calls of at most `longest` tokens (None: of the planner's). A `decoder` of its own
    decodes, and has the output head.
    """
    spec, profile = planner.spec, planner.profile
    decoder = decoder or planner
    separate = decoder is not planner
    prompts = [s for s in solutions if s.scenario.phase == "prefill"]
    others = [s for s in solutions if s.scenario.phase == "decode"]
    memory = (
        memory_of([(planner, prompts), (decoder, others)])
        if separate
        else weight_memory(planner, solutions)
    )
    explains = request.explain and strategy == "auto"
    reasons = Reasons(budget=request.memory_budget_bytes is not None) if explains else None
    limit = longest or planner.step_tokens
    totals = totals_of(planner, solutions, request.seq_lens, limit, decoder)
    return ExecutionPlan(
        model=spec.name,
        strategy=strategy,
        step_tokens=max(s.scenario.m for s in solutions if s.scenario.phase == "prefill"),
        profile=profile.name,
        objective=request.objective,
        ops=tuple(
            entries(planner, solutions, reasons=reasons, pipe=strategy == "pipe", decoder=decoder)
        ),
        non_matmul=non_matmul_devices_of(solutions),
        totals=totals,
        phases=planned_phases(totals),
        graph_sizes=planner.sizes,
        memory_bytes=memory.total_bytes,
        memory=memory.model_copy(update={"budget_bytes": request.memory_budget_bytes}),
        residency=residency_of(planner, solutions),
        numbers=numbers_of(profile),
        precision=request.precision,
        weight_format=spec.base or spec.weight_format,
        layers=spec.layers,
        counts=layer_counts(spec),
        prompt_layers=spec.prompt_layers if spec.prompt_layers < spec.layers else None,
        max_gpu_share=request.max_gpu_share,
        margin=request.margin,
        profile_fingerprint=profile.fingerprint,
        model_fingerprint=planner.model_fingerprint,
        errors=errors_of(profile, spec.base or spec.weight_format, solutions),
        notes=(*notes, *planner.notes),
        attention=attention_of(planner, solutions),
        **_experts_of(planner),
    )


def _experts_of(planner: Planner) -> dict[str, Any]:
    """Return the fields of routed experts."""
    choice = planner.experts
    if choice is None or not choice.npu:
        return {}
    return {"npu_experts": choice.npu} if choice.device is None else {"experts": choice.device}


def _bands_of(
    planner: Planner, solutions: Sequence[Solution], request: PlanRequest
) -> tuple[DecodeBand, ...]:
    """Return decode's bands with the row cuts of a plan, where the request asks for them."""
    asked = band_request(planner, request, request.longest)
    if asked is None:
        return ()
    decoding = next(s for s in solutions if s.scenario.phase == "decode")
    limited = planner.with_rows(cuts_of(planner, solutions))
    resident = resident_by_op(planner, solutions)
    bands = decode_bands(limited, decoding, resident, asked)
    return tuple(band_of(limited, band) for band in bands)


def band_request(
    planner: Planner, request: PlanRequest, longest: int | None, *, apart: bool = False
) -> BandRequest | None:
    """Return what bounds decode's bands in contexts of so many tokens; None where there are none.

    Bands are for the least time with both devices free to use.
    """
    if longest is None or request.objective == "energy" or request.max_gpu_share < 1:
        return None
    spec = planner.spec
    errors = errors_of(planner.profile, spec.base or spec.weight_format)
    tolerance = max(request.margin, errors.get("decode", 0.0))
    limits = limits_of(planner.profile, request.memory_budget_bytes)
    return BandRequest(longest=longest, tolerance=tolerance, limits=limits, apart=apart)


def band_of(planner: Planner, band: Band) -> DecodeBand:
    """Return the entries of a band; the output head has the plan's own."""
    solution = band.solution
    blocks = (name for name in solution.options if name not in planner.spec.sampled)
    scenario = Scenario("decode", 1)
    return DecodeBand(
        depth_from=band.depth,
        device=solution.non_matmul.device,
        devices=tuple(sorted(solution.devices)),
        predicted_s=solution.seconds,
        before_s=band.before_s,
        more_bytes=band.more_bytes,
        ops=tuple(entry(planner, scenario, x, solution.options[x]) for x in blocks),
    )


def planned_phases(totals: Sequence[Total]) -> tuple[PlannedPhase, ...]:
    """Return the devices of each phase that has totals."""
    phases = []
    for phase in PHASES:
        if own := [x for x in totals if x.phase == phase]:
            kinds = tuple(sorted({kind for total in own for kind in total.devices}))
            seconds = max(own, key=lambda x: x.m).predicted_s
            phases.append(PlannedPhase(phase=phase, devices=kinds, predicted_s=seconds))
    return tuple(phases)


def layer_counts(spec: ModelGraph) -> dict[OpName, int]:
    """Return how many layers have each matmul, where these differ; nothing where all do."""
    if len(spec.kinds) == 1:
        return {}
    return {stage.name: block.layers for block in spec.kinds for stage in block.stages}


def attention_of(planner: Planner, solutions: Iterable[Solution]) -> tuple[AttentionShare, ...]:
    """Return which device has which heads of attention in each prompt's call.

    Nothing where no call shares them.
    """
    calls = [s for s in solutions if s.scenario.phase == "prefill"]
    if not any(s.heads for s in calls):
        return ()
    return tuple(share_of(planner, s) for s in calls)


def share_of(planner: Planner, call: Solution) -> AttentionShare:
    """Return the heads of one call's attention."""
    every, chosen = planner.spec.kv_heads, call.attention
    gpu = every - call.heads if call.non_matmul.device == "gpu" else 0
    return AttentionShare(
        phase="prefill",
        m=call.scenario.m,
        heads=HeadCounts(gpu=gpu, npu=every - gpu),
        predicted_s=chosen.elapsed_s if chosen is not None else None,
        gpu_s=chosen.gpu_s if chosen is not None else None,
        npu_s=chosen.npu_s if chosen is not None else None,
    )


def errors_of(
    profile: DeviceProfile, weight_format: WeightFormat, solutions: Iterable[Solution] = ()
) -> dict[Phase, float]:
    """Return by phase the mean relative error of the device that is predicted worst.

    A CPU is one of them where the solutions use it.
    """
    third = any(map(uses_third, solutions))
    errors: dict[Phase, float] = {}
    for predictor in profile.predictors:
        if predictor.weight_format is weight_format and (third or predictor.device in KINDS):
            for entry in predictor.validation:
                errors[entry.phase] = max(errors.get(entry.phase, 0.0), entry.mape)
    return errors


def _drawn(planner: Planner, request: PlanRequest) -> dict[str, object]:
    """Return what only a report needs."""
    if not request.curves:
        return {}
    scenarios = scenarios_of(request.in_calls(planner.step_tokens).seq_lens)
    report: dict[str, object] = {"curves": strategy_curves(planner, request.seq_lens)}
    if planner.power is not None:
        report["front"] = front(planner, scenarios)
    return report


def residency_of(planner: Planner, solutions: Iterable[Solution]) -> dict[OpName, Residency]:
    """Return row cuts and the rows on each device, by matmul."""
    solutions = list(solutions)
    cuts = cuts_of(planner, solutions)
    return {
        name: Residency(
            cuts=cuts[name],
            npu_rows=resident.npu,
            gpu_from=resident.gpu,
            cpu_rows=resident.cpu if resident.cpu[1] else None,
        )
        for name, resident in resident_by_op(planner, solutions).items()
    }


def entries(
    planner: Planner,
    solutions: Iterable[Solution],
    *,
    reasons: Reasons | None = None,
    pipe: bool = False,
    decoder: Planner | None = None,
) -> Iterable[OpPlan]:
    """Return the plan's entries: one for each matmul and scenario.

    Those of sampled rows once per phase.
    """
    once: set[tuple[str, OpName]] = set()
    decoder = decoder or planner
    for solution in solutions:
        scenario = solution.scenario
        for name, option in solution.options.items():
            if name in solution.sampled:
                if (scenario.phase, name) in once:
                    continue
                once.add((scenario.phase, name))
            own = decoder if name in solution.sampled or scenario.phase == "decode" else planner
            planned = entry(own, scenario, name, option, pipe=pipe)
            if reasons is not None:
                others = reasons.explain(own, solution, name, planned.m or 1)
                planned = planned.model_copy(update={"candidates": others})
            yield planned


def entry(
    planner: Planner,
    scenario: Scenario,
    name: OpName,
    option: Option,
    *,
    pipe: bool = False,
) -> OpPlan:
    """Return one matmul, without what lost.

    Of sampled rows there is one, and the entry holds for every length.
    """
    space = planner.space(name)
    sampled = name in planner.spec.sampled_in(scenario.phase)
    m = 1 if sampled else scenario.m
    tiles = tiles_of(space, option, m, open_ended=sampled)
    energy = option.joules(planner.power) if planner.power is not None else None
    return OpPlan(
        phase=scenario.phase,
        m=None if sampled else m,
        op=name,
        n=space.n,
        k=space.k,
        strategy=option.strategy,
        tiles=tiles,
        predicted_s=option.seconds_alone(),
        gpu_s=option.gpu_s,
        npu_s=option.npu_s,
        cpu_s=option.cpu_s or None,
        energy_j=energy,
        pipe=pipe,
    )


def totals_of(
    planner: Planner,
    solutions: Iterable[Solution],
    prompts: Iterable[int],
    longest: int | None,
    decoder: Planner | None = None,
) -> tuple[Total, ...]:
    """Return the prompts of these lengths, rising, in calls that are solved; then decoding."""
    solved = {s.scenario: s for s in solutions}
    calls = {s.scenario.m: s for s in solved.values() if s.scenario.phase == "prefill"}
    totals = [
        _prompt_total(planner, tokens, split(tokens, (), longest or tokens), calls)
        for tokens in sorted(set(prompts))
    ]
    decode = [s for s in solved.values() if s.scenario.phase == "decode"]
    return (*totals, *(_decode_total(decoder or planner, s) for s in decode))


def _prompt_total(
    planner: Planner, tokens: int, steps: Sequence[int], solved: Mapping[int, Solution]
) -> Total:
    """Return a prompt in calls that are solved as if each came first."""
    done = prompt_of(
        planner.evaluate(scenario, known.options, known.non_matmul.device, heads=known.heads)
        for scenario in call_scenarios(steps)
        for known in [solved[scenario.m]]
    )
    singles: dict[DeviceKind, Prompt | None] = {
        kind: prompt_alone(planner.whole_rows, steps_alone(planner, tokens, kind), kind)
        for kind in KINDS
    }
    return _total(planner, done, singles).model_copy(update={"steps": done.steps})


def _decode_total(planner: Planner, solution: Solution) -> Total:
    alone = {kind: planner.whole_rows.single(solution.scenario, kind) for kind in KINDS}
    singles: dict[DeviceKind, Prompt | None] = {
        kind: s and Prompt((s,)) for kind, s in alone.items()
    }
    total = _total(planner, Prompt((solution,)), singles)
    return total.model_copy(update={"context": planner.settings.context})


def _total(planner: Planner, done: Prompt, singles: Mapping[DeviceKind, Prompt | None]) -> Total:
    """Return the time of a prompt or of a decode step, with the best single device's."""
    alone = {kind: single for kind, single in singles.items() if single is not None}
    best = min(alone.values(), key=lambda single: single.seconds, default=done)
    first, tokens = done.calls[0], sum(done.steps)
    return Total(
        phase=first.scenario.phase,
        m=tokens,
        predicted_s=done.seconds,
        tokens_per_s=tokens / done.seconds,
        best_single_device_s=best.seconds,
        single_devices={kind: single.seconds for kind, single in alone.items()},
        energy_j=done.joules,
        best_single_device_j=best.joules,
        devices=tuple(sorted(frozenset().union(*(call.devices for call in done.calls)))),
        non_matmul_s=seconds_by_kind(planner.spec, first.non_matmul),
    )


def numbers_of(profile: DeviceProfile) -> Numbers:
    """Return what kind of numbers a plan of this profile has."""
    kinds = {device.numbers for device in profile.devices.values()}
    of_chips: tuple[Numbers, ...] = ("simulated", "fitted", "emulated")
    return next((x for x in of_chips if x in kinds), "predicted")


def non_matmul_devices_of(solutions: Sequence[Solution]) -> NonMatmulDevices:
    """Return the device of each phase; its scenarios agree."""
    devices = {s.scenario.phase: s.non_matmul.device for s in solutions}
    return NonMatmulDevices(prefill=devices["prefill"], decode=devices["decode"])


def _share_notes(request: PlanRequest, solutions: Sequence[Solution]) -> list[str]:
    if request.max_gpu_share >= 1:
        return []
    over = sorted(
        {
            f"{name} in {s.scenario.phase} at {s.scenario.m}"
            for s in solutions
            for name, option in s.options.items()
            if option.gpu_s > request.max_gpu_share * option.elapsed_s * (1 + 1e-9)
        }
    )
    return (
        [f"only the GPU can compute {', '.join(over)}: its share is over the cap"] if over else []
    )
