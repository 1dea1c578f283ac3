"""Requests of a placement and its answers: devices, a plan for them, and the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from hetero.backends.host.affinity import core_count
from hetero.backends.opencl import computes_on_processor
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.backends.qnn import hexagon
from hetero.backends.registry import split_driver
from hetero.placement.device_set import DRIVEN, DeviceMode, DeviceSet, backend_name
from hetero.placement.device_times import DeviceTimes
from hetero.placement.phase_choice import PhaseChoice
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.names import NamedStrategy
from hetero.solver.plan import STEP_TOKENS

if TYPE_CHECKING:  # half of what a start would import, for answers that are cached
    from hetero.placement.planning import ProfileLike
    from hetero.profiler.cost import CostModel
    from hetero.profiler.records import DeviceProfile
    from hetero.solver.expert_shares import Routing
    from hetero.solver.prepared import PreparedSolver
    from hetero.solver.prepared_three import PreparedThree

NO_CPU: Final = "none"  # no third device
ONE_CORE: Final = "two devices need two cores"


@dataclass(frozen=True)
class Choice:
    """Devices to open, and a plan for them (None: made by rule, `plan_on`).

    `gpu` is a backend to open instead of the one that was asked for (None: that one). `reason` says
    what was chosen and why, also where that is layer level for want of a plan; `notes` are for
    people to see once; `profile` is the one that was asked for; `solver` answers for prompt lengths
    that the plan does not have; `seconds` are what `auto` compared, by name; `cost` is by which.
    `phases` are what `auto` compared of each phase, `alone` the times of a single device that it
    chose and of the next best one. `third` is a plan for three devices, which is taken instead of
    `plan` where `cpu`, the backend of the third, can be opened; `third_solver` answers for other
    lengths of it. The NPU is opened with graphs of `graph_sizes` (empty: with those of its own).
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
    alone: tuple[DeviceTimes, ...] = ()
    third: ExecutionPlan | None = None
    third_solver: PreparedThree | None = None
    cpu: str | None = None

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
        plans = (x for x in (self.third, self.plan) if x is not None)
        return next((x for x in plans if x.devices() <= set(kinds)), None)

    def solver_on(self, kinds: Collection[DeviceKind]) -> PreparedSolver | PreparedThree | None:
        """Return the solver of the plan that runs on these devices."""
        if (planned := self.plan_on(kinds)) is None:
            return None
        return self.third_solver if planned is self.third else self.solver


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
    cpu: str = "auto"
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
    def third_backend(self) -> str | None:
        """Return the backend that plays a CPU besides both devices; None where none may."""
        return None if self.cpu == NO_CPU else backend_name("cpu", self.cpu)

    @property
    def promises_both(self) -> bool:
        """Return whether both devices must work in every prompt."""
        return self.mode == "hetero" and self.max_gpu_share >= 1

    def backend(self, kind: DeviceKind) -> str:
        """Return the name of the backend that is opened for a kind of device."""
        return backend_name(kind, self.gpu if kind == "gpu" else self.npu)


def by_rule(request: PlacementRequest, why: str) -> Choice:
    """Return layer level with the reason why there is no plan, which is a notice too.

    For `auto` it is the GPU alone where both devices would share one core.
    """
    if request.mode == "auto" and shares_one_core(request):
        reason = f"auto: gpu alone, because {ONE_CORE}, and {why}"
        return Choice("gpu", reason=reason, notes=(reason,))
    reason = f"{request.mode}: layer level, because {why}"
    return Choice("hetero", reason=reason, notes=(reason,))


def shares_one_core(request: PlacementRequest) -> bool:
    """Return whether both devices would compute on the only core that this process has."""
    if core_count() > 1:
        return False
    backend, driver = split_driver(request.backend("gpu"))
    on_core = backend not in DRIVEN or computes_on_processor(driver)
    return on_core and (request.backend("npu") != "qnn" or not hexagon.present())


def mode_of(plan: ExecutionPlan) -> DeviceMode:
    """Return the devices that a plan needs."""
    kinds = plan.devices()
    if kinds >= set(KINDS):
        return "hetero"
    (only,) = (kind for kind in KINDS if kind in kinds)
    return only
