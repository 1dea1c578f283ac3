"""Chooses the devices that compute a model, the plan for them, and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace

from hetero.backends.host.affinity import core_count
from hetero.backends.opencl import driver_here, every_core_count
from hetero.backends.protocol import KINDS, Device, DeviceKind
from hetero.backends.registry import EVERY_CORE, split_driver
from hetero.errors import UserError
from hetero.placement import decisions
from hetero.placement.choice import NO_CPU, Choice, PlacementRequest, by_rule, mode_of
from hetero.placement.decisions import Decision
from hetero.placement.device_set import DRIVEN
from hetero.placement.first_start import forget_if_other, profile_facts
from hetero.profiler.model_graph import ModelGraph
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.handmade import layer_level, single_device
from hetero.solver.matmul_entries import share_heads
from hetero.solver.placement import Placement


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
    _ = request.third_backend  # a wrong name is an error, even if no plan has rows for it
    choice = _as_named(spec, request)
    if choice is not None:
        return choice
    try:
        key = _decision_key(spec, request)
        decision = None if key is None else decisions.load_cached(key)
        if decision is not None:
            return Choice(**vars(decision))
        # The modules that plan are half of all that a start imports: a cached decision needs none.
        from hetero.placement import by_profile

        choice = by_profile.chosen(spec, request)
        key = key or _decision_key(spec, request)  # a first start has scaled the profile only now
        if key is not None and choice.plan is None and choice.mode in KINDS:
            names = Decision.__dataclass_fields__
            decisions.keep(key, Decision(**{name: getattr(choice, name) for name in names}))
        return choice
    except UserError as error:
        if request.needs_plan:
            raise
        return by_rule(request, str(error))


def _as_named(spec: ModelGraph, request: PlacementRequest) -> Choice | None:
    """Return the plan or the device that was named; None where a profile must decide."""
    if request.plan is not None:
        return _given(spec, request.plan, request)
    if request.mode == "auto" and request.gpu == EVERY_CORE:
        return Choice("gpu", reason=f"auto: gpu alone, because {EVERY_CORE} leaves no other core")
    if request.mode in ("hetero", "auto"):
        return None
    if request.profile is not None:
        from hetero.placement.planning import locate_profile

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
    choice = Choice(mode_of(plan), plan, reason=reason, solver=request.solver, graph_sizes=sizes)
    if "cpu" in plan.devices():
        choice = replace(choice, third=plan, plan=None, cpu=_third_backend(plan, request))
    if request.profile is None:
        return choice
    from hetero.placement import by_profile

    return replace(choice, cost=by_profile.cost_of(spec, plan, request.profile))


def _third_backend(plan: ExecutionPlan, request: PlacementRequest) -> str:
    """Return the backend of a plan's third device. Raises `UserError` where there may be none."""
    if (name := request.third_backend) is None:
        raise UserError(
            f"the plan {plan.plan_id} has rows of matmuls on a CPU, which --cpu {NO_CPU} leaves "
            "out: leave one of them out, or make a plan for two devices"
        )
    return name


def plan_on(
    choice: Choice, spec: ModelGraph, devices: Mapping[DeviceKind, Device]
) -> ExecutionPlan:
    """Return the choice's plan on the opened devices, in calls that they can run.

    A plan that needs another device is replaced by one for those that are open: where it was for
    three that for two, else one by rule. Warns (`ProfileWarning`) if the
    requested profile was measured elsewhere. Raises `PlanError` for a plan with graphs that the NPU
    does not have, `UserError` for a given one whose third device is missing.
    """
    kinds = frozenset(devices)
    if choice.third is not None and choice.plan is None and "cpu" not in kinds:
        raise UserError(
            f"the plan {choice.third.plan_id} has rows of matmuls on a CPU besides both devices, "
            f"and {choice.cpu} is not open (`hetero doctor` says why): make a plan for those that "
            "are"
        )
    if choice.profile is not None:
        choice.profile.warn_if_foreign(devices.values())
    else:
        forget_if_other(devices.values())
    able = {kind: device.capabilities for kind, device in devices.items()}
    if (planned := choice.plan_on(kinds)) is not None:
        solver = choice.solver_on(kinds)
        if choice.solver is not None and not share_heads(able):
            # Its profile may be another machine's, on which both devices see the same caches.
            planned = planned.model_copy(update={"attention": ()})
        return Placement(planned, spec, able, source=solver).plan
    plan = layer_level(spec) if kinds >= set(KINDS) else single_device(spec, next(iter(kinds)))
    return Placement(plan, spec, able).plan


def _check_routing(request: PlacementRequest) -> None:
    """Raise `UserError` where nothing would be planned by how often experts are chosen."""
    planned = request.plan is None and request.mode in ("hetero", "auto")
    if request.routing is not None and not (planned and request.strategy == "auto"):
        raise UserError(
            "--experts says by which counts experts are shared between both devices, and here no "
            "plan is made: leave it out, or --plan, --strategy and a single --device"
        )


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
