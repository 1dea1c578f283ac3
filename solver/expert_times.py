"""Seconds of routed experts that two devices share, by how often each expert is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.ops import Add, Experts
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.cost import CostModel, experts_s
from hetero.profiler.model_graph import ModelGraph
from hetero.profiler.records import phase_of
from hetero.solver.expert_shares import Routing
from hetero.solver.overheads import Overheads
from hetero.solver.tilings import contended

Ids: TypeAlias = tuple[int, ...]
Steps: TypeAlias = Sequence[tuple[int, float]]  # tokens of a call, and how often it comes


class RoutedLayer(NamedTuple):
    """A layer's experts, and of each the share of tokens that choose it."""

    layer: int
    op: Experts
    shares: tuple[float, ...]

    @property
    def hottest(self) -> Ids:
        """Return the experts' numbers, the most chosen first."""
        return tuple(sorted(range(self.op.experts), key=lambda e: (-self.shares[e], e)))


class ExpertTimes:
    """Predicts layers whose `npu` experts are the NPU's, and the others the GPU's.

    The GPU's are submitted before the NPU's run, so both work at once; a sum follows. Of a decoded
    token's experts the NPU has now more, now fewer, so what is predicted is the mean over all
    numbers of them; a prompt's tokens are as many as the shares say.
    """

    def __init__(
        self, cost: CostModel, graph: ModelGraph, overheads: Overheads, routing: Routing | None
    ) -> None:
        self.cost, self._graph, self._overheads, self._routing = cost, graph, overheads, routing
        self._known: dict[tuple[DeviceKind, Experts, float, int], float] = {}
        self._joins: dict[tuple[int, int], float] = {}

    @cached_property
    def layers(self) -> tuple[RoutedLayer, ...]:
        """Return all layers with routed experts."""
        return tuple(
            RoutedLayer(node.layer, node.op, self._shares(node.layer, node.op))
            for node in self._graph.nodes
            if isinstance(node.op, Experts) and node.layer is not None
        )

    def _shares(self, layer: int, op: Experts) -> tuple[float, ...]:
        counts = None if self._routing is None else self._routing.of(layer, op.experts)
        if counts is None:
            return (op.chosen / op.experts,) * op.experts
        total = sum(counts)
        return tuple(min(op.chosen * x / total, 1.0) for x in counts)

    def missed(self, room: float) -> float:
        """Return the share of a token's experts beyond the busiest, which are `room` of all."""
        shares = sorted((x for routed in self.layers for x in routed.shares), reverse=True)
        kept = int(room * len(shares))
        return sum(shares[kept:]) / sum(shares)

    def steps_s(self, routed: RoutedLayer, npu: Ids, steps: Steps) -> float:
        """Return the seconds of a layer in several calls."""
        return sum(weight * self.seconds(routed, npu, m) for m, weight in steps)

    def seconds(self, routed: RoutedLayer, npu: Ids, m: int) -> float:
        """Return the seconds of a layer for m tokens."""
        op, shares = routed.op, np.asarray(routed.shares)
        on_npu = np.zeros(op.experts, bool)
        on_npu[list(npu)] = True
        if not npu:
            return self._part(op, "gpu", shares, m)
        if len(npu) == op.experts:
            waits = self._overheads.wait_s + self._overheads.submit_s
            return self._part(op, "npu", shares, m) + waits
        if m == 1:
            elapsed = self._token(op, chances(shares[on_npu], shares[~on_npu], op.chosen))
        else:
            of_gpu = self._part(op, "gpu", shares[~on_npu], m)
            of_npu = self._part(op, "npu", shares[on_npu], m)
            elapsed = self._both(op, of_gpu, of_npu, m)
        return elapsed + self._overheads.submit_s + self._join(op.d, m)

    def _token(self, op: Experts, of_npu: Sequence[float]) -> float:
        """Return the mean over how many of a token's experts are the NPU's, by their chances."""
        return sum(
            chance
            * self._both(
                op, self._calls("gpu", op, op.chosen - x, 1), self._calls("npu", op, x, 1), 1
            )
            for x, chance in enumerate(of_npu)
        )

    def _both(self, op: Experts, gpu_s: float, npu_s: float, m: int) -> float:
        """Return the seconds of both parts at once, each slower while the other works."""
        a, b = (self.cost.contention(x, phase_of(m), op.weight_format) for x in KINDS)
        gpu, npu = contended(a, b, np.asarray(gpu_s), np.asarray(npu_s))
        return max(float(gpu), self._overheads.wait_s + float(npu))

    def _part(
        self, op: Experts, kind: DeviceKind, shares: npt.NDArray[np.float64], m: int
    ) -> float:
        """Return the seconds of experts with these shares on one device."""
        distinct, tokens = float((1 - (1 - shares) ** m).sum()), m * float(shares.sum())
        return self._calls(kind, op, distinct, tokens / distinct if distinct > 0 else 0.0)

    def _calls(self, kind: DeviceKind, op: Experts, distinct: float, tokens: float) -> float:
        """Return the seconds of so many experts, each with so many tokens."""
        key = (kind, op, round(distinct, 1), max(round(tokens), 1))
        if key not in self._known:
            self._known[key] = experts_s(self.cost, *key) if key[2] else 0.0
        return self._known[key]

    def _join(self, d: int, m: int) -> float:
        if (d, m) not in self._joins:
            self._joins[d, m] = float(self.cost.other_s("gpu", Add(d=d), m).seconds)
        return self._joins[d, m]


def chances(
    own: npt.NDArray[np.float64], others: npt.NDArray[np.float64], chosen: int
) -> list[float]:
    """Return the chances that 0 to `chosen` of a token's experts are among the NPU's.

    Each is chosen by itself, but all together are `chosen`: of equal shares the hypergeometric
    distribution.
    """
    counts = [np.ones(1), np.ones(1)]
    for side, shares in enumerate((own, others)):
        for share in shares.clip(1e-6, 1 - 1e-6).tolist():
            counts[side] = np.convolve(counts[side], (1 - share, share))[: chosen + 1]
    taken, rest = (np.pad(x, (0, chosen + 1 - len(x))) for x in counts)
    both = taken * rest[::-1]
    chance: list[float] = (both / both.sum()).tolist()
    return chance


def candidates(routed: RoutedLayer, steps: int) -> Sequence[Ids]:
    """Return what the NPU may have of a layer, in `steps` sizes, the last of which is all.

    None; the most or the least chosen experts; or some of all ranks.
    """
    count, order = routed.op.experts, routed.hottest
    sizes = sorted({-(-count * i // steps) for i in range(1, steps + 1)})
    sets = {(), *(tuple(sorted(order[:x])) for x in sizes)}
    if len(set(routed.shares)) > 1:
        sets |= {tuple(sorted(order[-x:])) for x in sizes}
        sets |= {tuple(sorted(order[i * count // x] for i in range(x))) for x in sizes}
    return sorted(sets, key=lambda ids: (len(ids), ids))
