"""A planner for a request: the graphs that it may use, which may be part of the question."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hetero.backends.ops import PASS_TOKENS
from hetero.backends.protocol import KINDS
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.profiler.substitutes import file_substitution
from hetero.solver import graph_sizes as sizes_module
from hetero.solver.chooser import Rules
from hetero.solver.errors import PlanError
from hetero.solver.expert_choice import choose_experts
from hetero.solver.host_queue import HostQueue
from hetero.solver.joint_plan import solve_jointly
from hetero.solver.non_matmul_devices import what_npus_lack
from hetero.solver.options import INF
from hetero.solver.planner import Planner, PlannerSettings, with_graph_sizes
from hetero.solver.request import PlanRequest, scenarios_of


def planner_for(
    spec: ModelGraph,
    profile: DeviceProfile,
    request: PlanRequest,
    *,
    unfused: bool = True,
    experts: bool = True,
) -> tuple[Planner, list[str]]:
    """Return a planner with the requested graph sizes, and notes on them.

    `experts`: it chooses the devices of routed experts.
    """
    rules = Rules(request.margin, request.max_gpu_share, request.shared, request.third)
    step = request.step_tokens
    settings = PlannerSettings(request.precision, rules, request.context, unfused, step_tokens=step)
    substitution = file_substitution(profile, spec.weight_format)
    notes = [] if substitution is None else [substitution.note]
    if set(KINDS) <= set(profile.devices) and (lacks := what_npus_lack(spec)):
        notes.append(lacks)
    if experts:
        cost = CostModel(profile)
        choice = choose_experts(
            cost,
            spec,
            HostQueue.of(cost),
            routing=request.routing,
            prompts=_calls_of(request),
            margin=request.margin,
            budget_bytes=request.memory_budget_bytes,
        )
        settings = replace(settings, experts=choice if choice.is_one else None)
        notes += [choice.note] if choice.note else []
    if request.graph_sizes == "auto":
        planner = Planner(spec, profile, settings)
        settings = replace(settings, step_tokens=planner.step_tokens)
        chosen = _choose_sizes(planner, request.in_calls(planner.step_tokens))
        profile = with_graph_sizes(profile, chosen.sizes)
        notes.append(f"graph sizes chosen for these lengths: {chosen.describe()}")
        notes += _budget_notes(profile, request)
    elif request.graph_sizes is not None:
        sizes = {*request.graph_sizes}
        if 1 in _graphs(profile):
            sizes.add(1)  # decoding keeps its graph
        profile = with_graph_sizes(profile, sizes)
    return Planner(spec, profile, settings), notes


def _calls_of(request: PlanRequest) -> list[tuple[int, float]]:
    """Return the tokens of calls that stand for the request's prompts, and how often they come."""
    weights = request.in_calls(request.step_tokens or PASS_TOKENS).distribution
    lengths = sorted(weights)
    few = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    total = sum(weights[m] for m in few)
    return [(m, weights[m] / total) for m in few]


def _choose_sizes(planner: Planner, request: PlanRequest) -> sizes_module.GraphChoice:
    """Return what `graph_sizes="auto"` chooses."""
    objective = planner.objective(*request.weights)
    scenarios = scenarios_of(request.seq_lens)

    def cost(sized: Planner) -> float:
        """Return expected cost of the whole plan within its memory limits.

        Infinite if there is none.
        """
        try:
            _, solutions = solve_jointly(sized, scenarios, objective, request, [])
        except PlanError:
            return INF
        return sum(request.weight(s.scenario) * s.path.cost for s in solutions)

    preparation_s, memory_bytes = request.preparation_budget_s, request.graph_memory_bytes
    budgets = sizes_module.Budgets(
        preparation_s=INF if preparation_s is None else preparation_s,
        memory_bytes=INF if memory_bytes is None else memory_bytes,
    )
    return sizes_module.choose(
        planner,
        request.distribution,
        budgets,
        budget_bytes=request.memory_budget_bytes,
        cost=cost,
    )


def _budget_notes(profile: DeviceProfile, request: PlanRequest) -> Iterable[str]:
    """Return the budgets that could not bind, and why."""
    npu = profile.devices["npu"].capabilities
    if request.graph_memory_bytes is not None and npu.per_graph_size != "weights":
        yield "graphs of all sizes share their weights on this NPU: their memory limits no size"
    known = {p.device for p in profile.preparation_predictors}
    if request.preparation_budget_s is not None and "npu" not in known:
        yield "the profile does not say how long graphs take to prepare: no size is limited by it"


def _graphs(profile: DeviceProfile) -> tuple[int, ...]:
    npu = profile.devices.get("npu")
    return npu.capabilities.graph_sizes if npu is not None else ()
