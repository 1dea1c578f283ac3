"""Runs of nodes that a plan wants as one graph on the NPU (`ExecutionPlan.fused`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.backends.groups import Group, GroupStep
from hetero.backends.ops import OUTPUT_PORTS, MatMul
from hetero.profiler.model_graph import Node
from hetero.solver.plan import FusedGroup


@dataclass(frozen=True)
class NodeGroup:
    """Consecutive nodes and the group that they make; `reads` and `writes` are its slots.

    `fixed` are the slots of its position and caches, by port.
    """

    name: str
    nodes: tuple[Node, ...]
    group: Group
    fixed: dict[str, str]

    @property
    def matmuls(self) -> tuple[Node, ...]:
        """Its nodes that a plan places."""
        return tuple(node for node in self.nodes if node.plan_op is not None)


def node_groups(nodes: Sequence[Node], fused: Sequence[FusedGroup]) -> dict[str, NodeGroup]:
    """Groups by the name of their first node; a block goes before what is inside it. A matmul whose
    input is rounded with a static scale joins none: the host rounds for it.
    """
    found: dict[str, NodeGroup] = {}
    i = 0
    while i < len(nodes):
        count = _length(nodes, i, fused)
        if any(_is_static(node) for node in nodes[i : i + count]):
            count = 0
        if count:
            made = _group(nodes, i, count)
            found[nodes[i].name] = made
        i += max(count, 1)
    return found


def _is_static(node: Node) -> bool:
    return isinstance(node.op, MatMul) and node.op.weight_format.activations.static


def _length(nodes: Sequence[Node], start: int, fused: Sequence[FusedGroup]) -> int:
    """Number of nodes of the group that begins here; 0 if none does."""
    layer = nodes[start].layer
    if layer is not None and "block" in fused:
        return sum(node.layer == layer for node in nodes[start:])
    if "feed_forward" in fused and nodes[start].plan_op == "gate_up":
        return 2
    return 0


def _group(nodes: Sequence[Node], start: int, count: int) -> NodeGroup:
    members, after = nodes[start : start + count], nodes[start + count :]
    steps = tuple(GroupStep(node.op, tuple(node.slots.items())) for node in members)
    written = dict.fromkeys(slot for step in steps for slot in step.written)
    outputs = tuple(slot for slot in written if _is_read(slot, after))
    group = Group("block" if count > 2 else "feed_forward", steps, outputs)
    fixed = {
        port: slot for node in members for port, slot in node.slots.items() if port in group.fixed
    }
    name = members[0].name.rpartition(".")[0] + "." + group.name
    return NodeGroup(name, tuple(members), group, fixed)


def _is_read(slot: str, after: Sequence[Node]) -> bool:
    """Whether a later node reads a slot before one writes it."""
    for node in after:
        read = {s for port, s in node.slots.items() if port not in OUTPUT_PORTS}
        if slot in node.slots.values():
            return slot in read
    return False
