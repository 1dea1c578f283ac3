"""Predicted seconds of a step's launches, for schedulers: what the profile says of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul
from hetero.backends.protocol import CACHE_PORTS, DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.model_graph import Node
from hetero.runtime.launch_graph import LaunchSpec
from hetero.runtime.schedule import Cost
from hetero.solver.placement import Placement


class LaunchCosts:
    """Prices launches of one model's nodes by one cost model.

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
        """Seconds of the control thread for a submission to a queue that is at work."""
        return max((self.cost.submit_s(kind) for kind in kinds), default=0.0)

    def at(self, position: int, chunks: Sequence[int]) -> Cost:
        """Seconds of the launches of these chunks, the first of them `position` tokens into the
        context.
        """
        behind = tuple(accumulate(chunks, initial=position))
        return lambda launch: self._seconds(launch, behind[launch.chunk])

    def _seconds(self, launch: LaunchSpec, context: int) -> float:
        if launch.kind is None or launch.name != launch.node or launch.node not in self._members:
            return 0.0  # gathered, copied, or columns' mass
        key = (launch.node, launch.kind, launch.tokens, launch.rows, context)
        found = self._launches.get(key)
        if found is None:
            kind, m = launch.kind, launch.tokens[1] - launch.tokens[0]
            members = self._members[launch.node]
            found = sum(self._node_s(kind, x, m, launch.rows, context) for x in members)
            self._launches[key] = found
        return found

    def _node_s(
        self, kind: DeviceKind, node: Node, m: int, rows: tuple[int, int] | None, context: int
    ) -> float:
        n = None if rows is None else rows[1] - rows[0]
        seen = context if set(CACHE_PORTS) & set(node.op.ports) else 0
        key = (kind, node.op, m, n, seen)
        if key not in self._known:
            self._known[key] = self._asked(kind, node, m, n, seen)
        return self._known[key]

    def _format(self, node: Node, op: MatMul, m: int) -> WeightFormat:
        """What a prompt's matmul computes with: all parts have weights of one storage."""
        if node.plan_op is None:
            return op.weight_format
        part, *_ = self._placement.parts(node, "prefill", m)
        return part.precision or op.weight_format

    def _asked(self, kind: DeviceKind, node: Node, m: int, n: int | None, context: int) -> float:
        op = node.op
        if isinstance(op, MatMul):
            stored = self._format(node, op, m)
            found = self.cost.matmul_s(kind, stored, m, n or op.n, op.k)
        else:
            found = self.cost.other_s(kind, op, m, context)
        return float(found.seconds)
