"""Predicted seconds of a step's launches, for schedulers: what the profile says of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from hetero.backends.ops import Attention, AttentionHeads, MatMul, Op
from hetero.backends.protocol import CACHE_PORTS, DeviceKind
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.runtime.launch_graph import LaunchSpec
from hetero.runtime.schedule import Cost
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.placement import Placement
from hetero.solver.plan import PrefillMode

if TYPE_CHECKING:
    from hetero.profiler.cost import CostModel


def check_priced(cost: CostModel, spec: ModelGraph, plan: ExecutionPlan) -> None:
    """Raise `ProfileError` where a profile knows nothing of what a plan runs where."""
    for entry in plan.ops:
        for tile in entry.tiles:
            stored = tile.precision or spec.weight_format
            cost.matmul_s(tile.device, stored, 32, entry.n, entry.k, order=tile.order)
    others = [node.op for node in spec.nodes if not isinstance(node.op, MatMul)]
    for kind in plan.other_devices:
        for op in others:
            cost.other_s(kind, op, 32)


class LaunchCosts:
    """Predicts launches of one model's nodes by one cost model.

    Launches that differ by their layer alone are looked up once. Control thread only. Raises
    `ProfileError` for operations and formats that the profile knows nothing of.
    """

    def __init__(self, cost: CostModel, placement: Placement) -> None:
        self.cost, self._placement = cost, placement
        groups = placement.groups.values()
        self._members: dict[str, tuple[Node, ...]] = {
            node.name: (node,) for node in placement.graph.nodes
        }
        self._members |= {group.name: group.nodes for group in groups}
        self._known: dict[tuple[object, ...], float] = {}  # by operation
        self._launches: dict[tuple[object, ...], float] = {}  # by node: quicker to look up

    def submit_s(self, kinds: Iterable[DeviceKind]) -> float:
        """Return the seconds of the control thread for a submission to a queue that is at work."""
        return max((self.cost.submit_s(kind) for kind in kinds), default=0.0)

    def at(self, position: int, chunks: Sequence[int], mode: PrefillMode = "cut") -> Cost:
        """Return the seconds of the launches of these chunks after `position` tokens."""
        ends = tuple(accumulate(chunks, initial=position))
        return lambda launch: self.seconds(
            launch, launch.tokens[1] - launch.tokens[0], ends[launch.chunk], mode
        )

    def seconds(self, launch: LaunchSpec, m: int, context: int, mode: PrefillMode = "cut") -> float:
        """Return the seconds of a launch of m tokens after others, whatever `launch.tokens`."""
        if launch.kind is None or launch.name != launch.node or launch.node not in self._members:
            return 0.0  # gathered, copied, or score sums
        key = (launch.node, launch.kind, m, launch.rows, launch.heads, context, mode)
        total_s = self._launches.get(key)
        if total_s is None:
            members = self._members[launch.node]
            total_s = sum(self._node_s(launch, x, m, context, mode) for x in members)
            self._launches[key] = total_s
        return total_s

    def _node_s(
        self, launch: LaunchSpec, node: Node, m: int, context: int, mode: PrefillMode
    ) -> float:
        kind, rows = launch.kind, launch.rows
        assert kind is not None
        n = None if rows is None else rows[1] - rows[0]
        seen = context if set(CACHE_PORTS) & set(node.op.ports) else 0
        key = (kind, node.op, m, n, launch.heads, seen, mode)
        if key not in self._known:
            op = node.op
            if launch.heads is not None and isinstance(op, Attention):
                first, stop = launch.heads
                op = AttentionHeads(attention=op, first=first, count=stop - first)
            self._known[key] = self._asked(kind, node, op, m, n, seen, mode)
        return self._known[key]

    def _segment(
        self, kind: DeviceKind, node: Node, op: MatMul, m: int, mode: PrefillMode
    ) -> MatMul:
        """Return a prompt's matmul as a device computes it: format and order of operands."""
        if node.plan_op is None:
            return op
        parts = self._placement.parts(node, "prefill", m, mode)
        return next((part.segment.op(op) for part in parts if part.kind == kind), op)

    def _asked(
        self,
        kind: DeviceKind,
        node: Node,
        op: Op,
        m: int,
        n: int | None,
        context: int,
        mode: PrefillMode,
    ) -> float:
        if isinstance(op, MatMul):
            own = self._segment(kind, node, op, m, mode)
            rows = n or op.n
            predicted = self.cost.matmul_s(kind, own.weight_format, m, rows, op.k, order=own.order)
        else:
            predicted = self.cost.other_s(kind, op, m, context)
        return float(predicted.seconds)
