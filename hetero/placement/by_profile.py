"""Chooses devices and their plan by the times of a profile, where no earlier decision is cached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from hetero.backends.host.affinity import core_count
from hetero.backends.opencl import driver_here, driver_of, every_core_count
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.backends.registry import EVERY_CORE, split_driver
from hetero.placement.choice import (
    ONE_CORE,
    Choice,
    PlacementRequest,
    by_rule,
    mode_of,
    shares_one_core,
)
from hetero.placement.comparing import (
    ANSWER_TOKENS,
    MARGIN,
    OPENING_S,
    DeviceSets,
    PhaseSeconds,
    Price,
    PromptMix,
    compare,
    fastest,
    times_alone,
    total_s,
)
from hetero.placement.device_set import DRIVEN
from hetero.placement.device_times import DeviceTimes
from hetero.placement.first_start import scaled_here
from hetero.placement.phase_choice import TENSOR_LEVEL, described, kind_of
from hetero.placement.planning import ProfileLike, locate_profile
from hetero.placement.where_fastest import error_of
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.profiler.substitutes import file_substitution
from hetero.runtime.launch_costs import check_priced
from hetero.runtime.prefill_mode import capabilities_of, with_modes
from hetero.solver.build import make_plan
from hetero.solver.copies import least_gain
from hetero.solver.decode_bands import LONGEST, cache_bytes
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.expert_choice import model_bytes
from hetero.solver.non_matmul_devices import of_the_gpu
from hetero.solver.placement import Placement
from hetero.solver.plan import PHASES, Phase
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.prepared_three import PreparedThree
from hetero.solver.report.units import duration
from hetero.solver.request import MAX_LENGTHS_AUTO, PlanRequest
from hetero.solver.sizing import planner_for
from hetero.solver.strategy_plans import strategy_plan
from hetero.solver.weight_memory import limits_of

LONG: Final = 1024  # tokens of a prompt by which forms of calls in flight are judged
SHORT_PROMPTS: Final = (2, 5, 12, 24)  # that both devices must share as well, for `hetero`


def chosen(spec: ModelGraph, request: PlacementRequest) -> Choice:
    """Return the choice by the profile of a request. Raises `UserError` where there is none."""
    profile, notice = _find_profile(request)
    choice = by_profile(spec, profile, request)
    if choice.plan is not None and (_chooses_sizes(profile, request) or request.compiles_graphs):
        choice = replace(choice, graph_sizes=choice.plan.graph_sizes)
    notes = (*([notice] if notice else []), *choice.notes)
    given = None if request.profile is None else profile
    return replace(choice, notes=notes, cost=CostModel(profile), profile=given)


def cost_of(spec: ModelGraph, plan: ExecutionPlan, profile: ProfileLike) -> CostModel:
    """Return a profile's costs for a plan that was given. Raises `ProfileError`."""
    located, _ = locate_profile(profile)
    cost = CostModel(located)
    check_priced(cost, spec, plan)
    return cost


def by_profile(spec: ModelGraph, profile: DeviceProfile, request: PlacementRequest) -> Choice:
    """Return the choice that the times of a profile lead to."""
    plan_request = PlanRequest(
        seq_lens=_lengths(profile, request),
        graph_sizes="auto" if _chooses_sizes(profile, request) else None,
        step_tokens=request.step_tokens,
        explain=False,
        max_gpu_share=request.max_gpu_share,
        memory_budget_bytes=request.weight_budget_bytes,
        routing=request.routing,
        shared=request.strategy == "auto" and request.promises_both,
    )
    if request.strategy != "auto":
        if request.weight_budget_bytes is None:  # compared in the calls that the graphs hold
            plan_request = replace(plan_request, step_tokens=None)
        plan = strategy_plan(spec, profile, request.strategy, plan_request.seq_lens, plan_request)
        reason = f"strategy {request.strategy}, as asked for (profile {profile.name})"
        return Choice(mode_of(plan), plan, reason=reason)
    solver = prepare_solver(spec, profile, plan_request)
    fallback = (min(LONG, request.context or LONG),)
    lengths = tuple(request.seq_lens) or tuple(request.expected) or fallback
    solver.plan = with_modes(solver.plan, spec, CostModel(profile), solver, lengths=lengths)
    if request.mode == "auto":
        choice = _fastest(Planner(spec, profile), solver, request)
        return _with_third(choice, spec, profile, request, plan_request)
    solver = solver.with_bands(_longest_context(spec, request))
    if request.promises_both and not _shares_every_prompt(solver, spec, profile):
        why = f"by profile {profile.name} no plan has both devices in every prompt"
        return by_rule(request, why)  # at least layer level, as `hetero` promises
    prompts, answers = solver.formats
    formats = f", prompts in {prompts}, answers in {answers}" if spec.also else ""
    reason = f"hetero: {TENSOR_LEVEL}{formats} (profile {profile.name}){_moving(solver.plan)}"
    choice = Choice("hetero", solver.plan, solver=solver, reason=reason)
    return _with_third(choice, spec, profile, request, plan_request)


