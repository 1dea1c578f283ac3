"""What computes a model: the devices to open, the plan for them, and why."""

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
from hetero.placement.comparing import TENSOR_LEVEL, Work, compare, fastest
from hetero.placement.decisions import Decision
from hetero.placement.device_set import DRIVEN, DeviceMode, DeviceSet, backend_name
from hetero.placement.first_start import forget_if_other, profile_facts, scaled_here
from hetero.placement.in_flight import with_forms
from hetero.placement.planning import ProfileLike, locate_profile
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.profiler.substitutes import file_substitution
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.names import NamedStrategy
from hetero.solver.placement import Placement
from hetero.solver.plan import STEP_TOKENS
from hetero.solver.planner import Planner
from hetero.solver.prepared import PreparedSolver, prepare_solver, spread_lengths
from hetero.solver.report.units import duration
from hetero.solver.request import PlanRequest
from hetero.solver.strategy_plans import strategy_plan

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

    def opened(self, devices: DeviceSet) -> Choice:
        """Return the choice with what became of it: the device that computes instead, and what the
        open ones lack in this process.
        """
        reason = self.reason
        if devices.fallback and devices.fallback not in reason:
            reason = f"{devices.fallback}, instead of: {reason}"
        lacking = [note for note in devices.notes if note not in reason]
        return replace(self, reason="; ".join((reason, *lacking)))

    def plan_on(self, kinds: Collection[DeviceKind]) -> ExecutionPlan | None:
        """The plan, if there is one and these devices are all that it needs."""
        fits = self.plan is not None and self.plan.devices() <= set(kinds)
        return self.plan if fits else None

    def solver_on(self, kinds: Collection[DeviceKind]) -> PreparedSolver | None:
        """The solver of the plan that runs on these devices."""
        return self.solver if self.plan_on(kinds) is not None else None


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; see `LLM`.

    `seq_lens` are prompt lengths to plan for, and to compare devices by; without them plans are for
    any length, and devices are compared by the `expected` lengths, else by those that a `context`
    of so many tokens holds. `step_tokens` is the longest call; `weight_budget_bytes` what the
    weights may take, None for no limit.
    """

    mode: DeviceMode = "hetero"
    gpu: str = "auto"
    npu: str = "auto"
    profile: ProfileLike = None
    plan: ExecutionPlan | None = None
    strategy: NamedStrategy = "auto"
    seq_lens: Sequence[int] = ()
    expected: Sequence[int] = ()
    context: int | None = None
    step_tokens: int = STEP_TOKENS
    max_gpu_share: float = 1.0
    weight_budget_bytes: int | None = None


def choose(spec: ModelGraph, wishes: Wishes) -> Choice:
    """Decide before any device is opened. Raises `UserError`, `PlanError` or `ProfileError` for
    what was asked for by name and cannot be.
    """
    _check_share(wishes)
    if wishes.plan is not None:
        wishes.plan.check_fits(spec)
        reason = f"plan {wishes.plan.plan_id}, as given"
        return Choice(_mode_of(wishes.plan), wishes.plan, reason=reason)
    if wishes.mode == "auto" and wishes.gpu == EVERY_CORE:
        return Choice("gpu", reason=f"auto: gpu alone, because {EVERY_CORE} leaves no other core")
    if wishes.mode not in ("hetero", "auto"):
        if wishes.profile is not None:
            locate_profile(wishes.profile)  # a name that is wrong is said, needed or not
        return Choice(wishes.mode, reason=f"{wishes.mode} alone, as asked for")
    try:
        key = _key(spec, wishes)
        if key is not None and (kept := decisions.kept(key)) is not None:
            return Choice(**vars(kept))
        profile, notice = _find_profile(wishes)
        found = _choose_by(spec, profile, wishes, (notice,) if notice else ())
        if key is not None and found.plan is None and found.mode in KINDS:
            decisions.keep(
                key, Decision(found.mode, found.gpu, found.reason, found.notes, found.seconds)
            )
        found = replace(found, cost=CostModel(profile))
        return replace(found, profile=profile) if wishes.profile is not None else found
    except UserError as error:
        named = wishes.profile is not None or wishes.strategy not in ("auto", "layer")
        if named or wishes.max_gpu_share < 1 or wishes.weight_budget_bytes is not None:
            raise
        return _by_rule(wishes, str(error))


def plan_on(
    choice: Choice, spec: ModelGraph, devices: Mapping[DeviceKind, Device]
) -> ExecutionPlan:
    """The choice's plan on the devices that could be opened, in calls that they can run; by rule
    where it needs another.

    Warns (`ProfileWarning`) if the profile that was asked for was taken elsewhere. Raises
    `PlanError` for a plan with graphs that the NPU does not have.
    """
    kinds = frozenset(devices)
    if choice.profile is not None:
        choice.profile.warn_if_foreign(devices.values())
    else:
        forget_if_other(devices.values())
    able = {kind: device.capabilities for kind, device in devices.items()}
    if (planned := choice.plan_on(kinds)) is not None:
        return Placement(planned, spec, able, source=choice.solver).plan
    plan = layer_level(spec) if kinds == set(KINDS) else single_device(spec, next(iter(kinds)))
    return Placement(plan, spec, able).plan


def _by_rule(wishes: Wishes, why: str, notes: tuple[str, ...] = ()) -> Choice:
    """Return layer level, and why there is no plan, in a notice too; for `auto` the GPU alone where
    both devices would share one core.
    """
    if wishes.mode == "auto" and _shares_one_core(wishes):
        reason = f"auto: gpu alone, because {ONE_CORE}, and {why}"
        return Choice("gpu", reason=reason, notes=(*notes, reason))
    reason = f"{wishes.mode}: layer level, because {why}"
    return Choice("hetero", reason=reason, notes=(*notes, reason))


def _choose_by(
    spec: ModelGraph, profile: DeviceProfile, wishes: Wishes, notes: tuple[str, ...]
) -> Choice:
    npu = profile.devices.get("npu")
    sizes = npu.capabilities.graph_sizes if npu is not None else ()
    lengths = tuple(wishes.seq_lens) or spread_lengths(sizes, wishes.step_tokens)
    request = PlanRequest(
        seq_lens=lengths,
        step_tokens=wishes.step_tokens,
        explain=False,
        max_gpu_share=wishes.max_gpu_share,
        memory_budget_bytes=wishes.weight_budget_bytes,
    )
    if wishes.strategy != "auto":
        if wishes.weight_budget_bytes is None:  # compared in the calls that the graphs hold
            request = replace(request, step_tokens=None)
        plan = strategy_plan(spec, profile, wishes.strategy, lengths, request)
        reason = f"strategy {wishes.strategy}, as asked for (profile {profile.name})"
        return Choice(_mode_of(plan), plan, notes=notes, reason=reason)
    promised = wishes.mode == "hetero" and wishes.max_gpu_share >= 1
    solver = prepare_solver(spec, profile, replace(request, shared=promised))
    asked = tuple(wishes.seq_lens) or tuple(wishes.expected) or (min(LONG, wishes.context or LONG),)
    solver.plan = plan = with_forms(solver.plan, spec, CostModel(profile), solver, lengths=asked)
    prompts, answers = solver.formats
    formats = f", prompts in {prompts}, answers in {answers}" if spec.also else ""
    reason = f"hetero: {TENSOR_LEVEL}{formats} (profile {profile.name})"
    both = Choice("hetero", plan, notes=notes, solver=solver, reason=reason)
    if wishes.mode == "auto":
        return _fastest(Planner(spec, profile), both, wishes)
    able = {kind: device.capabilities.on(kind) for kind, device in profile.devices.items()}
    if promised and not _shares_every_prompt(Placement(solver.plan, spec, able, source=solver)):
        why = f"by profile {profile.name} no plan has both devices in every prompt"
        return _by_rule(wishes, why, notes)  # at least layer level, as `hetero` promises
    return both


def _check_share(wishes: Wishes) -> None:
    """Raise `UserError` where the GPU could not be left the time that was asked for."""
    share = wishes.max_gpu_share
    if not 0 <= share <= 1:
        raise UserError(f"--max-gpu-share is between 0 and 1, got {share:g}")
    if share == 1:
        return
    if wishes.mode == "gpu" and wishes.plan is None:
        raise UserError(
            f"the GPU alone cannot leave {1 - share:.0%} of its time to others: choose --device "
            "hetero or npu with --max-gpu-share"
        )
    if wishes.plan is not None and wishes.plan.max_gpu_share > share:
        raise UserError(
            f"the plan {wishes.plan.plan_id} was made for a GPU share of up to "
            f"{wishes.plan.max_gpu_share:g}: make one with `hetero plan --max-gpu-share {share:g}`"
        )


def _shares_every_prompt(placement: Placement) -> bool:
    """Whether both devices work in prompts of every length, as `hetero` promises: in one call of
    each at least, for a rest of a token or two is no matter for two devices.
    """
    prompts = [total.steps for total in placement.plan.totals if total.phase == "prefill"]
    prompts += [(m,) for m in SHORT_PROMPTS]
    return all(len(frozenset().union(*map(placement.working, steps))) == 2 for steps in prompts)


def _fastest(planner: Planner, both: Choice, wishes: Wishes) -> Choice:
    """The plan for both devices, or one device alone where that is predicted to be as fast: the
    GPU, the NPU, or on a PC the GPU with the NPU's core and all others.
    """
    assert both.solver is not None
    kinds = KINDS if wishes.max_gpu_share >= 1 else ("npu",)
    every_core = wishes.gpu == "auto" and "gpu" in kinds
    cores = every_core_count() if every_core else 0
    work = Work.of(wishes.seq_lens or wishes.expected, wishes.context)
    seconds = compare(planner, both.solver, work, kinds=(*kinds, EVERY_CORE), cores=cores)
    alone = {name: s for name, s in seconds.items() if name != TENSOR_LEVEL}
    one_core = bool(alone) and _shares_one_core(wishes)
    seconds = alone if one_core else seconds
    derived = file_substitution(planner.profile, planner.spec.weight_format) is not None
    best = fastest(seconds, derived=derived)
    times = ", ".join(f"{name} {duration(s)}" for name, s in seconds.items())
    reason = (
        f"auto: {best if best == TENSOR_LEVEL else best + ' alone'}, predicted for {work}: {times} "
        f"(profile {planner.profile.name})"
    )
    if one_core:
        reason += f"; {ONE_CORE}"
    notes = both.notes
    if every_core and cores == 0 and planner.profile.every_core:
        reason += f"; {EVERY_CORE} needs a process in which OpenCL does not run yet"
        could = compare(planner, both.solver, work, kinds=(EVERY_CORE,), cores=core_count())
        if could.get(EVERY_CORE, math.inf) < seconds[best]:
            notes += (
                f"{EVERY_CORE} would be faster ({duration(could[EVERY_CORE])}), but OpenCL runs in "
                "this process already: open this model first, or in a process of its own",
            )
    if best == TENSOR_LEVEL:
        return replace(both, reason=reason, notes=notes, seconds=seconds)
    return Choice(
        "npu" if best == "npu" else "gpu",
        gpu=EVERY_CORE if best == EVERY_CORE else None,
        reason=reason,
        notes=notes,
        seconds=seconds,
    )


def _shares_one_core(wishes: Wishes) -> bool:
    """Return whether both devices would compute on the only core that this process has."""
    if core_count() > 1:
        return False
    backend, driver = split_driver(backend_name("gpu", wishes.gpu))
    npu = backend_name("npu", wishes.npu)
    on_core = backend not in DRIVEN or computes_on_processor(driver)
    return on_core and (npu != "qnn" or not hexagon.present())


def _key(spec: ModelGraph, wishes: Wishes) -> str | None:
    """Of what `auto` is asked; None where the answer is not kept, or its profile is not known."""
    asked = (wishes.mode, wishes.strategy, wishes.profile)
    if asked != ("auto", "auto", None) or (profile := profile_facts()) is None:
        return None
    gpu, npu = backend_name("gpu", wishes.gpu), backend_name("npu", wishes.npu)
    backend, driver = split_driver(gpu)
    return decisions.key_of(
        {
            "model": spec.model_dump_json(),
            "wishes": [str(x) for x in astuple(wishes)],
            "devices": [gpu, npu, driver_here(driver) if backend in DRIVEN else None],
            "cores": [every_core_count(), core_count()],
            "profile": profile,
        }
    )


def _find_profile(wishes: Wishes) -> tuple[DeviceProfile, str]:
    """The profile and what to say about it; unless asked for, it must be of these backends."""
    profile, notice = locate_profile(wishes.profile)
    if wishes.profile is None:
        wanted: dict[DeviceKind, str] = {
            "gpu": backend_name("gpu", wishes.gpu),
            "npu": backend_name("npu", wishes.npu),
        }
        for kind, name in wanted.items():
            record = profile.devices.get(kind)
            if record is None or record.backend != split_driver(name)[0]:
                raise ProfileError(
                    f"profile {profile.name} says nothing of {name} as {kind.upper()}: take one "
                    "with `hetero profile`, or name another with --profile"
                )
        _check_driver(profile, split_driver(wanted["gpu"]))
    return scaled_here(profile, notice)


def _check_driver(profile: DeviceProfile, gpu: tuple[str, str | None]) -> None:
    """Raise `ProfileError` where OpenCL here is another driver than the profile's: PoCL's times say
    nothing of a graphics card, nor of Intel's runtime.
    """
    backend, named = gpu
    record = profile.devices.get("gpu")
    if backend not in DRIVEN or record is None or "platform" not in record.details:
        return
    taken, here = driver_of(record.details["platform"]), driver_here(named)
    if here is not None and taken != here:
        raise ProfileError(
            f"profile {profile.name} is of the OpenCL driver {taken}, here it is {here}: take one "
            "with `hetero profile`, or name another with --profile"
        )


def _mode_of(plan: ExecutionPlan) -> DeviceMode:
    """Devices that a plan needs."""
    kinds = plan.devices()
    if len(kinds) == 2:
        return "hetero"
    (only,) = kinds
    return only
