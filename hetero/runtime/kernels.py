"""Prepares every kernel that a plan needs; each device holds the rows that it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakValueDictionary

from hetero.backends.errors import DeviceError
from hetero.backends.formats import StorageFormat
from hetero.backends.ops import Attention, MatMul, Op, describe, is_mapped, weight_names
from hetero.backends.optional import SupportsGroups
from hetero.backends.protocol import (
    Acceptance,
    BoundCall,
    Completion,
    Device,
    DeviceKind,
    Kernel,
    Operand,
    WeightValue,
)
from hetero.backends.weights import ROW_BLOCK, PackedWeight, pack
from hetero.errors import memory_for
from hetero.models.graph import SHADOW
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.profiler.model_graph import Node
from hetero.solver.assignments import Heads, Part, Segment
from hetero.solver.errors import PlanError
from hetero.solver.node_groups import NodeGroup
from hetero.solver.placement import Placement

Devices = Mapping[DeviceKind, Device]
Progress = Callable[[int, int], None]
MatMulKey = tuple[str, DeviceKind, Segment]  # of the node of that name


class OnlineKernel(Kernel):
    """A graph that is prepared again for every prompt, by `OnlineCall.prepare`."""

    def __init__(self, op: Op, graph: int, compiled: Callable[[], Kernel]) -> None:
        self.op, self.graph = op, graph
        self._compiled = compiled

    def bind(self, tensors: Mapping[str, Operand], m: int) -> OnlineCall:
        """Return a call whose graph is not built yet."""
        return OnlineCall(f"{describe(self.op)} m={m}", m, tensors, self._compiled)


class OnlineCall(BoundCall):
    """A call whose graph lives from `prepare` to `drop`. Owned by the control thread."""

    def __init__(
        self, name: str, m: int, tensors: Mapping[str, Operand], compiled: Callable[[], Kernel]
    ) -> None:
        self.name, self.m = name, m
        self._tensors = tensors
        self._compiled = compiled
        self._call: BoundCall | None = None

    def prepare(self) -> None:
        """Build the graph and bind it. Raises what preparing and binding do."""
        self._call = self._compiled().bind(self._tensors, self.m)

    def drop(self) -> None:
        """Free the graph; idempotent."""
        self._call = None

    def run(self) -> None:
        """Run the built graph."""
        self._prepared().run()

    def submit(self) -> Completion:
        """See `BoundCall.submit`."""
        return self._prepared().submit()

    def enqueue(self) -> Completion:
        """See `BoundCall.enqueue`."""
        return self._prepared().enqueue()

    def _prepared(self) -> BoundCall:
        if self._call is None:
            raise ValueError(f"{self.name}: prepare() comes before a run")
        return self._call


class KernelSet:
    """Kernels of one model on its devices. Owned by the control thread.

    A device that prepares rows has a kernel for each segment of them between the plan's cut points,
    ahead of time, in its own layout. A device that maps the packed weights in place gets
    kernels for any run of rows when they are asked for, since they share the memory; they live as
    long as a step that uses them, because every length of prompt may be cut elsewhere. Graphs that
    are prepared while a prompt waits (`Placement.online`) are `OnlineKernel`s.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = dict(devices)
        self._others: dict[tuple[str, DeviceKind], Kernel] = {}
        self._heads: dict[tuple[str, DeviceKind, tuple[int, int]], Kernel] = {}
        self._matmuls: dict[MatMulKey, Kernel] = {}
        self._mapped: WeakValueDictionary[MatMulKey, Kernel] = WeakValueDictionary()
        self._weights: dict[str, Mapping[str, WeightValue]] = {}  # of kernels made when asked for
        self._groups: dict[str, Kernel] = {}

    @property
    def nbytes(self) -> int:
        """Return the weight memory that devices hold beyond the packed weights."""
        return sum(kernel.nbytes for kernel in self._all())

    def _all(self) -> Iterable[Kernel]:
        matmuls = (*self._matmuls.values(), *self._mapped.values())
        others = (*self._others.values(), *self._heads.values())
        return (*others, *matmuls, *self._groups.values())

    def group(self, group: NodeGroup) -> Kernel:
        """Return the kernel of nodes that run as one graph on the NPU."""
        return self._groups[group.name]

    def add_group(self, group: NodeGroup, values: Sequence[Mapping[str, WeightValue]]) -> None:
        """Prepare nodes as one graph on the NPU. Raises `PlanError` if it cannot."""
        npu = self._devices["npu"]
        if not isinstance(npu, SupportsGroups):
            raise PlanError(
                f"{group.name}: {npu.info.name} runs no {group.group.name} of {len(values)} "
                "operations as one graph: leave it out of the plan's `fused`"
            )
        try:
            self._groups[group.name] = npu.prepare_group(group.group, values)
        except ValueError as error:
            raise PlanError(f"{group.name}: {error}") from None

    def other(self, node: Node, kind: DeviceKind) -> Kernel:
        """Return the kernel of a node that is not a matmul."""
        return self._others[node.name, kind]

    def heads(self, node: Node, part: Heads) -> Kernel:
        """Return the kernel of some heads of an attention."""
        return self._heads[node.name, part.kind, (part.first, part.stop)]

    def matmul(self, node: Node, part: Part) -> Kernel:
        """Return the kernel of a part's rows.

        Raises `PlanError` for rows that were not prepared on a device that prepares them.
        """
        if self.maps(part.kind):
            return self._in_place(node, part)
        if part.online:
            return self._online(node, part)
        kernel = self._matmuls.get((node.name, part.kind, part.segment))
        if kernel is None:
            raise PlanError(
                f"{node.name}: rows {list(part.rows)} were not prepared on the {part.kind}: cuts "
                "are at the row counts of the plan that the model was opened with"
            )
        return kernel

    def add(self, node: Node, values: Mapping[str, WeightValue], placement: Placement) -> None:
        """Prepare a node on every device that the plan gives it."""
        for kind in sorted(placement.devices(node)):
            if node.plan_op is None:
                self._others[node.name, kind] = _prepare(self._devices[kind], node, node.op, values)
            elif self.maps(kind):
                self._weights[node.name] = values
                self._check(kind, node)
            else:
                for segment in placement.kernels.segments(node, kind):
                    kernel = self._compile(node, kind, segment, values)
                    self._matmuls[node.name, kind, segment] = kernel
                if placement.online:
                    self._weights[node.name] = values
        if isinstance(node.op, Attention):
            self._add_heads(node, node.op, values, placement)

    def _add_heads(
        self,
        node: Node,
        whole: Attention,
        values: Mapping[str, WeightValue],
        placement: Placement,
    ) -> None:
        for kind, device in self._devices.items():
            for run in placement.kernels.shared_heads(kind):
                op = Heads(kind, *run, graph=0).op(whole)
                self._heads[node.name, kind, run] = _prepare(device, node, op, values)

    def _in_place(self, node: Node, part: Part) -> Kernel:
        key = (node.name, part.kind, part.segment)
        kernel = self._mapped.get(key)
        if kernel is None:
            kernel = self._compile(node, part.kind, part.segment, self._weights[node.name])
            self._mapped[key] = kernel
        return kernel

    def _online(self, node: Node, part: Part) -> Kernel:
        """Return a call that builds its own graph for a part."""
        values, graph = self._weights[node.name], part.graph
        compiled = partial(self._compile, node, part.kind, part.segment, values, graph=graph)
        return OnlineKernel(node.op, graph, compiled)

    def _compile(
        self,
        node: Node,
        kind: DeviceKind,
        segment: Segment,
        values: Mapping[str, WeightValue],
        *,
        graph: int | None = None,
    ) -> Kernel:
        assert isinstance(node.op, MatMul)
        (start, stop), op = segment.rows, segment.op(node.op)
        _check_rows(node, start, stop)
        own = stored_for(op, node.op, values)
        return _prepare(self._devices[kind], node, op, cut_weights(own, start, stop), graph)

    def maps(self, kind: DeviceKind) -> bool:
        """Return whether a device computes with the packed weights in place."""
        return not self._devices[kind].capabilities.prepares_rows

    def _check(self, kind: DeviceKind, node: Node) -> None:
        accepted = self._devices[kind].accepts(node.op)
        if not accepted:
            raise _refused(self._devices[kind], node, accepted)