def _with_third(
    choice: Choice,
    spec: ModelGraph,
    profile: DeviceProfile,
    request: PlacementRequest,
    plan_request: PlanRequest,
) -> Choice:
    """Return the choice with a plan for three devices, where that gains.

    Where both devices compute each phase together, and a CPU was measured that can be opened here,
    prompts are planned for all three at the lengths that the plan for two lists.
    """
    two, name, record = choice.plan, request.third_backend, profile.devices.get("cpu")
    named = name is not None and record is not None and record.backend == name
    if two is None or not named or two.apart or spec.also:
        return choice
    third_request = replace(plan_request, third=True, graph_sizes=two.graph_sizes or None)
    three = make_plan(spec, profile, third_request)
    both_s, all_s = seconds_of(two), seconds_of(three)
    gains = all_s.prompts_s < (1 - MARGIN) * both_s.prompts_s and all_s.total_s <= both_s.total_s
    if "cpu" not in three.devices() or not gains:
        return choice
    gain = both_s.prompts_s / all_s.prompts_s
    reason = f"{choice.reason}; prompts with rows on the cpu, {gain:.2f} x both devices"
    planner, _ = planner_for(spec, profile, third_request)
    solver = PreparedThree(planner, three)
    return replace(choice, third=solver.plan, third_solver=solver, cpu=name, reason=reason)


def seconds_of(plan: ExecutionPlan) -> PhaseSeconds:
    """Return the predicted seconds of a plan's prompts, and of an answer to each."""
    decode_s = min(x.predicted_s for x in plan.totals if x.phase == "decode")
    prompts = [x for x in plan.totals if x.phase == "prefill"]
    prompts_s = sum(min([x.predicted_s, *x.modes.values()]) for x in prompts)
    return PhaseSeconds(prompts_s, len(prompts) * ANSWER_TOKENS * decode_s)


def _chooses_sizes(profile: DeviceProfile, request: PlacementRequest) -> bool:
    """Return whether graph sizes are chosen for the prompts.

    They are where each has something of its own to prepare and to hold, unless so many lengths were
    asked for that it would take minutes. A named strategy has those of the profile.
    """
    npu = profile.devices.get("npu")
    own = npu is not None and npu.capabilities.per_graph_size != "nothing"
    few = len(set(request.seq_lens)) <= MAX_LENGTHS_AUTO
    return own and few and request.strategy == "auto"


