"""Runs of nodes that a plan wants as one graph on the NPU (`ExecutionPlan.fused`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.backends.groups import Group, GroupStep
from hetero.backends.ops import OUTPUT_PORTS, Attention
from hetero.profiler.model_graph import Node, role_of_op
from hetero.solver.non_matmul_devices import of_the_gpu
from hetero.solver.plan import FusedGroup


@dataclass(frozen=True)
class NodeGroup:
    """Consecutive nodes and the group that they make; `reads` and `writes` are its slots.

    `fixed` are the slots of its positions and caches, as `Group.fixed` names them.
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
    """Return groups by the name of their first node.

    A larger one goes before what is inside it. None has operations in it that are the GPU's
    (`of_the_gpu`); a state, for one, would be changed by padded tokens.
    """
    groups: dict[str, NodeGroup] = {}
    i = 0
    while i < len(nodes):
        kind, count = _longest(nodes, i, fused)
        if count:
            groups[nodes[i].name] = _group(nodes, i, count, kind)
        i += max(count, 1)
    return groups


def _longest(
    nodes: Sequence[Node], start: int, fused: Sequence[FusedGroup]
) -> tuple[FusedGroup, int]:
    """Return the group that begins here and the number of its nodes; 0 if none does."""
    layer = nodes[start].layer
    members = [x for x in nodes[start:] if x.layer == layer] if layer is not None else []
    kinds: tuple[FusedGroup, ...] = ("block", "static", "feed_forward")
    for kind in kinds:
        count = _length(nodes[start - 1 : start], members, kind) if kind in fused else 0
        if count and not any(of_the_gpu(x.op) for x in members[:count]):
            return kind, count
    return "block", 0


def _length(before: Sequence[Node], members: Sequence[Node], kind: FusedGroup) -> int:
    """Return number of the nodes of a layer from one on that are a group.

    `before` is what that follows, if anything.
    """
    if not members:
        return 0
    first = not before or before[0].layer != members[0].layer
    match kind:
        case "block":
            return len(members) if first else 0
        case "feed_forward":
            return 2 if role_of_op(members[0].plan_op or "") == "gate_up" else 0
        case "static":
            if not (first or _ends_static(before[0])):
                return 0
            ends = (i for i, x in enumerate(members) if _ends_static(x))
            count = next(ends, len(members))
            matmul = any(x.plan_op is not None for x in members[:count])
            return count if count > 1 and matmul else 0


def _ends_static(node: Node) -> bool:
    """Return whether a node is not part of a graph of padded tokens."""
    return isinstance(node.op, Attention) or of_the_gpu(node.op)


def _group(nodes: Sequence[Node], start: int, count: int, kind: FusedGroup) -> NodeGroup:
    members, after = nodes[start : start + count], nodes[start + count :]
    steps = tuple(GroupStep(node.op, tuple(node.slots.items())) for node in members)
    written = dict.fromkeys(slot for step in steps for slot in step.written)
    outputs = tuple(slot for slot in written if _is_read(slot, after))
    group = Group(kind, steps, outputs)
    fixed = {name: slot for name, (slot, _) in group.fixed.items()}
    layer, _, first = members[0].name.rpartition(".")
    last = members[-1].name.rpartition(".")[2]
    name = f"{layer}.{first}_to_{last}" if kind == "static" else f"{layer}.{kind}"
    return NodeGroup(name, tuple(members), group, fixed)


def _is_read(slot: str, after: Sequence[Node]) -> bool:
    """Return whether a later node reads a slot before one writes it."""
    for node in after:
        read = {s for port, s in node.slots.items() if port not in OUTPUT_PORTS}
        if slot in node.slots.values():
            return slot in read
    return False
