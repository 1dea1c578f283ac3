"""`Planner`: solves one model on one profile for any number of lengths (paper section 4.3)."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from hetero.backends.protocol import KINDS, DeviceKind, prepared_sizes
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DeviceProfile
from hetero.solver.chooser import Chooser, Rules
from hetero.solver.drift import DriftedCost, Factors
from hetero.solver.errors import PlanError
from hetero.solver.expert_choice import ExpertsChoice
from hetero.solver.heads import Heads, HeadShares
from hetero.solver.host_queue import HostQueue
from hetero.solver.kernel_times import KernelTimes, Precision
from hetero.solver.non_matmul import NonMatmulCosts, NonMatmulTimes
from hetero.solver.options import INF, Objective, Option, PowerModel
from hetero.solver.overheads import Overheads
from hetero.solver.solution import Scenario, Solution
from hetero.solver.step_search import Candidates, StepSearch
from hetero.solver.tilings import MatMulSpace
from hetero.solver.weight_memory import holds_alone

_Cut: TypeAlias = tuple[OpName, tuple[int, ...] | None]  # a matmul with its row cuts; None: all


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of the user.

    context         tokens in the KV cache before a decode step
    row_steps       at most this many row cuts for each matmul; None: every alignment step
    unfused         try q, k, v and gate, up unfused, but for the `fused` groups
    step_tokens     tokens of the longest call; None: what two graphs hold
    experts         the NPU's routed experts; None: the GPU has all, if there is one
    """

    precision: Precision = "auto"
    rules: Rules = field(default_factory=Rules)
    context: int = 256
    unfused: bool = True
    fused: frozenset[OpName] = frozenset()
    row_steps: int | None = None
    step_tokens: int | None = None
    experts: ExpertsChoice | None = None