def _lengths(profile: DeviceProfile, request: PlacementRequest) -> tuple[int, ...]:
    """Return the prompt lengths to plan for: as asked, else some that stand for all."""
    if request.seq_lens:
        return tuple(request.seq_lens)
    npu = profile.devices.get("npu")
    sizes = npu.capabilities.graph_sizes if npu is not None else ()
    lengths = spread_lengths(sizes, request.step_tokens)
    if not _chooses_sizes(profile, request):
        return lengths
    return lengths[:: -(-len(lengths) // MAX_LENGTHS_AUTO)]


def _fastest(planner: Planner, solver: PreparedSolver, request: PlacementRequest) -> Choice:
    """Return what computes prompts and answers, each by what is predicted to be fastest.

    That is a plan for both devices, or one alone where that is as fast: the GPU, the NPU, or on a
    PC the GPU with the NPU's core and all others.
    """
    kinds = KINDS if request.max_gpu_share >= 1 else ("npu",)
    every_core = request.gpu == "auto" and "gpu" in kinds
    cores = every_core_count() if every_core else 0
    work = PromptMix.of(request.seq_lens or request.expected, request.context)
    seconds = compare(planner, solver, work, kinds=(*kinds, EVERY_CORE), cores=cores)
    alone = {name: s for name, s in seconds.items() if name != TENSOR_LEVEL}
    one_core = bool(alone) and shares_one_core(request)
    seconds = alone if one_core else seconds
    derived = file_substitution(planner.profile, planner.spec.weight_format) is not None
    prices = _Prices(planner, solver, work, request.weight_budget_bytes, one_core=one_core)
    opening_s = OPENING_S * len(work.prompts)
    sets = fastest(seconds, derived=derived, price_of=prices.of, opening_s=opening_s)
    totals = {name: s.total_s for name, s in seconds.items()}
    totals[str(sets)] = total_s(sets, seconds)
    times = ", ".join(f"{name} {duration(s)}" for name, s in totals.items())
    phases = sets.phases(seconds)
    chosen = f"{sets} alone" if sets.same else described(phases)
    chosen = TENSOR_LEVEL if sets.same and sets.prompts == TENSOR_LEVEL else chosen
    reason = f"auto: {chosen}, predicted for {work}: {times} (profile {planner.profile.name})"
    if one_core:
        reason += f"; {ONE_CORE}"
    notes: tuple[str, ...] = ()
    if every_core and cores == 0 and planner.profile.every_core:
        reason += f"; {EVERY_CORE} needs a process in which OpenCL does not run yet"
        possible = compare(planner, solver, work, kinds=(EVERY_CORE,), cores=core_count())
        if EVERY_CORE in possible and possible[EVERY_CORE].total_s < totals[str(sets)]:
            notes = (
                f"{EVERY_CORE} would be faster ({duration(possible[EVERY_CORE].total_s)}), but "
                "OpenCL runs in this process already: open this model first, or in a process of "
                "its own",
            )
    both = _solver_of(sets, planner, solver)
    if both is not None:
        both = both.with_bands(_longest_context(planner.spec, request))
        reason += _moving(both.plan)
    return Choice(
        "hetero" if both is not None else kind_of(sets.prompts),
        both.plan if both is not None else None,
        gpu=EVERY_CORE if EVERY_CORE in sets else None,
        reason=reason,
        notes=notes,
        solver=both,
        seconds=totals,
        phases=phases,
        alone=() if both is not None else _alone(planner, solver, request, alone, sets, cores),
    )


def _alone(
    planner: Planner,
    solver: PreparedSolver,
    request: PlacementRequest,
    alone: Mapping[str, PhaseSeconds],
    sets: DeviceSets,
    cores: int,
) -> tuple[DeviceTimes, ...]:
    """Return the times of the single device that was chosen, and of the next best one.

    None where there is no other, or all cores of this processor compute: nothing would be compared.
    """
    others = {name: x.total_s for name, x in alone.items() if name != sets.prompts}
    if not others or sets.prompts == EVERY_CORE:
        return ()
    longest = _longest_context(planner.spec, request)
    listed = [m for m in _lengths(planner.profile, request) if m < longest]
    few = listed[:: -(-len(listed) // MAX_LENGTHS_AUTO) or 1]
    lengths = (*few, max(longest - ANSWER_TOKENS, 1))

    def times(name: str) -> DeviceTimes:
        errors = [error_of(planner.profile, kind_of(name), x, planner.spec) or 0.0 for x in PHASES]
        known, worst = alone[name], max(errors)
        return times_alone(planner, solver, name, known, lengths, cores=cores, error=worst)

    return times(sets.prompts), times(min(others, key=others.__getitem__))


def _longest_context(spec: ModelGraph, request: PlacementRequest) -> int:
    return request.context or min(spec.max_position, LONGEST)


def _moving(plan: ExecutionPlan) -> str:
    """Return what a reason says of the depths at which decoding moves."""
    return "".join(
        f"; from {x.depth_from} tokens on, answers on the {' and '.join(x.devices)}"
        + (f" with attention on the {x.device}" if len(x.devices) > 1 else "")
        for x in plan.bands
    )


def _solver_of(sets: DeviceSets, planner: Planner, solver: PreparedSolver) -> PreparedSolver | None:
    """Return the solver for what computes each phase; None where one device computes all."""
    if sets.same:
        return solver if sets.prompts == TENSOR_LEVEL else None
    if all(solver.plan.devices_of(phase) == {kind} for phase, kind in sets.kinds.items()):
        return solver  # it has found so itself
    factors: dict[tuple[DeviceKind, Phase], float] = {}
    if EVERY_CORE in sets:
        stored = planner.spec.weight_format
        gains = [x for x in planner.profile.every_core if x.weight_format == stored]
        factors = {("gpu", x.phase): 1 / x.speedup for x in gains}
    return solver.alone_in(sets.kinds, factors)


@dataclass(frozen=True)
class _Prices:
    """The costs of device sets that differ between the phases, by what one engine can have."""

    planner: Planner
    solver: PreparedSolver
    work: PromptMix
    budget_bytes: int | None
    one_core: bool

    def of(self, sets: DeviceSets) -> Price:
        """Return the price of sets.

        Weights that both devices hold are paid for by the gain, and the memory budget bounds them.
        """
        spec = self.planner.spec
        if self.one_core or not _fit_one_engine(sets) or len(set(self.solver.formats)) > 1:
            return Price(math.inf)
        if "npu" in sets and any(of_the_gpu(node.op) for node in spec.nodes):
            return Price(math.inf)  # an open GPU takes these from the NPU
        if self.solver.plan.expert_devices:
            return Price(math.inf)  # of both phases
        memory = self.solver.memory_in(sets.kinds)
        limits = limits_of(self.planner.profile, self.budget_bytes)
        gain = least_gain(memory, model_bytes(spec), limits)
        return Price(gain, self._handover_s(sets))

    def _handover_s(self, sets: DeviceSets) -> float:
        """Return the seconds of copying the prompts' keys and values to the answers' device.

        0 where memory is unified, or attention stays where it is.
        """
        shared = self.solver.plan.non_matmul
        attends = {"prefill": shared.prefill, "decode": shared.decode, **sets.kinds}
        if attends["prefill"] == attends["decode"]:
            return 0.0
        token_bytes = cache_bytes(self.planner.spec)
        return sum(self.planner.overheads.copy(m * token_bytes) for m in self.work.prompts)


def _fit_one_engine(sets: DeviceSets) -> bool:
    """Return whether one process can open what computes each phase.

    The number of OpenCL's cores is fixed in a process: with all of them, the NPU computes only
    while OpenCL does not.
    """
    return EVERY_CORE not in sets or set(sets) == {EVERY_CORE, "npu"}


def _shares_every_prompt(solver: PreparedSolver, spec: ModelGraph, profile: DeviceProfile) -> bool:
    """Return whether both devices work in prompts of every length, as `hetero` promises.

    Each works in one call at least, since a last call of a token or two is not worth two devices.
    """
    able = capabilities_of(solver.plan, profile)
    placement = Placement(solver.plan, spec, able, source=solver)
    prompts = [total.steps for total in placement.plan.totals if total.phase == "prefill"]
    prompts += [(m,) for m in SHORT_PROMPTS]
    return all(len(frozenset().union(*map(placement.working, steps))) == 2 for steps in prompts)


def _find_profile(request: PlacementRequest) -> tuple[DeviceProfile, str]:
    """Return the profile and the notice that goes with it.

    Raises `ProfileError` where one that was not asked for is of other backends, or of another
    OpenCL driver: PoCL's times say nothing of a graphics card, nor of Intel's runtime.
    """
    profile, notice = locate_profile(request.profile, request.backend("npu"))
    if request.profile is not None:
        return scaled_here(profile, notice)
    for kind in KINDS:
        name, record = request.backend(kind), profile.devices.get(kind)
        if record is None or record.backend != split_driver(name)[0]:
            raise ProfileError(
                f"profile {profile.name} says nothing of {name} as {kind.upper()}: take one "
                "with `hetero profile`, or name another with --profile"
            )
    (backend, driver), details = (
        split_driver(request.backend("gpu")),
        profile.devices["gpu"].details,
    )
    if backend in DRIVEN and "platform" in details:
        profiled, here = driver_of(details["platform"]), driver_here(driver)
        if here is not None and profiled != here:
            raise ProfileError(
                f"profile {profile.name} is of the OpenCL driver {profiled}, here it is {here}: "
                "take one with `hetero profile`, or name another with --profile"
            )
    return scaled_here(profile, notice)
