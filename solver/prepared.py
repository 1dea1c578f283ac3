"""`PreparedSolver`: plans for prompt lengths never seen, within what is prepared (docs: solver.md).

What takes time to prepare is fixed first: the row cuts of every matmul and the rows that live on
each device. Within them the best plan of one length takes a millisecond or two.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.profiler.errors import ProfileError
from hetero.profiler.model_graph import ModelGraph, OpName
from hetero.profiler.records import DECODE_TOKENS, DeviceProfile
from hetero.solver.build import assemble, band_of, band_request, entry, share_of
from hetero.solver.chooser import Chooser
from hetero.solver.cuts import row_cuts
from hetero.solver.decode_bands import BandRequest, decode_bands
from hetero.solver.drift import Factors
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.in_flight import in_flight_of
from hetero.solver.joint import JointSpace
from hetero.solver.joint_plan import solve_separately, solve_within
from hetero.solver.options import Option
from hetero.solver.plan import PHASES, Memory, NonMatmulDevices, Phase
from hetero.solver.planner import Planner, shortest
from hetero.solver.prompts import Prompt, solve_prompt
from hetero.solver.request import DECODE, MAX_LENGTHS, PlanRequest, scenarios_of
from hetero.solver.residency import mask_of
from hetero.solver.sizing import planner_for
from hetero.solver.solution import Scenario, Solution
from hetero.solver.weight_memory import (
    Limits,
    ResidentRows,
    memory_of_rows,
    resident_by_op,
)

CUTS: Final = 4  # row cuts of one matmul that are prepared
LONGEST: Final = 2048  # tokens whose GPU times are looked up ahead on devices without graphs
MAX_CACHED: Final = 256  # plans of single lengths that are remembered


def spread_lengths(graph_sizes: Sequence[int], longest: int) -> tuple[int, ...]:
    """Return the lengths that stand for all prompts of up to `longest` tokens.

    The graphs, a little more than each, and between them.
    """
    sizes = [g for g in graph_sizes if g > DECODE_TOKENS] or [32, 64, 128, 256, 512, 1024]
    wanted = {m for g in sizes for m in (g, g + max(g // 16, 1), g + g // 4, g + g // 2)}
    lengths = sorted(m for m in wanted if m <= longest) or [longest]
    return tuple(lengths[:: -(-len(lengths) // MAX_LENGTHS)])


def prepare_solver(
    spec: ModelGraph, profile: DeviceProfile, request: PlanRequest, *, cuts: int = CUTS
) -> PreparedSolver:
    """Return a solver for any prompt length, with at most `cuts` row cuts of each matmul.

    They are chosen for the lengths of the request. Raises `PlanError` or `ProfileError`.

    Of a model that is stored in several formats prompts and decoding take the fastest each, within
    one memory budget; formats that the profile does not know are left out.
    """
    request.check()
    if spec.also:
        return _fastest_formats(spec, profile, request, cuts)
    planner, notes = planner_for(spec, profile, request, unfused=False)
    return PreparedSolver(planner, request, cuts=cuts, notes=notes)


def _fastest_formats(
    spec: ModelGraph,
    profile: DeviceProfile,
    request: PlanRequest,
    cuts: int,
) -> PreparedSolver:
    """Return the best of each format alone and of the fastest ones of prompts and of decoding."""
    solvers: list[PreparedSolver] = []
    planners: list[Planner] = []
    failed: list[PlanError | ProfileError] = []
    for weight_format in (spec.weight_format, *spec.also):
        try:
            own = spec.in_format(weight_format)
            planner, notes = planner_for(own, profile, request, unfused=False)
            planners.append(planner)
            solvers.append(PreparedSolver(planner, request, cuts=cuts, notes=notes))
        except (PlanError, ProfileError) as error:
            failed.append(error)
    if len(planners) > 1:
        free = replace(request, memory_budget_bytes=None)
        if request.memory_budget_bytes is None:
            each = solvers
        else:
            each = [PreparedSolver(planner, free, cuts=cuts) for planner in planners]
        prompts, answers = (
            min(range(len(each)), key=[x.expected_s(free, phase) for x in each].__getitem__)
            for phase in PHASES
        )
        if prompts != answers:
            first, decoder = planners[prompts], planners[answers]
            try:
                solvers.append(
                    PreparedSolver(first, request, cuts=cuts, notes=notes, decoder=decoder)
                )
            except PlanError as error:
                failed.append(error)
    if not solvers:
        raise failed[0]
    return min(solvers, key=lambda x: sum(x.expected_s(request, phase) for phase in PHASES))


def _sampled_options(planner: Planner, solution: Solution) -> dict[OpName, Option]:
    """Return what a solution chose for the matmuls of sampled rows, free of what is around them."""
    options, sampled = solution.options, planner.spec.sampled
    return {name: x.unrestricted() for name, x in options.items() if name in sampled}


def resident_alone(
    planner: Planner, resident: Mapping[OpName, ResidentRows], alone: Mapping[Phase, DeviceKind]
) -> dict[OpName, ResidentRows]:
    """Return the rows on each device, all of them where one is alone in a phase."""
    kinds, everywhere = set(alone.values()), len(alone) == len(PHASES)

    def of(name: OpName, rows: ResidentRows) -> ResidentRows:
        n, _ = planner.shape(name)
        if name in planner.spec.sampled:
            whole = {"gpu": ResidentRows(0, 0), "npu": ResidentRows(n, n)}
            return whole[alone["decode"]] if "decode" in alone else rows
        npu, gpu = (0, n) if everywhere else rows[:2]
        return ResidentRows(n if "npu" in kinds else npu, 0 if "gpu" in kinds else gpu)

    return {name: of(name, rows) for name, rows in resident.items()}


def joint_space(
    planner: Planner, names: Sequence[OpName], resident: Mapping[OpName, ResidentRows]
) -> JointSpace | None:
    """Return the tilings of a block's matmuls in one table; None where one has none on the NPU."""
    spaces = {name: planner.space(name) for name in names}
    if not all(space.has_npu for space in spaces.values()):
        return None
    for space in spaces.values():
        space.kernels.remember("npu", space.sizes, space.rows.tolist(), space.k)
    longest = planner.longest_with("gpu")
    return JointSpace(spaces, resident, longest or LONGEST)


