"""Routed experts of a layer shared between the devices, as nodes of the graph that is run.

A layer some of whose experts a plan gives to the NPU becomes three nodes: the GPU's experts, the
NPU's, and the sum. A layer that the plan says nothing of stays as it is, and so does one whose
experts the NPU has all of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hetero.backends.ops import Add, Experts
from hetero.backends.protocol import DeviceKind
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan

NPU_PART: Final = "experts_npu"  # the slot and the role of the node
GPU_PART: Final = "experts_gpu"  # the slot


def check_experts(plan: ExecutionPlan, graph: ModelGraph) -> None:
    """Raise `PlanError` unless a model has the experts that a plan gives to the NPU."""
    ops = ((x.layer, x.op) for x in graph.nodes if isinstance(x.op, Experts))
    counts = {layer: op.experts for layer, op in ops}
    for share in plan.npu_experts:
        if share.npu[-1] >= counts.get(share.layer, 0):
            raise PlanError(
                f"the plan has expert {share.npu[-1]} of layer {share.layer} on the NPU; "
                f"{graph.name} has {counts.get(share.layer, 0)} experts there: make a plan for "
                "this model"
            )


def with_shared_experts(graph: ModelGraph, plan: ExecutionPlan) -> ModelGraph:
    """Return the graph in which each device's experts are a node of their own; idempotent."""
    shared = {x.layer: x.npu for x in plan.npu_experts}
    if not shared:
        return graph
    nodes = tuple(part for node in graph.nodes for part in _parts(node, shared))
    return graph if len(nodes) == len(graph.nodes) else graph.model_copy(update={"nodes": nodes})


def experts_device(node: Node, plan: ExecutionPlan) -> DeviceKind | None:
    """Return the device that a plan names for a node's experts; None: it names none."""
    if not isinstance(node.op, Experts):
        return None
    if node.op.subset:
        return "npu" if node.name.endswith(NPU_PART) else None
    return "npu" if node.layer in {x.layer for x in plan.npu_experts} else plan.experts


def part_widths(graph: ModelGraph) -> dict[str, int]:
    """Return the slots of the parts that are summed up, with their widths."""
    parts = (node for node in graph.nodes if isinstance(node.op, Experts) and node.op.subset)
    return {node.slots["y"]: node.op.d for node in parts if isinstance(node.op, Experts)}


def _parts(node: Node, shared: dict[int, tuple[int, ...]]) -> Iterator[Node]:
    """Yield what a node becomes."""
    op, layer = node.op, node.layer
    if not isinstance(op, Experts) or op.subset or layer not in shared:
        yield node
        return
    rest = tuple(e for e in range(op.experts) if e not in set(shared[layer]))
    if not rest:
        yield node
        return
    inputs = {port: node.slots[port] for port in ("x", "routes")}
    yield replace(node, op=replace(op, subset=rest), slots=inputs | {"y": GPU_PART})
    yield replace(
        node,
        name=f"layer{layer}.{NPU_PART}",
        op=replace(op, subset=shared[layer]),
        slots=inputs | {"y": NPU_PART},
    )
    yield Node(
        name=f"layer{layer}.experts_join",
        op=Add(d=op.d),
        slots={"x": NPU_PART, "residual": GPU_PART, "y": node.slots["y"]},
        layer=layer,
    )
