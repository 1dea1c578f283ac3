"""The search for the best step of one call: what is fused, and the option of each matmul."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from hetero.profiler.model_graph import ModelGraph, OpName, Stage
from hetero.solver.fused_limit import LONGEST_FUSED
from hetero.solver.heads import Heads, allowed
from hetero.solver.layer_dp import PricedOptions, Repeated, priced, solve_layers
from hetero.solver.non_matmul import NonMatmulTimes
from hetero.solver.options import Objective, Option, PowerModel
from hetero.solver.overheads import Overheads
from hetero.solver.solution import Scenario, Solution

Candidates: TypeAlias = Mapping[OpName, list[Option]]
# What computes a layer's matmuls: of each the whole, or its members.
Groups: TypeAlias = tuple[tuple[OpName, ...], ...]
MAX_SAVED: Final = (
    0.8  # of a step, by fused launches: what is measured of short launches has limits
)


@dataclass(frozen=True, kw_only=True)
class StepSearch:
    """The steps of one scenario by one objective, from the candidates of its matmuls.

    `margin` is by how much a step with unfused groups must be better (`Rules.margin`).
    """

    spec: ModelGraph
    overheads: Overheads
    power: PowerModel | None
    margin: float
    scenario: Scenario
    objective: Objective

    def best(
        self, times: Iterable[NonMatmulTimes], candidates: Candidates, heads: Heads
    ) -> Solution | None:
        """Return the best step, with the other operators on any device of `times`.

        None where no device can run it.
        """
        times = list(times)
        matmuls = {name: priced(x, self.objective) for name, x in candidates.items()}
        solved = [self._with_groups(x, matmuls, heads) for x in times]
        best = min((s for s in solved if s is not None), key=self._cost, default=None)
        if best is None or best.alone_on("gpu"):
            return best
        most = 1.0 if best.alone_on("npu") else 1 - self.margin  # of the GPU alone
        chained = self._chained(times, candidates, heads)
        return next((x for x in chained if self._cost(best) > most * self._cost(x)), best)

    def _chained(
        self, times: Iterable[NonMatmulTimes], candidates: Candidates, heads: Heads
    ) -> Iterator[Solution]:
        """Yield the step on the GPU alone, where its launches cost less if all are its.

        The layers' search adds up options, so it cannot see that one cut takes this from all: cuts
        must be better together by the margin, too.
        """
        whole = {name: [o.unrestricted() for o in x if o.mode == "gpu"]
                 for name, x in candidates.items()}  # fmt: skip
        has_all = all(whole.values()) and (not isinstance(heads, int) or heads == 0)
        if has_all and self._chained_s > 0:
            matmuls = {name: priced(x, self.objective) for name, x in whole.items()}
            alone = (self._with_groups(x, matmuls, 0) for x in times if x.device == "gpu")
            yield from (x for x in alone if x is not None)

    def _cost(self, solution: Solution) -> float:
        """Return the cost of a step with what it takes besides its operators."""
        return solution.path.cost + self.objective.idle * solution.around_s

    def shared(self, alone: Solution, candidates: Candidates, heads: Heads) -> Solution | None:
        """Return the best step of a prompt in which a matmul leaves the one device of `alone`.

        Margin or not, and the others stay; None where no matmul can, and in decoding.
        """
        if self.scenario.phase != "prefill":
            return None
        tried: list[Solution | None] = []
        for name in candidates:
            moved = [o.unrestricted() for o in candidates[name] if o.devices != alone.devices]
            if moved and name not in self.spec.sampled:
                choice = {**candidates, name: moved}
                tried.append(self.best([alone.non_matmul], choice, heads))
        shared = [s for s in tried if s is not None and len(s.devices) > 1]
        return min(shared, key=lambda s: s.path.cost, default=None)

    def _with_groups(
        self,
        non_matmul: NonMatmulTimes,
        matmuls: Mapping[OpName, PricedOptions],
        heads: Heads,
    ) -> Solution | None:
        """Try fused groups and their parts; fused unless unfused wins by the margin."""
        shared = {
            name: allowed(
                whole, non_matmul.shared.get(name, ()), heads, self.margin, self.objective
            )
            for name, whole in non_matmul.after.items()
        }
        after = {name: priced(options, self.objective) for name, options in shared.items()}
        choices = [
            [
                [g for g in ((stage.name,), stage.members) if g and all(p in matmuls for p in g)]
                for stage in block.stages
            ]
            for block in self.spec.kinds
        ]
        if not all(groups for block in choices for groups in block):
            return None
        chosen = [tuple(groups[0] for groups in block) for block in choices]
        best: Solution | None = None
        for i, block in enumerate(choices):  # one kind of layers after the other
            before = chosen[i]
            for groups in itertools.product(*block):
                if best is not None and groups == before:
                    continue
                tried = [*chosen[:i], groups, *chosen[i + 1 :]]
                solution = self._layers(non_matmul, matmuls, after, tried)
                if solution is not None and (best is None or self._beats(solution, best)):
                    best, chosen = solution, tried
        return best

    def _beats(self, solution: Solution, best: Solution) -> bool:
        """Return whether a path with groups unfused is better by the margin where they differ."""
        differ = set(best.options) - set(solution.options)
        weight = sum(
            self.spec.counts[x] * self.objective.cost(best.options[x].unrestricted(), 0)
            for x in differ
        )
        return solution.path.cost < best.path.cost - self.margin * weight

    def _layers(
        self,
        non_matmul: NonMatmulTimes,
        matmuls: Mapping[OpName, PricedOptions],
        after: Mapping[OpName, PricedOptions],
        groups: Sequence[Groups],
    ) -> Solution | None:
        tail = [(stage, (stage.name,)) for stage in self.spec.tail if stage.name in matmuls]
        runs = [
            _Run(matmuls, after, zip(block.stages, own, strict=True))
            for block, own in zip(self.spec.kinds, groups, strict=True)
        ]
        ending = _Run(matmuls, after, tail)
        prefill = self.scenario.phase == "prefill"
        kinds = [
            Repeated(run.stages, block.layers, prefill and block.sampled)
            for run, block in zip(runs, self.spec.kinds, strict=True)
        ]
        head = priced([non_matmul.head], self.objective)
        path = solve_layers([head], kinds, ending.stages)
        if path is None:
            return None
        chosen: dict[OpName, Option] = {}
        others: list[Option] = []
        for run, kind in zip(runs, path.blocks, strict=True):
            chosen |= run.chosen(kind.options)
            others += run.others(kind.options)
        chosen |= ending.chosen(path.tail)
        around_s = self.overheads.around_s(non_matmul.device)
        attention = next((o for o in others if o.rows), None)
        sampled = self.spec.sampled_in(self.scenario.phase)
        solution = Solution(
            self.scenario, chosen, non_matmul, path, self.power, around_s, attention, sampled
        )
        if not solution.alone_on("gpu"):
            return solution
        saved_s = min(self._chained_s, MAX_SAVED * solution.seconds)
        return solution._replace(around_s=around_s - saved_s)

    @cached_property
    def _chained_s(self) -> float:
        """Return what the step takes less on the GPU alone than its launches one by one."""
        launches = len(self.spec.nodes)
        weights = sum(x.count * x.n * x.k for x in self.spec.matmuls)
        prompt = self.scenario.phase == "prefill"
        if prompt and 2 * weights * self.scenario.m > LONGEST_FUSED * launches:
            return 0.0
        return self.overheads.chained_s(launches)


class _Run:
    """Stages of a path: matmuls of plans, each with the operators after it."""

    def __init__(
        self,
        matmuls: Mapping[OpName, PricedOptions],
        after: Mapping[OpName, PricedOptions],
        groups: Iterable[tuple[Stage, tuple[OpName, ...]]],
    ) -> None:
        self.stages: list[PricedOptions] = []
        self._names: list[OpName | None] = []
        for stage, members in groups:
            self.stages += [matmuls[name] for name in members]
            self._names += members
            if stage.name in after:
                self.stages.append(after[stage.name])
                self._names.append(None)

    def chosen(self, options: Sequence[Option]) -> dict[OpName, Option]:
        """Return the options of the matmuls, of one option for each stage."""
        named = zip(self._names, options, strict=True)
        return {name: option for name, option in named if name is not None}

    def others(self, options: Sequence[Option]) -> list[Option]:
        """Return the options of the operators after matmuls."""
        return [o for name, o in zip(self._names, options, strict=True) if name is None]
