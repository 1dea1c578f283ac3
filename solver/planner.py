"""`Planner`: solves one model on one profile for any number of lengths (paper section 4.3)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.records import DeviceProfile
from hetero.solver.chain import Chain, Walk, solve_chain, walk
from hetero.solver.kernels import Kernels, Precision, graph_sizes
from hetero.solver.model_spec import ModelSpec
from hetero.solver.options import INF, Objective, Option, Power, Sync
from hetero.solver.plan import OpName, Phase, PlanError
from hetero.solver.steps import Rests, rest_options
from hetero.solver.tilings import Chooser, MatMulSpace, Rules

BLOCK: Final[tuple[tuple[OpName, tuple[OpName, ...]], ...]] = (
    ("qkv", ("q", "k", "v")), ("o", ()), ("gate_up", ("gate", "up")), ("down", ()),
)  # fmt: skip
Masks = Mapping[OpName, npt.NDArray[np.bool_]]
Extra = Mapping[OpName, list[Option]]


@dataclass(frozen=True)
class Settings:
    """What the user decides.

    context         tokens in the KV cache before a decode step
    row_steps       at most this many row cuts for each matmul; None: every alignment step
    apart           try q, k, v and gate, up apart
    """

    precision: Precision = "auto"
    rules: Rules = field(default_factory=Rules)
    context: int = 256
    apart: bool = True
    row_steps: int | None = None


class Scenario(NamedTuple):
    """One kind of step: a prompt of m tokens, or decoding m tokens."""

    phase: Phase
    m: int


class Solution(NamedTuple):
    """A solved scenario: option of every matmul by name, the rest's device, and the whole step."""

    scenario: Scenario
    options: dict[OpName, Option]
    rests: Rests
    chain: Chain
    walk: Walk
    joules: float | None

    @property
    def seconds(self) -> float:
        """Predicted time of the step."""
        return self.walk.seconds