class Planner:
    """Tables of one model on one profile; `solve` is then quick for any length.

    `rows` limits the row cuts of a matmul, by name; `heads` how many heads of attention the NPU may
    have (None: any number).
    """

    def __init__(
        self,
        spec: ModelGraph,
        profile: DeviceProfile,
        settings: PlannerSettings = PlannerSettings(),
        *,
        cost: CostModel | None = None,
        overheads: Overheads | None = None,
        rows: Mapping[OpName, Sequence[int]] | None = None,
        heads: tuple[int, ...] | None = None,
    ) -> None:
        self.rows, self.heads = {x: tuple(cuts) for x, cuts in (rows or {}).items()}, heads
        self.spec, self.profile, self.settings = spec, profile, settings
        self.cost = cost or CostModel(profile)
        self.kernels = KernelTimes(self.cost, spec.weight_format, settings.precision, spec.base)
        self.overheads = overheads or HostQueue.of(self.cost)
        self.power = PowerModel.of(self.cost)
        record = profile.devices.get("npu")
        self.sizes = prepared_sizes(record.capabilities) if record is not None else ()
        self.whole = self  # the same with all row cuts
        self._spaces: dict[_Cut, MatMulSpace] = {}
        self._candidates: dict[tuple[_Cut, int, Objective], list[Option]] = {}
        self._alone_s: dict[Scenario, float] = {}
        if not any(self.kernels.options.values()):
            raise _no_times(self)
        self._non_matmul_costs = NonMatmulCosts(self.cost, spec, self.overheads, settings.experts)
        self._head_shares = HeadShares(self.cost, spec, self.kernels, self.overheads)

    def objective(self, seconds: float = 1.0, joules: float = 0.0) -> Objective:
        """Return the weights of seconds and joules.

        Raises `PlanError` where the profile has no power.
        """
        if joules and self.power is None:
            raise PlanError(
                f"profile {self.profile.name} has no power figures, so energy cannot be planned: "
                "use --objective latency"
            )
        return Objective(seconds, joules, self.power)

    def solve(
        self,
        scenario: Scenario,
        objective: Objective | None = None,
        *,
        options: Candidates | None = None,
        non_matmul_device: DeviceKind | None = None,
    ) -> Solution:
        """Return the best plan of one scenario.

        `options` replaces what a matmul may choose from, by name; `non_matmul_device` fixes the
        device of the other operators. `PlanError` if nothing is possible.
        """
        objective = objective or self.objective()
        self._check_length(scenario)
        candidates, apart = dict(options or {}), _given_apart(self.spec, options or {})
        for name in self.names(unfused=self.settings.unfused and options is None):
            if name not in candidates and name not in apart:
                m = self.spec.tokens_of(name, scenario.m)
                candidates[name] = self.candidates(name, m, objective)
        search, heads = self._search(scenario, objective), self.heads
        times = self.non_matmul_times(scenario, non_matmul_device).values()
        best = search.best(times, candidates, heads)
        if self.settings.rules.shared and best is not None and len(best.devices) == 1:
            best = search.shared(best, candidates, heads) or best
        if best is None:
            raise PlanError(
                f"no device can run {self.spec.name} in {scenario.phase} at {scenario.m} tokens "
                f"with the formats of profile {self.profile.name}: measure one with "
                "`hetero profile`"
            )
        return best

    def with_graph_sizes(self, sizes: Iterable[int]) -> Planner:
        """Return the same with other NPU graphs."""
        profile = with_graph_sizes(self.profile, sizes)
        return self._with(profile=profile, cost=self.cost.with_profile(profile))

    def with_heads(self, heads: tuple[int, ...]) -> Planner:
        """Return the same with one of these numbers of attention's heads on the NPU, or none."""
        planner = copy.copy(self)  # the tables are shared, what depends on heads is not
        planner.heads, planner._alone_s = heads, {}
        planner.__dict__.pop("whole_rows", None)
        planner.whole = planner if self.whole is self else self.whole.with_heads(heads)
        return planner

    def with_rows(self, rows: Mapping[OpName, Sequence[int]]) -> Planner:
        """Return the same with these row cuts alone, which are prepared (`MatMulSpace`)."""
        limited = copy.copy(self)  # the tables are shared, and those of matmuls kept by row cuts
        limited.rows = {x: tuple(cuts) for x, cuts in rows.items()}
        limited.__dict__.pop("whole_rows", None)
        return limited

    def drifted(self, factors: Factors) -> Planner:
        """Return the same with devices that take so many times as long as the profile says."""
        return self._with(cost=DriftedCost(self.cost, factors))

    def _with(
        self,
        *,
        profile: DeviceProfile | None = None,
        cost: CostModel | None = None,
        settings: PlannerSettings | None = None,
    ) -> Planner:
        return Planner(
            self.spec,
            profile or self.profile,
            settings or self.settings,
            cost=cost or self.cost,
            overheads=self.overheads,
            rows=self.rows,
            heads=self.heads,
        )

    def candidates(self, name: OpName, m: int, objective: Objective) -> list[Option]:
        """Return what a matmul may choose from (`Chooser.options`), worked out once."""
        key = ((name, self.rows.get(name)), m, objective)
        if key not in self._candidates:
            chooser = Chooser(self.overheads, self.settings.rules, objective)
            self._candidates[key] = chooser.options(self.space(name), m)
        return self._candidates[key]

    def space(self, name: OpName) -> MatMulSpace:
        """Return the tables of a matmul, made on first use."""
        key = (name, self.rows.get(name))
        if key not in self._spaces:
            self._spaces[key] = MatMulSpace(
                self.kernels,
                *self.shape(name),
                row_steps=self.settings.row_steps,
                rows=key[1],
                overheads=self.overheads,
            )
        return self._spaces[key]

    def shape(self, name: OpName) -> tuple[int, int]:
        """Return (n, k) of a fused or separate matmul."""
        return self.spec.shapes[name]

    @property
    def step_tokens(self) -> int | None:
        """Return the tokens of the longest call: what the graphs hold, or less by the settings.

        None where the NPU takes any number.
        """
        return shortest(self._holds, self.settings.step_tokens)

    @property
    def _holds(self) -> int | None:
        return self.longest_with("gpu" if "gpu" in self._non_matmul_costs.devices else "npu")

    def longest_with(self, non_matmul_device: DeviceKind) -> int | None:
        """Return most tokens of a call whose other operators run on a device.

        What two graphs hold, what one does where they run in graphs as well; None without graphs.
        """
        return self.sizes[-1] * (1 if non_matmul_device == "npu" else 2) if self.sizes else None

    def non_matmul_devices(self, m: int) -> tuple[DeviceKind, ...]:
        """Return the devices that can run all other operators of a call of m tokens."""
        return tuple(
            kind
            for kind in self._non_matmul_costs.devices
            if kind == "gpu" or not self.sizes or m <= self.sizes[-1]
        )

    def non_matmul_times(
        self, scenario: Scenario, only: DeviceKind | None = None
    ) -> dict[DeviceKind, NonMatmulTimes]:
        """Return times of all other operators by device; of one device alone if it can run them."""
        context = 0 if scenario.phase == "prefill" else self.settings.context
        if scenario.context is not None:
            context = scenario.context
        able = self.non_matmul_devices(scenario.m)
        kinds = (only,) if only is not None and only in able else able
        times = {kind: self._non_matmul_costs.on(kind, scenario.m, context) for kind in kinds}
        if "gpu" in times and scenario.phase == "prefill" and self.heads != ():
            shared = self._head_shares.at(scenario.m, context)
            times["gpu"] = replace(times["gpu"], shared=shared) if shared else times["gpu"]
        return times

    def evaluate(
        self,
        scenario: Scenario,
        options: Mapping[OpName, Option],
        non_matmul_device: DeviceKind | None = None,
        objective: Objective | None = None,
        *,
        heads: Heads = 0,
    ) -> Solution:
        """Return the step with these options; only the non-matmul ops' device is free.

        So many `heads` of attention are the NPU's.
        """
        single: Candidates = {name: [o.unrestricted()] for name, o in options.items()}
        times = self.non_matmul_times(scenario, non_matmul_device).values()
        best = self._search(scenario, objective or Objective()).best(times, single, heads)
        assert best is not None, "these options leave no path"
        return best

    def _search(self, scenario: Scenario, objective: Objective) -> StepSearch:
        return StepSearch(
            spec=self.spec,
            overheads=self.overheads,
            power=self.power,
            margin=self.settings.rules.margin,
            scenario=scenario,
            objective=objective,
        )

    def single(self, scenario: Scenario, device: DeviceKind) -> Solution | None:
        """Return a step with all matmuls on one device, and the non-matmul ops too if it can.

        None if it cannot compute or hold them all.
        """
        if self.settings.experts is not None:
            without_choice = self._with(settings=replace(self.settings, experts=None))
            return without_choice.single(scenario, device)
        if not holds_alone(self, device):
            return None
        options: dict[OpName, Option] = {}
        for name in self.names(unfused=False):
            m = self.spec.tokens_of(name, scenario.m)
            candidates = self.candidates(name, m, Objective(power=self.power))
            fitting = [
                o.unrestricted() for o in candidates if o.mode == device and o.elapsed_s < INF
            ]
            if not fitting:
                return None
            options[name] = fitting[0]
        return self.evaluate(scenario, options, device)

    def alone_s(self, scenario: Scenario) -> float:
        """Return the seconds of a step on the best single device; infinite where none has it."""
        if scenario not in self._alone_s:
            singles = (self.whole_rows.single(scenario, kind) for kind in KINDS)
            self._alone_s[scenario] = min((x.seconds for x in singles if x), default=INF)
        return self._alone_s[scenario]

    def preparation_s(self, m: int) -> float:
        """Return the seconds to prepare the NPU's graphs of m tokens for every matmul.

        They are of each layer, or of one where layers share them. 0 if it was not measured.
        """
        weight_format, times = self.spec.weight_format, self.cost.preparation
        shared, total = times.layers_share("npu", weight_format), 0.0
        for block in (x for x in self.spec.kinds if not x.sampled):
            shapes = [self.shape(stage.name) for stage in block.stages]
            one = sum(times.seconds("npu", weight_format, *shape, m=m) for shape in shapes)
            total += one if shared else block.layers * one
        return total

    @cached_property
    def whole_rows(self) -> Planner:
        """Return the same without row cuts, as a device alone has it."""
        return self.with_rows(dict.fromkeys(self.names(unfused=True), ()))

    @property
    def experts(self) -> ExpertsChoice | None:
        """Return the NPU's routed experts; None where one device has all without a choice."""
        return self.settings.experts

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what to say of the operators' times."""
        return self._non_matmul_costs.notes

    @cached_property
    def model_fingerprint(self) -> str:
        """Return twelve hexadecimal digits of the shapes."""
        text = self.spec.model_dump_json(exclude=None if self.spec.also else {"also", "base"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def names(self, *, unfused: bool | None = None) -> Iterable[OpName]:
        """Return the matmuls that may be part of a plan.

        With `unfused` also the members of fused groups (by default as the settings say).
        """
        unfused = self.settings.unfused if unfused is None else unfused
        for stage in (*self.spec.block, *self.spec.tail):
            yield stage.name
            if unfused and stage.name not in self.settings.fused:
                yield from stage.members

    def _check_length(self, scenario: Scenario) -> None:
        if scenario.m < 1:
            raise PlanError(f"a step has at least one token, got {scenario.m}")
        if self._holds is not None and scenario.m > self._holds:
            raise PlanError(
                f"one call takes at most {self._holds} tokens (graphs of up to {self.sizes[-1]}), "
                f"got {scenario.m}: cut the prompt as `ExecutionPlan.steps` does"
            )


def for_two(planner: Planner) -> Planner:
    """Return the same for the GPU and the NPU alone; itself where there is no third device."""
    rules = planner.settings.rules
    if not (rules.third and planner.kernels.has("cpu")):
        return planner
    return planner._with(settings=replace(planner.settings, rules=replace(rules, third=False)))


def with_fused(planner: Planner, names: Iterable[OpName]) -> Planner:
    """Return the same, which tries no members of these groups."""
    return planner._with(settings=replace(planner.settings, fused=frozenset(names)))


def _given_apart(spec: ModelGraph, candidates: Candidates) -> set[OpName]:
    """Return the fused matmuls of which all members are given, and which need not be whole."""
    stages = (*spec.block, *spec.tail)
    return {x.name for x in stages if x.members and all(y in candidates for y in x.members)}


def _no_times(planner: Planner) -> PlanError:
    """Return what is raised where a profile lacks the formats of a model."""
    known = sorted({p.weight_format.value for p in planner.profile.predictors})
    return PlanError(
        f"profile {planner.profile.name} has no times of {planner.spec.weight_format.value} "
        f"(precision {planner.settings.precision}), only of {', '.join(known) or 'nothing'}: "
        "choose another --weights or --precision, or measure it with `hetero profile`"
    )


def shortest(*limits: int | None) -> int | None:
    """Return the least of some limits, of which None is no limit."""
    return min([x for x in limits if x is not None], default=None)


def with_graph_sizes(profile: DeviceProfile, sizes: Iterable[int]) -> DeviceProfile:
    """Return the profile of a device with these graphs prepared. Raises `PlanError`."""
    wanted = tuple(sorted(set(sizes)))
    npu = profile.devices.get("npu")
    if npu is None or not npu.capabilities.static_shapes:
        return profile
    if not wanted or min(wanted) < 1:
        raise PlanError(f"graph sizes are token counts from 1 on, got {list(wanted)}")
    capabilities = npu.capabilities.model_copy(update={"graph_sizes": wanted})
    devices = {**profile.devices, "npu": npu.model_copy(update={"capabilities": capabilities})}
    return profile.model_copy(update={"devices": devices})
