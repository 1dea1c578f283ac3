"""The operators of a step that are not matmuls of plans, as stages of the layer DP."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from hetero.backends.ops import (
    Act,
    Attention,
    Experts,
    GatedAct,
    GatedAdd,
    LayerNorm,
    MatMul,
    Op,
    RMSNorm,
    Rope,
    Router,
)
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.profiler.cost import Allowed, CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.features import padded_count
from hetero.profiler.model_graph import ModelGraph, OpName, Share
from hetero.profiler.predict import op_name, other_s
from hetero.profiler.substitutes import Substitution
from hetero.solver.expert_choice import ExpertsChoice
from hetero.solver.non_matmul_devices import device_of_other
from hetero.solver.options import GPU, HOST, Option
from hetero.solver.overheads import Overheads

# What operators do, for people.
WORK: Final[dict[type, str]] = {
    Rope: "attention",
    Attention: "attention",
    RMSNorm: "norm",
    LayerNorm: "norm",
    GatedAct: "activation",
    Act: "activation",
    Router: "experts",
    GatedAdd: "experts",
    Experts: "experts",
}
MAX_CACHED: Final = 1024  # times that are remembered
Timer: TypeAlias = Callable[[int, int], float]  # of tokens (padded), and of those before them


@dataclass(frozen=True)
class NonMatmulTimes:
    """One device's time of everything that is no matmul of a plan.

    Before the layers, and after each matmul (matmuls with nothing after them are left out).
    `shared`: after a matmul, the same with attention's heads shared by both devices
    (`hetero.solver.heads`).
    """

    head: Option
    after: Mapping[OpName, Option]
    shared: Mapping[OpName, tuple[Option, ...]] = field(default_factory=dict)

    @property
    def device(self) -> DeviceKind:
        """Return the device."""
        return "gpu" if self.head.mode == "gpu" else "npu"


class NonMatmulCosts:
    """Times of a model's other operators on one profile.

    Raises `ProfileError` if no device has all of them.
    """

    def __init__(
        self,
        cost: CostModel,
        graph: ModelGraph,
        overheads: Overheads,
        experts: ExpertsChoice | None = None,
    ) -> None:
        self.cost, self.graph, self.overheads, self.experts = cost, graph, overheads, experts
        self._known: dict[tuple[DeviceKind, int, int], NonMatmulTimes] = {}
        stages = (*graph.block, *graph.tail)
        self._shares: list[tuple[OpName | None, Share]] = [
            *((None, share) for share in graph.head),
            *((stage.name, share) for stage in stages for share in stage.after),
        ]
        self._timers: dict[DeviceKind, list[Timer]] = {}
        reasons = {kind: self._reasons(kind) for kind in KINDS}
        self.devices = tuple(kind for kind in KINDS if not reasons[kind])
        if not self.devices:
            missing = sorted({reason for of_kind in reasons.values() for reason in of_kind})
            raise ProfileError(
                f"profile {cost.profile.name} lacks operators of {graph.name} "
                f"({', '.join(missing)}): take it again with `hetero profile`"
            )

    def _reasons(self, kind: DeviceKind) -> list[str]:
        if kind not in self.cost.profile.devices:
            return [f"no {kind}"]
        checks = [self._allowed(self._where(kind, x.op), x.op) for _, x in self._shares]
        return [check.reason for check in checks if not check]

    def _where(self, kind: DeviceKind, op: Op) -> DeviceKind:
        """Return where it runs if `kind` runs the non-matmul ops."""
        experts = None if self.experts is None else self.experts.device
        return device_of_other(op, kind, self.cost.profile.devices, experts)

    def _timer(self, kind: DeviceKind, op: Op) -> Timer:
        if self.experts is None or not isinstance(op, Experts):
            return timer_of(self.cost, self._where(kind, op), op)
        shared = partial(self.experts.seconds, op)
        return lambda tokens, _: shared(tokens)

    def _allowed(self, kind: DeviceKind, op: Op) -> Allowed:
        if isinstance(op, MatMul):  # one that is not cut
            return self.cost.allowed(kind, op.weight_format, 1, op.n, op.k, op.order)
        return self.cost.allowed_op(kind, op, 1)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what is predicted from something else, for people."""
        notes: dict[str, None] = {}
        for kind in self.devices:
            for _, share in self._shares:
                name = op_name(share.op)
                routed = isinstance(share.op, Router | Experts)
                source = "MatMul" if routed else self.cost.measured_as(kind, name)
                if source is not None and source != name:
                    notes[Substitution(name, source).note] = None
        return tuple(notes)

    def on(self, kind: DeviceKind, m: int, context: int) -> NonMatmulTimes:
        """Return times of m tokens after `context` others on one of `devices`."""
        key = (kind, m, context)
        if key not in self._known:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            self._known[key] = self._times(kind, m, context)
        return self._known[key]

    def _times(self, kind: DeviceKind, m: int, context: int) -> NonMatmulTimes:
        if kind not in self._timers:
            self._timers[kind] = [self._timer(kind, x.op) for _, x in self._shares]
        tokens, row = (padded_count(self.cost.device(kind), x) for x in (m, 1))
        times: dict[OpName | None, float] = {None: 0.0}
        for (name, share), timer in zip(self._shares, self._timers[kind], strict=True):
            sizes = (row, context + m - 1) if share.sampled else (tokens, context)
            times[name] = times.get(name, 0.0) + share.times * timer(*sizes)
        overheads = self.overheads.at(m)
        return NonMatmulTimes(
            _option(kind, times.pop(None), overheads),
            {name: _option(kind, x, overheads) for name, x in times.items() if name is not None},
        )


def timer_of(cost: CostModel, kind: DeviceKind, op: Op) -> Timer:
    """Return the seconds of an operator on a device."""
    if isinstance(op, MatMul):
        whole = partial(cost.matmul_s, kind, op.weight_format, n=op.n, k=op.k, order=op.order)
        return lambda tokens, _: float(whole(tokens).seconds)
    if isinstance(op, Router | Experts):
        return lambda tokens, _: float(cost.other_s(kind, op, tokens).seconds)
    predictor = cost.other(kind, op)
    return lambda tokens, context: other_s(predictor, op, tokens, context)


def seconds_by_kind(graph: ModelGraph, non_matmul: NonMatmulTimes) -> dict[str, float]:
    """Return the seconds of a layer's other operators, each time, by what they do.

    `head` (before the layers), then `attention`, `norm`, `activation`; by the matmul that they
    follow where they do several of these things.
    """
    seconds_of: dict[str, list[float]] = {"head": [non_matmul.head.elapsed_s]}
    for stage in graph.block:
        if stage.name in non_matmul.after:
            name = _kind(stage.after) or stage.name
            seconds_of.setdefault(name, []).append(non_matmul.after[stage.name].elapsed_s)
    return {name: statistics.fmean(seconds) for name, seconds in seconds_of.items()}


def _kind(shares: Iterable[Share]) -> str | None:
    """Return what operators do, if they all do the same."""
    kinds = {WORK.get(type(share.op)) for share in shares}
    return kinds.pop() if len(kinds) == 1 else None


def _option(kind: DeviceKind, seconds: float, overheads: Overheads) -> Option:
    if kind == "gpu":
        return Option(
            "gpu-only", "gpu", seconds, gpu_s=seconds, enter_s=(0.0, overheads.submit_s), leaves=GPU
        )
    return Option(
        "npu-only", "npu", seconds, npu_s=seconds, enter_s=(overheads.wait_s, 0.0), leaves=HOST
    )