class Planner:
    """Tables of one model on one profile; `solve` is then quick for any length."""

    def __init__(
        self,
        spec: ModelSpec,
        profile: DeviceProfile,
        settings: Settings = Settings(),
        *,
        cost: CostModel | None = None,
        sync: Sync | None = None,
    ) -> None:
        self.spec, self.profile, self.settings = spec, profile, settings
        self.cost = cost or CostModel(profile)
        self.kernels = Kernels(self.cost, spec.weight_format, settings.precision)
        self.sync = sync or Sync.of(self.cost)
        self.power = Power.of(self.cost)
        record = profile.devices.get("npu")
        self.sizes = graph_sizes(record) if record is not None else ()
        self._spaces: dict[OpName, MatMulSpace] = {}
        self._rests: dict[Scenario, dict[DeviceKind, Rests]] = {}
        self._refuse_foreign_formats()

    def objective(self, seconds: float = 1.0, joules: float = 0.0) -> Objective:
        """Weights of seconds and joules. Raises `PlanError` where the profile has no power."""
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
        masks: Masks | None = None,
        options: Extra | None = None,
        rest: DeviceKind | None = None,
    ) -> Solution:
        """The best plan of one scenario.

        `masks` limits the tilings of a matmul, by name; `options` replaces what it may choose from;
        `rest` fixes the device of the other operators. `PlanError` if nothing is possible.
        """
        objective = objective or self.objective()
        self._check_length(scenario)
        found = dict(options or {})
        chooser = Chooser(self.sync, self.settings.rules, objective)
        for name in self._names(apart=self.settings.apart and masks is None and options is None):
            if name not in found:
                m = 1 if name == "lm_head" else scenario.m
                mask = None if masks is None else masks.get(name)
                found[name] = chooser.options(self.space(name), m, mask=mask)
        best: Solution | None = None
        available = self.rests(scenario)
        for rests in [available[rest]] if rest in available else available.values():
            candidate = self._solve_groups(scenario, objective, rests, found)
            if candidate is not None and (best is None or candidate.chain.cost < best.chain.cost):
                best = candidate
        if best is None:
            raise PlanError(
                f"no device can run {self.spec.name} in {scenario.phase} at {scenario.m} tokens "
                f"with the formats of profile {self.profile.name}: measure one with "
                "`hetero profile`"
            )
        return best

    def with_graph_sizes(self, sizes: Iterable[int]) -> Planner:
        """The same with other NPU graphs."""
        return Planner(
            self.spec, with_graph_sizes(self.profile, sizes), self.settings, sync=self.sync
        )

    def space(self, name: OpName) -> MatMulSpace:
        """Tables of a matmul, made on first use."""
        if name not in self._spaces:
            n, k = self.shape(name)
            self._spaces[name] = MatMulSpace(self.kernels, n, k, row_steps=self.settings.row_steps)
        return self._spaces[name]

    def shape(self, name: OpName) -> tuple[int, int]:
        """(n, k) of a fused or separate matmul."""
        spec = self.spec
        d = spec.hidden_size
        match name:
            case "q":
                return spec.heads * spec.head_dim, d
            case "k" | "v":
                return spec.kv_heads * spec.head_dim, d
            case "gate" | "up":
                return spec.intermediate_size, d
            case _:
                matmul = spec.matmul(name)
                return matmul.n, matmul.k

    def rests(self, scenario: Scenario) -> dict[DeviceKind, Rests]:
        """Times of all other operators by device."""
        if scenario not in self._rests:
            context = 0 if scenario.phase == "prefill" else self.settings.context
            self._rests[scenario] = rest_options(
                self.cost, self.spec, self.sync, scenario.m, context
            )
        return self._rests[scenario]

    def evaluate(
        self, scenario: Scenario, options: Mapping[OpName, Option], rest: DeviceKind | None = None
    ) -> Solution:
        """The step with these options and no choice left but the rest's device."""
        single: Extra = {name: [replace(o, barred=frozenset())] for name, o in options.items()}
        available = self.rests(scenario)
        wanted = [available[rest]] if rest in available else list(available.values())
        objective = Objective()
        solved = [self._solve_groups(scenario, objective, r, single) for r in wanted]
        return min((s for s in solved if s is not None), key=lambda s: s.seconds)

    def single(self, scenario: Scenario, device: DeviceKind) -> Solution | None:
        """All matmuls on one device, and the rest too if it can; None if it cannot."""
        chooser = Chooser(self.sync, Rules(margin=0.0), Objective())
        options: dict[OpName, Option] = {}
        for name in self._names(apart=False):
            m = 1 if name == "lm_head" else scenario.m
            fitting = [
                replace(o, barred=frozenset())
                for o in chooser.options(self.space(name), m)
                if o.mode == device and o.together_s < INF
            ]
            if not fitting:
                return None
            options[name] = fitting[0]
        rest = device if device in self.rests(scenario) else None
        return self.evaluate(scenario, options, rest)

    @cached_property
    def model_fingerprint(self) -> str:
        """Twelve hexadecimal digits of the shapes."""
        return hashlib.sha256(self.spec.model_dump_json().encode()).hexdigest()[:12]

    def _names(self, *, apart: bool) -> Iterable[OpName]:
        known = {x.name for x in self.spec.matmuls}
        for name, parts in BLOCK:
            if name in known:
                yield name
                if apart:
                    yield from parts
        if "lm_head" in known:
            yield "lm_head"

    def _solve_groups(
        self, scenario: Scenario, objective: Objective, rests: Rests, options: Extra
    ) -> Solution | None:
        """Try fused groups and their parts; fused unless apart wins by the margin."""
        choices = [
            ((name,), parts) if parts and all(p in options for p in parts) else ((name,),)
            for name, parts in BLOCK
            if name in options or any(p in options for p in parts)
        ]
        best: Solution | None = None
        for groups in itertools.product(*choices):
            found = self._solve_chain(scenario, objective, rests, options, groups)
            if found is None:
                continue
            if best is None or self._beats(found, best, objective):
                best = found
        return best

    def _beats(self, found: Solution, best: Solution, objective: Objective) -> bool:
        """Whether a chain with groups apart is better by the margin on the groups that differ."""
        differ = set(best.options) - set(found.options)
        weight = sum(
            self.spec.layers * objective.cost(replace(best.options[x], barred=frozenset()), 0)
            for x in differ
        )
        return found.chain.cost < best.chain.cost - self.settings.rules.margin * weight

    def _solve_chain(
        self,
        scenario: Scenario,
        objective: Objective,
        rests: Rests,
        options: Extra,
        groups: tuple[tuple[OpName, ...], ...],
    ) -> Solution | None:
        between = {"qkv": rests.attention, "o": rests.norm, "gate_up": rests.activation}
        block: list[list[Option]] = []
        names: list[OpName | None] = []
        for (fused, _), members in zip(BLOCK, groups, strict=True):
            for name in members:
                block.append(options[name])
                names.append(name)
            block.append([between.get(fused, rests.norm)])
            names.append(None)
        tail = [options["lm_head"]] if "lm_head" in options else []
        chain = solve_chain([[rests.head]], block, tail, self.spec.layers, objective)
        if chain is None:
            return None
        chosen = {x: o for x, o in zip(names, chain.block, strict=True) if x is not None}
        if tail:
            chosen["lm_head"] = chain.tail[0]
        walked = walk(chain, self.spec.layers)
        joules = None
        if self.power is not None:
            power = self.power
            joules = sum(count * o.joules(power, s) for o, s, count in walked.steps)
        return Solution(scenario, chosen, rests, chain, walked, joules)

    def _check_length(self, scenario: Scenario) -> None:
        if scenario.m < 1:
            raise PlanError(f"a step has at least one token, got {scenario.m}")
        if self.sizes and scenario.m > 2 * self.sizes[-1]:
            raise PlanError(
                f"{scenario.m} tokens are more than two of the largest graph ({self.sizes[-1]}): "
                f"longer prompts run in chunks, so plan lengths up to {2 * self.sizes[-1]}"
            )

    def _refuse_foreign_formats(self) -> None:
        if not any(self.kernels.options.values()):
            known = sorted({p.weight_format.value for p in self.profile.predictors})
            raise PlanError(
                f"profile {self.profile.name} has no times of {self.spec.weight_format.value} "
                f"(precision {self.settings.precision}), only of {', '.join(known) or 'nothing'}: "
                "choose another --weights or --precision, or measure it with `hetero profile`"
            )


def with_graph_sizes(profile: DeviceProfile, sizes: Iterable[int]) -> DeviceProfile:
    """The profile of a device with these graphs prepared. Raises `PlanError`."""
    wanted = tuple(sorted(set(sizes)))
    npu = profile.devices.get("npu")
    if npu is None or not npu.capabilities.static_shapes:
        return profile
    if not wanted or min(wanted) < 1:
        raise PlanError(f"graph sizes are token counts from 1 on, got {list(wanted)}")
    capabilities = npu.capabilities.model_copy(update={"graph_sizes": wanted})
    devices = {**profile.devices, "npu": npu.model_copy(update={"capabilities": capabilities})}
    return profile.model_copy(update={"devices": devices})