def stored_for(
    op: MatMul, whole: MatMul, values: Mapping[str, WeightValue]
) -> dict[str, WeightValue]:
    """Return the weights of a node that an operation on its rows uses.

    A format of another storage than the `whole` node's uses the weight in the second storage.
    """
    storage = op.weight_format.storage
    besides = "" if storage is whole.weight_format.storage else _besides(storage)
    return {
        name: values[besides if besides and name == "weight" else name] for name in weight_names(op)
    }


def _besides(storage: StorageFormat) -> str:
    """Return the name of a weight that is stored in a second format."""
    return f"weight:{storage.value}"


def cut_weights(values: Mapping[str, WeightValue], start: int, stop: int) -> dict[str, WeightValue]:
    """Return views of rows [start, stop) of a matmul's weights.

    The scale of its input is of all rows.
    """
    return {
        name: value.rows(start, stop)
        if isinstance(value, PackedWeight)
        else value
        if name == "x_scale"
        else value[start:stop]
        for name, value in values.items()
    }


def prepare_kernels(
    weights: ModelWeights,
    placement: Placement,
    devices: Devices,
    progress: Progress | None = None,
    *,
    prefetch: bool = True,
) -> KernelSet:
    """Compile every node for its devices, and groups as one graph, layer by layer.

    Each layer's host weights are released; with `prefetch` a mapped file is read ahead. Raises
    `DeviceError` that names the first node a device does not take, `UserError` where the system
    refuses the memory.
    """
    kernels = KernelSet(devices)
    by_layer: dict[int | None, list[Node]] = {}
    for node in placement.graph.nodes:
        by_layer.setdefault(node.layer, []).append(node)
    for done, (layer, members) in enumerate(by_layer.items(), start=1):
        with memory_for("the embeddings" if layer is None else f"the weights of layer {layer}"):
            block = None if layer is None else weights.block(layer)
            for node in (x for x in members if not is_mapped(x.op)):
                values = node_weights(node, block, weights, besides=True)
                kernels.add(node, values, placement)
                if (group := placement.groups.get(node.name)) is not None:
                    kernels.add_group(group, [node_weights(n, block, weights) for n in group.nodes])
        if layer is not None:
            weights.release(layer)
        if progress is not None:
            progress(done, len(by_layer))
    weights.release_embeddings()
    if prefetch and all(kernels.maps(kind) for kind in devices):
        weights.prefetch()
    return kernels


