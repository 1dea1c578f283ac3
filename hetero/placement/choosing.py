"""Chooses the devices that compute a model, the plan for them, and the reason."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Final

from hetero.backends.host.affinity import core_count
from hetero.backends.opencl import (
    computes_on_processor,
    driver_here,
    driver_of,
    every_core_count,
)
from hetero.backends.protocol import KINDS, Device, DeviceKind
from hetero.backends.qnn import hexagon
from hetero.backends.registry import EVERY_CORE, split_driver
from hetero.errors import UserError
from hetero.placement import decisions
from hetero.placement.comparing import (
    OPENING_S,
    TENSOR_LEVEL,
    DeviceSets,
    PhaseChoice,
    Price,
    PromptMix,
    compare,
    described,
    fastest,
    total_s,
)
from hetero.placement.decisions import Decision
from hetero.placement.device_set import DRIVEN, DeviceMode, DeviceSet, backend_name
from hetero.placement.first_start import forget_if_other, profile_facts, scaled_here
from hetero.placement.planning import ProfileLike, locate_profile
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.profiler.substitutes import file_substitution
from hetero.runtime.launch_costs import check_priced
from hetero.runtime.prefill_mode import capabilities_of, with_modes
from hetero.solver.copies import least_gain
from hetero.solver.decode_bands import LONGEST, cache_bytes
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.expert_shares import Routing
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.matmul_entries import share_heads
from hetero.solver.names import NamedStrategy
from hetero.solver.non_matmul_devices import of_the_gpu
from hetero.solver.placement import Placement
from hetero.solver.plan import STEP_TOKENS, Phase
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.report.units import duration
from hetero.solver.request import MAX_LENGTHS_AUTO, PlanRequest
from hetero.solver.strategy_plans import strategy_plan
from hetero.solver.weight_memory import limits_of

ONE_CORE: Final = "two devices need two cores"
LONG: Final = 1024  # tokens of a prompt by which forms of calls in flight are judged
SHORT_PROMPTS: Final = (2, 5, 12, 24)  # that both devices must share as well, for `hetero`


@dataclass(frozen=True)
class Choice:
    """Devices to open, and a plan for them (None: made by rule, `plan_on`).

    `gpu` is a backend to open instead of the one that was asked for (None: that one). `reason` says
    what was chosen and why, also where that is layer level for want of a plan; `notes` are for
    people to see once; `profile` is the one that was asked for; `solver` answers for prompt lengths
    that the plan does not have; `seconds` are what `auto` compared, by name; `cost` is by which.
    `phases` are what `auto` compared of each phase. The NPU is opened with graphs of `graph_sizes`
    (empty: with those of its own).
    """

    mode: DeviceMode
    plan: ExecutionPlan | None = None
    gpu: str | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    profile: DeviceProfile | None = None
    solver: PreparedSolver | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    cost: CostModel | None = None
    graph_sizes: tuple[int, ...] = ()
    phases: tuple[PhaseChoice, ...] = ()

    def opened(self, devices: DeviceSet) -> Choice:
        """Return the choice after its devices were opened.

        It names the device that computes instead of a missing one, and what the open ones lack in
        this process.
        """
        reason = self.reason
        if devices.fallback and devices.fallback not in reason:
            reason = f"{devices.fallback}, instead of: {reason}"
        lacking = [note for note in devices.notes if note not in reason]
        return replace(self, reason="; ".join((reason, *lacking)))

    def plan_on(self, kinds: Collection[DeviceKind]) -> ExecutionPlan | None:
        """Return the plan, if there is one and these devices are all that it needs."""
        fits = self.plan is not None and self.plan.devices() <= set(kinds)
        return self.plan if fits else None

    def solver_on(self, kinds: Collection[DeviceKind]) -> PreparedSolver | None:
        """Return the solver of the plan that runs on these devices."""
        return self.solver if self.plan_on(kinds) is not None else None


@dataclass(frozen=True)
class PlacementRequest:
    """The options of a placement; see `LLM`.

    `seq_lens` are prompt lengths to plan for, and to compare devices by; without them plans are for
    any length, and devices are compared by the `expected` lengths, else by those that a `context`
    of so many tokens holds. `solver` is that of the `plan`, where it was solved. `step_tokens` is
    the longest call; `weight_budget_bytes` bounds the weights, None for no limit; `routing` says
    how often experts are chosen.
    """

    mode: DeviceMode = "hetero"
    gpu: str = "auto"
    npu: str = "auto"
    profile: ProfileLike = None
    plan: ExecutionPlan | None = None
    solver: PreparedSolver | None = None
    strategy: NamedStrategy = "auto"
    seq_lens: Sequence[int] = ()
    expected: Sequence[int] = ()
    context: int | None = None
    step_tokens: int = STEP_TOKENS
    max_gpu_share: float = 1.0
    weight_budget_bytes: int | None = None
    routing: Routing | None = None

    @property
    def needs_plan(self) -> bool:
        """Return whether layer level by rule would break what was asked for by name."""
        named = self.profile is not None or self.strategy not in ("auto", "layer")
        bounded = self.max_gpu_share < 1 or self.weight_budget_bytes is not None
        return named or bounded or self.routing is not None

    @property
    def compiles_graphs(self) -> bool:
        """Return whether the NPU compiles graphs of any size when it is opened with it."""
        return self.backend("npu") == "qnn"

    @property
    def promises_both(self) -> bool:
        """Return whether both devices must work in every prompt."""
        return self.mode == "hetero" and self.max_gpu_share >= 1

    def backend(self, kind: DeviceKind) -> str:
        """Return the name of the backend that is opened for a kind of device."""
        return backend_name(kind, self.gpu if kind == "gpu" else self.npu)


def choose(spec: ModelGraph, request: PlacementRequest) -> Choice:
    """Return the devices to open and the plan for them, before any device is opened.

    A plan that was given, and a device that was named, need no profile. Else the times of a profile
    decide: by a named strategy, or by the solver's plan for both devices, which `auto` compares
    with one device alone, phase by phase. Raises `UserError`, `PlanError` or `ProfileError` for
    what was asked for by name and is impossible; anything else that goes wrong means layer level,
    by rule.
    """
    _check_share(request)
    _check_routing(request)
    choice = _as_named(spec, request)
    if choice is not None:
        return choice
    try:
        key = _decision_key(spec, request)
        decision = None if key is None else decisions.load_cached(key)
        if decision is not None:
            return Choice(**vars(decision))
        profile, notice = _find_profile(request)
        choice = _by_profile(spec, profile, request)
        if choice.plan is not None and (
            _chooses_sizes(profile, request) or request.compiles_graphs
        ):
            choice = replace(choice, graph_sizes=choice.plan.graph_sizes)
        choice = replace(choice, notes=(*([notice] if notice else []), *choice.notes))
        if key is not None and choice.plan is None and choice.mode in KINDS:
            names = Decision.__dataclass_fields__
            decisions.keep(key, Decision(**{name: getattr(choice, name) for name in names}))
        given = None if request.profile is None else profile
        return replace(choice, cost=CostModel(profile), profile=given)
    except UserError as error:
        if request.needs_plan:
            raise
        return _by_rule(request, str(error))


def _as_named(spec: ModelGraph, request: PlacementRequest) -> Choice | None:
    """Return the plan or the device that was named; None where a profile must decide."""
    if request.plan is not None:
        return _given(spec, request.plan, request)
    if request.mode == "auto" and request.gpu == EVERY_CORE:
        return Choice("gpu", reason=f"auto: gpu alone, because {EVERY_CORE} leaves no other core")
    if request.mode in ("hetero", "auto"):
        return None
    if request.profile is not None:
        locate_profile(request.profile)  # a wrong name is an error, even if it is not used
    return Choice(request.mode, reason=f"{request.mode} alone, as asked for")


def _given(spec: ModelGraph, plan: ExecutionPlan, request: PlacementRequest) -> Choice:
    """Return the plan that was given.

    With a profile that was given too, the calls of a prompt are ordered by its times. Raises
    `UserError` for options that a plan cannot honour.
    """
    if request.strategy != "auto":
        raise UserError(
            f"the plan {plan.plan_id} says what runs where, so --strategy {request.strategy} "
            "cannot be honoured: leave one of them out"
        )
    plan.check_fits(spec)
    sizes = plan.graph_sizes if request.compiles_graphs else ()
    reason = f"plan {plan.plan_id}, as given"
    choice = Choice(_mode_of(plan), plan, reason=reason, solver=request.solver, graph_sizes=sizes)
    if request.profile is None:
        return choice
    profile, _ = locate_profile(request.profile)
    cost = CostModel(profile)
    check_priced(cost, spec, plan)
    return replace(choice, cost=cost)


def _by_profile(spec: ModelGraph, profile: DeviceProfile, request: PlacementRequest) -> Choice:
    """Return the choice that the times of a profile lead to."""
    if request.compiles_graphs:
        profile = _without_npu_experts(profile)
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
        return Choice(_mode_of(plan), plan, reason=reason)
    solver = prepare_solver(spec, profile, plan_request)
    fallback = (min(LONG, request.context or LONG),)
    lengths = tuple(request.seq_lens) or tuple(request.expected) or fallback
    solver.plan = with_modes(solver.plan, spec, CostModel(profile), solver, lengths=lengths)
    if request.mode == "auto":
        return _fastest(Planner(spec, profile), solver, request)
    solver = solver.with_bands(_longest_context(spec, request))
    if request.promises_both and not _shares_every_prompt(solver, spec, profile):
        why = f"by profile {profile.name} no plan has both devices in every prompt"
        return _by_rule(request, why)  # at least layer level, as `hetero` promises
    prompts, answers = solver.formats
    formats = f", prompts in {prompts}, answers in {answers}" if spec.also else ""
    reason = f"hetero: {TENSOR_LEVEL}{formats} (profile {profile.name}){_moving(solver.plan)}"
    return Choice("hetero", solver.plan, solver=solver, reason=reason)


def _without_npu_experts(profile: DeviceProfile) -> DeviceProfile:
    """Return the profile for an NPU without graphs of routed experts, which fitted ones predict."""
    record = profile.devices.get("npu")
    if record is None or not record.capabilities.experts:
        return profile
    able = record.capabilities.model_copy(update={"experts": False})
    devices = {**profile.devices, "npu": record.model_copy(update={"capabilities": able})}
    return profile.model_copy(update={"devices": devices})


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
    one_core = bool(alone) and _shares_one_core(request)
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
        "hetero" if both is not None else "npu" if sets.prompts == "npu" else "gpu",
        both.plan if both is not None else None,
        gpu=EVERY_CORE if EVERY_CORE in sets else None,
        reason=reason,
        notes=notes,
        solver=both,
        seconds=totals,
        phases=phases,
    )


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
        gain = least_gain(memory, spec.matmul_weight_bytes, limits)
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


def _by_rule(request: PlacementRequest, why: str) -> Choice:
    """Return layer level with the reason why there is no plan, which is a notice too.

    For `auto` it is the GPU alone where both devices would share one core.
    """
    if request.mode == "auto" and _shares_one_core(request):
        reason = f"auto: gpu alone, because {ONE_CORE}, and {why}"
        return Choice("gpu", reason=reason, notes=(reason,))
    reason = f"{request.mode}: layer level, because {why}"
    return Choice("hetero", reason=reason, notes=(reason,))


def plan_on(
    choice: Choice, spec: ModelGraph, devices: Mapping[DeviceKind, Device]
) -> ExecutionPlan:
    """Return the choice's plan on the opened devices, in calls that they can run.

    A plan that needs another device is replaced by one by rule. Warns (`ProfileWarning`) if the
    requested profile was measured elsewhere. Raises `PlanError` for a plan with graphs that the NPU
    does not have.
    """
    kinds = frozenset(devices)
    if choice.profile is not None:
        choice.profile.warn_if_foreign(devices.values())
    else:
        forget_if_other(devices.values())
    able = {kind: device.capabilities for kind, device in devices.items()}
    if (planned := choice.plan_on(kinds)) is not None:
        if choice.solver is not None and not share_heads(able):
            # Its profile may be another machine's, on which both devices see the same caches.
            planned = planned.model_copy(update={"attention": ()})
        return Placement(planned, spec, able, source=choice.solver).plan
    plan = layer_level(spec) if kinds == set(KINDS) else single_device(spec, next(iter(kinds)))
    return Placement(plan, spec, able).plan


def _check_share(request: PlacementRequest) -> None:
    """Raise `UserError` where the GPU cannot be left the time that was asked for."""
    share = request.max_gpu_share
    if not 0 <= share <= 1:
        raise UserError(f"--max-gpu-share is between 0 and 1, got {share:g}")
    if share == 1:
        return
    if request.mode == "gpu" and request.plan is None:
        raise UserError(
            f"the GPU alone cannot leave {1 - share:.0%} of its time to others: choose --device "
            "hetero or npu with --max-gpu-share"
        )
    if request.plan is not None and request.plan.max_gpu_share > share:
        raise UserError(
            f"the plan {request.plan.plan_id} was made for a GPU share of up to "
            f"{request.plan.max_gpu_share:g}: make one with `hetero plan --max-gpu-share {share:g}`"
        )


def _check_routing(request: PlacementRequest) -> None:
    """Raise `UserError` where nothing would be planned by how often experts are chosen."""
    planned = request.plan is None and request.mode in ("hetero", "auto")
    if request.routing is not None and not (planned and request.strategy == "auto"):
        raise UserError(
            "--experts says by which counts experts are shared between both devices, and here no "
            "plan is made: leave it out, or --plan, --strategy and a single --device"
        )


def _shares_every_prompt(solver: PreparedSolver, spec: ModelGraph, profile: DeviceProfile) -> bool:
    """Return whether both devices work in prompts of every length, as `hetero` promises.

    Each works in one call at least, since a last call of a token or two is not worth two devices.
    """
    able = capabilities_of(solver.plan, profile)
    placement = Placement(solver.plan, spec, able, source=solver)
    prompts = [total.steps for total in placement.plan.totals if total.phase == "prefill"]
    prompts += [(m,) for m in SHORT_PROMPTS]
    return all(len(frozenset().union(*map(placement.working, steps))) == 2 for steps in prompts)


def _shares_one_core(request: PlacementRequest) -> bool:
    """Return whether both devices would compute on the only core that this process has."""
    if core_count() > 1:
        return False
    backend, driver = split_driver(request.backend("gpu"))
    on_core = backend not in DRIVEN or computes_on_processor(driver)
    return on_core and (request.backend("npu") != "qnn" or not hexagon.present())


def _decision_key(spec: ModelGraph, request: PlacementRequest) -> str | None:
    """Return the key of `auto`'s decision in the cache.

    None where it is not cached, or its profile is not known.
    """
    question = (request.mode, request.strategy, request.profile)
    if question != ("auto", "auto", None) or (profile := profile_facts()) is None:
        return None
    gpu, npu = request.backend("gpu"), request.backend("npu")
    backend, driver = split_driver(gpu)
    return decisions.key_of(
        {
            "model": spec.model_dump_json(),
            "request": [str(x) for x in astuple(request)],
            "devices": [gpu, npu, driver_here(driver) if backend in DRIVEN else None],
            "cores": [every_core_count(), core_count()],
            "profile": profile,
        }
    )


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


def _mode_of(plan: ExecutionPlan) -> DeviceMode:
    """Return the devices that a plan needs."""
    kinds = plan.devices()
    if len(kinds) == 2:
        return "hetero"
    (only,) = (kind for kind in KINDS if kind in kinds)
    return only
