"""Prepares every kernel that a plan needs, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hetero.backends.errors import DeviceError
from hetero.backends.ops import weight_names
from hetero.backends.protocol import Device, DeviceKind, Kernel, WeightValue
from hetero.models.weights import BlockWeights, ModelWeights
from hetero.runtime.decoder import Node
from hetero.solver.plan import PHASES, ExecutionPlan, Phase

Devices = Mapping[DeviceKind, Device]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class KernelSet:
    """Kernels by node name and device kind."""

    kernels: Mapping[tuple[str, DeviceKind], Kernel]

    def get(self, node: Node, kind: DeviceKind) -> Kernel:
        """The kernel of a node on a device that the plan gives it."""
        return self.kernels[node.name, kind]

    @property
    def nbytes(self) -> int:
        """Weight memory that devices hold beyond the packed weights."""
        return sum(kernel.nbytes for kernel in self.kernels.values())


def node_device(plan: ExecutionPlan, node: Node, phase: Phase, m: int) -> DeviceKind:
    """Device of a node in a phase. Raises `ValueError` for a matmul that the plan cuts."""
    if node.plan_op is None:
        return plan.rest.prefill if phase == "prefill" else plan.rest.decode
    tiles = plan.partition(phase, m, node.plan_op)
    if len(tiles) > 1:
        raise ValueError(
            f"the plan cuts {node.plan_op} in {phase} into {len(tiles)} tiles; this engine runs "
            "whole matmuls: use a plan with one tile for each matmul"
        )
    return tiles[0].device


def node_devices(plan: ExecutionPlan, node: Node) -> frozenset[DeviceKind]:
    """Devices that run a node in any phase."""
    if node.plan_op is None:
        return frozenset({plan.rest.prefill, plan.rest.decode})
    counts: dict[Phase, set[int]] = {phase: set() for phase in PHASES}
    for entry in plan.ops:
        if entry.op == node.plan_op:
            counts[entry.phase].add(entry.m or 1)
    return frozenset(node_device(plan, node, phase, m) for phase, ms in counts.items() for m in ms)


def prepare_kernels(
    nodes: Iterable[Node],
    weights: ModelWeights,
    plan: ExecutionPlan,
    devices: Devices,
    progress: Progress | None = None,
) -> KernelSet:
    """Compile every node for its devices, releasing each layer's host weights as it goes.

    Raises `DeviceError` that names the first node a device does not take.
    """
    kernels: dict[tuple[str, DeviceKind], Kernel] = {}
    by_layer: dict[int | None, list[Node]] = {}
    for node in nodes:
        by_layer.setdefault(node.layer, []).append(node)
    for done, (layer, members) in enumerate(by_layer.items(), start=1):
        block = None if layer is None else weights.block(layer)
        for node in members:
            values = node_weights(node, block, weights)
            for kind in sorted(node_devices(plan, node)):
                kernels[node.name, kind] = _prepare(devices[kind], node, values)
        if layer is not None:
            weights.release(layer)
        if progress is not None:
            progress(done, len(by_layer))
    weights.release_ends()
    return KernelSet(kernels)


def node_weights(
    node: Node, block: BlockWeights | None, weights: ModelWeights
) -> dict[str, WeightValue]:
    """Weights of a node by the names of `ops.weight_names`."""
    role = node.name.rsplit(".", maxsplit=1)[-1]
    names = weight_names(node.op)
    if block is not None:
        return {name: _block_weight(block, role, name) for name in names}
    found: dict[str, WeightValue] = {}
    for name in names:
        match role:
            case "embed":
                found[name] = weights.embed()
            case "lm_head":
                found[name] = weights.lm_head()
            case "final_norm":
                found[name] = weights.final_norm()
    return found


def _block_weight(block: BlockWeights, role: str, name: str) -> WeightValue:
    if name == "weight":
        value = getattr(block, role)
    elif name == "bias":
        value = getattr(block, f"{role}_bias")
    else:
        value = getattr(block, name)
    assert value is not None, (role, name)
    found: WeightValue = value
    return found


def _prepare(device: Device, node: Node, values: Mapping[str, WeightValue]) -> Kernel:
    accepted = device.accepts(node.op)
    if not accepted:
        raise DeviceError(
            device.info.backend,
            f"preparing {node.name}",
            accepted.reason,
            "choose another device or weight format",
        )
    return device.prepare(node.op, values)