def node_weights(
    node: Node, block: BlockWeights | None, weights: ModelWeights, *, besides: bool = False
) -> dict[str, WeightValue]:
    """Return the weights of a node by the names of `ops.weight_names`.

    With `besides` those of a matmul in a second storage are among them, for `stored_for`.
    """
    role = node.name.rsplit(".", maxsplit=1)[-1]
    names = weight_names(node.op)
    also = [x.storage for x in weights.also] if besides and isinstance(node.op, MatMul) else []
    if block is not None:
        values = {name: _block_weight(block, role, name) for name in names}
        return values | {_besides(x): block.matrix(role, x) for x in also}
    values = {name: weights.outer_weight(role, name) for name in names}
    return values | {_besides(x): weights.head_in(x) for x in also}


def _block_weight(block: BlockWeights, role: str, name: str) -> WeightValue:
    if name in block.matrices:
        return block.matrices[name]
    if role.endswith(SHADOW):
        role = role.removesuffix(SHADOW)
        if name in ("hot", "hot_weight"):
            shadow = block.shadows[role]
            return shadow.channels if name == "hot" else pack(shadow.weight, StorageFormat.F16)
    if name == "weight":
        norm = role not in block.matrices
        return block.vectors[role] if norm else block.matrix(role)
    own = f"{role}_{name}"  # but norms of queries and keys, which a rotary embedding has
    return block.vectors[own if own in block.vectors else name]


def _check_rows(node: Node, start: int, stop: int) -> None:
    assert isinstance(node.op, MatMul)
    if start % ROW_BLOCK or not 0 <= start < stop <= node.op.n:
        raise PlanError(
            f"{node.name}: rows [{start}, {stop}) of {describe(node.op)} cannot be cut there: a "
            f"cut is at a multiple of {ROW_BLOCK} rows"
        )


def _prepare(
    device: Device,
    node: Node,
    op: Op,
    values: Mapping[str, WeightValue],
    graph: int | None = None,
) -> Kernel:
    accepted = device.accepts(op)
    if not accepted:
        raise _refused(device, node, accepted)
    return device.prepare(op, values) if graph is None else device.prepare_graph(op, values, graph)


def _refused(device: Device, node: Node, accepted: Acceptance) -> DeviceError:
    return DeviceError(
        device.info.backend,
        f"preparing {node.name}",
        accepted.reason,
        accepted.remedy or "choose another device or weight format",
    )