class PreparedSolver:
    """Solves one length at a time with prepared row cuts and residency.

    `plan` is the plan that it was prepared with; `plan_for` has entries of the same kind for any
    token count. `rows` are the row cuts that may be used, `npu_head_counts` the numbers of
    attention's heads on the NPU, `resident` the rows on each device, `alone` the device that
    computes all of a phase, for phases in which one does (`alone_in`). Not for several threads at
    once.
    """

    alone: Mapping[Phase, DeviceKind] = MappingProxyType({})
    _bands: BandRequest | None = None  # of decode's, once asked for
    _stored: Mapping[OpName, ResidentRows] = MappingProxyType({})  # rows with those of bands

    def __init__(
        self,
        planner: Planner,
        request: PlanRequest,
        *,
        cuts: int = CUTS,
        notes: Sequence[str] = (),
        decoder: Planner | None = None,
    ) -> None:
        self._request, said = request, list(notes)
        calls = request.in_calls(planner.step_tokens)
        scenarios = scenarios_of(calls.seq_lens)
        self._objective = planner.objective(*request.weights)
        names: list[OpName] = [x.name for x in planner.spec.matmuls]
        prompts = scenarios if decoder is None else scenarios[:-1]
        rows = {x: row_cuts(planner, x, prompts, self._objective, cuts) for x in names}
        self.rows = rows
        self._planner = planner.with_rows(rows)
        self._decoder = self._planner
        if decoder is None:
            solutions = solve_within(self._planner, scenarios, self._objective, calls, said)
            self.resident = resident_by_op(self._planner, solutions)
        else:
            few = {x: row_cuts(decoder, x, [DECODE], self._objective, cuts) for x in names}
            self._decoder = decoder.with_rows(few)
            parts = [(self._planner, prompts), (self._decoder, [DECODE])]
            before, (decoding,) = solve_separately(parts, self._objective, calls, said)
            sampled = _sampled_options(planner, decoding)
            before = [
                self._planner.evaluate(
                    s.scenario,
                    {**s.options, **sampled},
                    s.non_matmul.device,
                    self._objective,
                    heads=s.heads,
                )
                for s in before
            ]
            solutions = [*before, decoding]
            self.resident = resident_by_op(self._planner, [s.without_head() for s in before])
        self.npu_head_counts = tuple(sorted({s.heads for s in solutions if s.heads}))
        self._planner = self._planner.with_heads(self.npu_head_counts)
        if decoder is None:
            self._decoder = self._planner
        self._decoding = solutions[-1]
        self._chooser = Chooser(planner.overheads, planner.settings.rules, self._objective)
        self._non_matmul_devices = {s.scenario.phase: s.non_matmul.device for s in solutions}
        self._block: list[OpName] = [x for x in names if x not in planner.spec.sampled]
        self._joint = joint_space(self._planner, self._block, self.resident)
        self._sampled = {s.scenario.phase: _sampled_options(planner, s) for s in solutions}
        self._plans: dict[tuple[Phase, int], ExecutionPlan] = {}
        longest = shortest(
            planner.step_tokens, planner.longest_with(self._non_matmul_devices["prefill"])
        )
        plan = assemble(self._planner, solutions, request, said, decoder=self._decoder)
        fixed = {"step_tokens": longest, "step_sizes": ()}
        flights = in_flight_of(self._planner, solutions, request)
        self.plan = plan.model_copy(update={**fixed, "in_flight": flights})
        self._sampled_entries = tuple(x for x in self.plan.ops if x.op in planner.spec.sampled)

    @property
    def formats(self) -> tuple[WeightFormat, WeightFormat]:
        """Return the formats of prompts, and of decoding."""
        return self._planner.spec.weight_format, self._decoder.spec.weight_format

    def expected_s(self, request: PlanRequest, phase: Phase) -> float:
        """Return the seconds of the request's prompts, as often as each comes.

        For decoding, of the tokens decoded for one of each.
        """
        totals = [x for x in self.plan.totals if x.phase == phase]
        if phase == "decode":
            return len(request.distribution) * request.weight(DECODE) * totals[0].predicted_s
        return sum(request.distribution[x.m] * x.predicted_s for x in totals)

    def plan_for(self, m: int, phase: Phase = "prefill") -> ExecutionPlan:
        """Return the plan of one call of m tokens, in at most 2 ms (Llama-3-8B, one core of a PC).

        Raises `PlanError` for more tokens than two graphs hold: `plan.steps` cuts such prompts.
        """
        if (phase, m) not in self._plans:
            if len(self._plans) >= MAX_CACHED:
                self._plans.pop(next(iter(self._plans)))
            collecting = gc.isenabled()
            try:  # around `disable` too: a signal handler may raise right after it
                gc.disable()  # a prompt waits, and a collection costs as much as several plans
                self._plans[phase, m] = self._solve(Scenario(phase, m))
            finally:
                if collecting:
                    gc.enable()
        return self._plans[phase, m]

    def drifted(self, factors: Factors) -> PreparedSolver:
        """Return the same row cuts on devices that take so many times as long as the profile says.

        The GPU may compute any row of a matmul that it has rows of (it maps the packed weights),
        the NPU only rows that it holds. `plan` has decoding and the first length of this one's;
        `plan_for` the others.
        """
        changed = copy.copy(self)
        changed.resident = {
            name: ResidentRows(
                resident.npu, 0 if resident.gpu < self._planner.shape(name)[0] else resident.gpu
            )
            for name, resident in self.resident.items()
        }
        changed._planner = self._planner.drifted(factors)
        separate = self._decoder is not self._planner
        changed._decoder = self._decoder.drifted(factors) if separate else changed._planner
        changed._joint = joint_space(changed._planner, self._block, changed.resident)
        changed._plans = {}
        changed._sampled = dict(self._sampled) if separate else {x: {} for x in self._sampled}
        changed.alone = {phase: changed._fastest_alone(phase) for phase in self.alone}
        changed.plan = changed._planned([min(self.plan.listed_tokens)])
        if changed._bands is not None:
            changed._bands = replace(changed._bands, limits=Limits(copies=0.0))
            changed._move_decoding()
        return changed

    def alone_in(
        self, devices: Mapping[Phase, DeviceKind], factors: Factors = MappingProxyType({})
    ) -> PreparedSolver:
        """Return the same where one device computes all of some phases, but for the output head.

        The head is computed where decoding is. A device that is alone in a phase holds all rows.
        `factors` are seconds of the opened devices over those of the profile. `drifted` solvers
        choose the devices of these phases again, among those that this one has in some phase.
        Raises `PlanError` where prompts and answers have formats of their own, or a device cannot
        compute all.
        """
        if self._decoder is not self._planner:
            raise PlanError("prompts and answers in different formats are planned together")
        changed = copy.copy(self)
        changed.alone = {**self.alone, **devices}
        everywhere = len(changed.alone) == len(PHASES)
        planner = self._planner
        if everywhere:
            changed.rows = dict.fromkeys(self.rows, ())
            planner = planner.with_rows(changed.rows)
        if "prefill" in changed.alone:
            changed.npu_head_counts = ()
            planner = planner.with_heads(())
        changed._planner = changed._decoder = planner.drifted(factors)
        changed.resident = resident_alone(self._planner, self.resident, changed.alone)
        changed._non_matmul_devices = {**self._non_matmul_devices, **devices}
        changed._joint = joint_space(changed._planner, self._block, changed.resident)
        changed._plans = {}
        changed._sampled = {x: {} for x in self._sampled}
        longest = changed._longest
        lengths = [m for m in self.plan.listed_tokens if longest is None or m <= longest]
        changed.plan = changed._planned(lengths or [min(self.plan.listed_tokens[0], longest or 1)])
        return changed

    @property
    def _longest(self) -> int | None:
        """Return the tokens of the longest call."""
        device = self.alone.get("prefill", self._non_matmul_devices["prefill"])
        return shortest(self.plan.step_tokens, self._planner.longest_with(device))

    def memory_in(self, devices: Mapping[Phase, DeviceKind]) -> Memory:
        """Return the bytes of the weights of `alone_in`."""
        rows = resident_alone(self._planner, self.resident, {**self.alone, **devices})
        return memory_of_rows(self._planner, rows)

    def with_bands(self, longest: int) -> PreparedSolver:
        """Return the same with decode steps that move to other devices (`decode_bands`).

        They do in contexts of up to `longest` tokens; `drifted` solvers decide it again, within the
        rows that this one holds. The same solver where nothing moves.
        """
        if self._decoder is not self._planner:
            return self
        changed, apart = copy.copy(self), self.plan.apart
        changed._bands = band_request(self._planner, self._request, longest, apart=apart)
        changed._stored = self.resident
        changed._move_decoding()
        return changed if changed.plan.bands else self

    def _move_decoding(self) -> None:
        """Set the bands of the plan, and the rows that they hold."""
        if self._bands is None:
            return
        decoding = self.solution_for(DECODE)
        bands = decode_bands(self._planner, decoding, self._stored, self._bands)
        for band in bands:
            self._stored = band.resident
        update = {"bands": tuple(band_of(self._planner, band) for band in bands)}
        self.plan, self._plans = self.plan.model_copy(update=update), {}

    def _fastest_alone(self, phase: Phase) -> DeviceKind:
        """Return the device that computes a phase fastest alone, of those that could be prepared.

        They are prepared for the other operators of some phase; rows may be missing.
        """
        m = 1 if phase == "decode" else self.plan.listed_tokens[len(self.plan.listed_tokens) // 2]
        seconds: dict[DeviceKind, float] = {}
        for kind in sorted(set(self._non_matmul_devices.values())):
            with suppress(PlanError):
                seconds[kind] = self._solved_alone(Scenario(phase, m), kind).seconds
        return min(seconds, key=seconds.__getitem__, default=self.alone[phase])

    def _planned(self, lengths: Sequence[int]) -> ExecutionPlan:
        """Return the plan of decoding and of prompts of these lengths, as far as it is prepared."""
        options = self.solution_for(DECODE).options
        sampled = {op.op: options[op.op] for op in self._sampled_entries if op.op in options}
        free = {name: option.unrestricted() for name, option in sampled.items()}
        self._sampled = dict.fromkeys(self._sampled, free)
        self._sampled_entries = tuple(
            entry(self._decoder, Scenario(op.phase, 1), op.op, sampled[op.op])
            for op in self._sampled_entries
        )
        parts = [self.plan_for(1, "decode"), *map(self.plan_for, lengths)]
        ops = [op for part in parts for op in part.ops if op.op in self._block]
        devices = {**self._non_matmul_devices, **self.alone}
        update = {
            "ops": (*ops, *self._sampled_entries),
            "totals": (),
            "phases": (),
            "residency": {},
            "attention": tuple(x for part in parts[1:] for x in part.attention),
            "non_matmul": NonMatmulDevices(prefill=devices["prefill"], decode=devices["decode"]),
        }
        if "prefill" in self.alone:
            update |= {"in_flight": (), "attention": (), "step_tokens": self._longest}
        return self.plan.model_copy(update=update)

    def _solve(self, scenario: Scenario) -> ExecutionPlan:
        solution = self.solution_for(scenario)
        planner = self._decoder if scenario.phase == "decode" else self._planner
        ops = [entry(planner, scenario, name, solution.options[name]) for name in self._block]
        update: dict[str, object] = {"ops": (*ops, *self._sampled_entries), "totals": ()}
        if self.npu_head_counts and scenario.phase == "prefill":
            update["attention"] = (share_of(planner, solution),)
        return self.plan.model_copy(update=update)

    def prompt(self, tokens: int, context: int = 0) -> Prompt:
        """Return a prompt of any length after `context` tokens, in the plan's calls."""
        return solve_prompt(self.plan.steps(tokens), self.solution_for, context)

    def solution_for(self, scenario: Scenario) -> Solution:
        """Return the best options of one call and its predicted seconds."""
        if scenario.phase == "decode" and self._decoder is not self._planner:
            known = self._decoding
            return self._decoder.evaluate(
                scenario, known.options, known.non_matmul.device, self._objective
            )
        if (alone := self.alone.get(scenario.phase)) is not None:
            return self._solved_alone(scenario, alone)
        return self._planner.solve(
            scenario,
            self._objective,
            options=self._candidates(scenario),
            non_matmul_device=self._non_matmul_devices[scenario.phase],
        )

    def _solved_alone(self, scenario: Scenario, kind: DeviceKind) -> Solution:
        """Return the call on one device but for the output head. Raises `PlanError`."""
        sampled = self._planner.spec.sampled
        options = {
            name: [x.unrestricted() for x in tilings if name in sampled or x.devices == {kind}]
            for name, tilings in self._candidates(scenario).items()
        }
        solution = self._planner.solve(
            scenario, self._objective, options=options, non_matmul_device=kind
        )
        if solution.devices != {kind}:
            raise PlanError(f"the {kind} alone cannot compute {self._planner.spec.name}")
        return solution

    def _candidates(self, scenario: Scenario) -> dict[OpName, list[Option]]:
        """Return what each matmul may choose from, within what is prepared."""
        if self._joint is not None and scenario.m <= self._joint.longest:
            options = self._joint.options(scenario.m, self._chooser)
        else:
            options = {name: self._options(name, scenario.m) for name in self._block}
        sampled = self._sampled.get(scenario.phase, {})
        for name in self._planner.spec.sampled & self.resident.keys() - sampled.keys():
            options[name] = self._options(name, 1)
        return options | {name: [option] for name, option in sampled.items()}

    def _options(self, name: OpName, m: int) -> list[Option]:
        resident = self.resident[name]
        space = self._planner.space(name)
        grid = space.grid(m)
        mask = mask_of(grid, resident, m, space.n)
        return self._chooser.options(space, m, grid=grid, mask=mask, gpu_alone=resident.gpu == 0)
