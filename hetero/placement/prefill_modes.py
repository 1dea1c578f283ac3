"""The prefill modes that a plan keeps, and their predicted times (`runtime.prefill_mode`)."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.backends.protocol import Capabilities, DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import DeviceProfile
from hetero.runtime.launch_costs import LaunchCosts
from hetero.runtime.prefill_mode import WINDOW, PrefillModes
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.matmul_entries import PlanSource
from hetero.solver.placement import Placement


def with_modes(
    plan: ExecutionPlan,
    spec: ModelGraph,
    cost: CostModel,
    source: PlanSource | None = None,
    *,
    lengths: Sequence[int] = (),
) -> ExecutionPlan:
    """Return the plan with the prefill mode of each prompt, and predicted seconds of the others.

    Modes that no prompt of these `lengths` (by default the plan's) would use are dropped, since
    their buffers would be wasted.
    """
    if not plan.in_flight:
        return plan
    able = capabilities_of(plan, cost.profile)
    placement = Placement(plan, spec, able, source=source)
    modes = PrefillModes(placement, LaunchCosts(cost, placement), "best", able, window=WINDOW)
    prompts = [total.m for total in plan.totals if total.phase == "prefill"]
    try:
        taken = {m: modes.of(m) for m in lengths or prompts}
    except ProfileError:  # of an operation that no prediction of steps asks for
        return plan.model_copy(update={"in_flight": ()})
    used = {choice.mode for choice in taken.values()}
    in_flight = tuple(x for x in plan.in_flight if x.mode in used)
    totals = tuple(
        total.model_copy(update={"mode": choice.mode, "modes": dict(choice.seconds)})
        if total.phase == "prefill" and (choice := taken.get(total.m)) is not None
        else total
        for total in plan.totals
    )
    return plan.model_copy(update={"totals": totals, "in_flight": in_flight})


def capabilities_of(plan: ExecutionPlan, profile: DeviceProfile) -> dict[DeviceKind, Capabilities]:
    """Return the capabilities of a profile's devices, with the plan's graphs."""
    capabilities: dict[DeviceKind, Capabilities] = {}
    for kind, device in profile.devices.items():
        record = device.capabilities
        fields = {name: getattr(record, name) for name in type(record).model_fields}
        if kind == "npu" and record.static_shapes and plan.graph_sizes:
            fields["graph_sizes"] = plan.graph_sizes
        capabilities[kind] = Capabilities(kind=kind, **fields)
    return capabilities
