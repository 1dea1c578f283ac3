"""The kernels that a plan needs: rows of weights and heads of attention by device, and bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from functools import cached_property

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.ops import Experts, MatMul, Op, OperandOrder, Outliers
from hetero.backends.protocol import KINDS, DeviceKind
from hetero.backends.weights import packed_bytes
from hetero.profiler.model_graph import ModelGraph, Node, OpName
from hetero.solver.assignments import Segment, Span
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.matmul_entries import (
    CapabilitiesByDevice,
    MatmulEntries,
    PlanSource,
    share_heads,
)
from hetero.solver.non_matmul_devices import device_of_other
from hetero.solver.plan import Tile
from hetero.solver.shared_experts import experts_device


class PlannedKernels:
    """The kernels of one plan and of all plans that `source` may give for other token counts.

    They are prepared once, so other plans within the same cuts keep them.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        graph: ModelGraph,
        capabilities: CapabilitiesByDevice,
        entries: MatmulEntries,
        source: PlanSource | None,
    ) -> None:
        self._plan, self._graph, self._capabilities = plan, graph, capabilities
        self._entries, self._source = entries, source
        self._edges: dict[tuple[OpName, DeviceKind, StorageFormat], frozenset[int]] = {}

    def segments(self, node: Node, kind: DeviceKind) -> tuple[Segment, ...]:
        """Return what a device holds of a matmul's weight."""
        spans: dict[tuple[OperandOrder, WeightFormat | None], set[Span]] = {}
        for _, tile, shift in self._entries.listed(node):
            if tile.device == kind:
                spans.setdefault((tile.order, tile.precision), set()).add(rows_of(tile, shift))
        return tuple(
            Segment(rows, *how)
            for how, covered in spans.items()
            for rows in _runs(covered, self.edges(node, kind, storage_of(node, how[1])))
        )

    def edges(self, node: Node, kind: DeviceKind, storage: StorageFormat) -> frozenset[int]:
        """Return rows where a device's kernels of a matmul end.

        They end at the edges of every tile that it meets (its own, and others' within its rows),
        so that all parts of a call meet in rows. Kernels of another storage, where phases have
        different ones, are not cut for these.
        """
        assert node.plan_op is not None
        key = (node.plan_op, kind, storage)
        if key not in self._edges:
            edges: set[int] = set()
            for entry, _, shift in self._entries.listed(node):
                tiles = [x for x in entry.tiles if storage_of(node, x.precision) is storage]
                if tiles and entry.phase == "prefill":
                    edges.update(self._entries.later_cuts(node))
                own = [tile.rows for tile in tiles if tile.device == kind]
                met = (x for tile in entry.tiles for x in tile.rows)
                edges.update(x + shift for x in met if any(a <= x <= b for a, b in own))
            self._edges[key] = frozenset(edges)
        return self._edges[key]

    def cuts_rows(self, node: Node) -> bool:
        """Return whether a matmul's output is ever made of several runs of rows."""
        assert isinstance(node.op, MatMul)
        spans = {rows_of(tile, shift) for _, tile, shift in self._entries.listed(node)}
        return len(spans) > 1 or any(row < node.op.n for row in self._entries.later_cuts(node))

    @cached_property
    def head_cuts(self) -> tuple[int, ...]:
        """Return how many heads the NPU may have of an attention, rising."""
        later = self._source.npu_head_counts if self._source is not None else ()
        return tuple(
            sorted({x.heads.npu for x in self._plan.attention if x.heads.shared} | {*later})
        )

    def shared_heads(self, kind: DeviceKind) -> tuple[tuple[int, int], ...]:
        """Return the runs of key/value heads that a device computes of some attention."""
        if kind not in KINDS or not share_heads(self._capabilities):
            return ()
        last = self._graph.kv_heads
        return tuple((0, x) if kind == "npu" else (x, last) for x in self.head_cuts)

    @property
    def weight_bytes(self) -> dict[DeviceKind, int]:
        """Return the bytes of weights on each device.

        A row that two devices compute counts on both, and one of a device whose graphs own their
        weights once for each graph size.
        """
        nbytes = {
            kind: sum(
                self._rows_bytes(node, segment, kind) * self._copies(node, kind)
                for node in self._graph.nodes
                if node.plan_op is not None
                for segment in self.segments(node, kind)
            )
            for kind in self._capabilities
        }
        for node in self._graph.nodes:
            for kind in self._devices(node) if isinstance(node.op, Outliers) else ():
                nbytes[kind] += _outlier_bytes(node.op)
            if isinstance(node.op, Experts):
                matmuls = all_experts(node.op)
                for kind in self._devices(node):
                    whole = sum(self._matmul_bytes(matmul, kind) for matmul in matmuls)
                    nbytes[kind] += whole * self._copies(node, kind)
        return nbytes

    def _devices(self, node: Node) -> set[DeviceKind]:
        """Return the devices that run a node that is no matmul."""
        experts = experts_device(node, self._plan)
        return {
            device_of_other(node.op, kind, self._capabilities, experts)
            for kind in self._plan.other_devices
        }

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all weights that some device uses, counted once, as stored."""
        ops = [node.op for node in self._graph.nodes]
        matmuls = [op for op in ops if isinstance(op, MatMul)]
        matmuls += [x for op in ops if isinstance(op, Experts) for x in all_experts(op)]
        outliers = sum(_outlier_bytes(op) for op in ops if isinstance(op, Outliers))
        return outliers + sum(packed_bytes(op.weight_format.storage, op.n, op.k) for op in matmuls)

    def _rows_bytes(self, node: Node, segment: Segment, kind: DeviceKind) -> int:
        """Return the bytes of a run of rows on a device.

        They are as stored, or as the device says of its own layout.
        """
        assert isinstance(node.op, MatMul)
        return self._matmul_bytes(segment.op(node.op), kind)

    def _matmul_bytes(self, op: MatMul, kind: DeviceKind) -> int:
        own = self._capabilities[kind].weight_bytes
        if op.weight_format in own:
            return math.ceil(own[op.weight_format] * op.n * op.k)
        return packed_bytes(op.weight_format.storage, op.n, op.k)

    def _copies(self, node: Node, kind: DeviceKind) -> int:
        """Return how often a device may come to hold the weights of a matmul.

        Prompts of other lengths than the plan lists use any graph that it has, but for matmuls of
        sampled rows.
        """
        capabilities = self._capabilities[kind]
        if capabilities.per_graph_size != "weights" or node.name in self._graph.sampled_nodes:
            return 1
        return max(len(capabilities.graph_sizes), 1)


def all_experts(op: Experts) -> list[MatMul]:
    """Return matmuls with the rows of all its experts."""
    return [dataclasses.replace(x, n=len(op.own) * x.n) for x in op.matmuls.values()]


def rows_of(tile: Tile, shift: int) -> Span:
    """Return the rows of the node's weight."""
    return tile.rows[0] + shift, tile.rows[1] + shift


def storage_of(node: Node, precision: WeightFormat | None) -> StorageFormat:
    """Return how the weights are stored that a tile or part computes with."""
    assert isinstance(node.op, MatMul)
    return (precision or node.op.weight_format).storage


def _runs(spans: Iterable[Span], edges: Iterable[int]) -> list[Span]:
    """Return the tiles between edges that are inside some span."""
    spans = list(spans)
    return [
        (a, b)
        for a, b in itertools.pairwise(sorted(edges))
        if any(start <= a and b <= stop for start, stop in spans)
    ]


def _outlier_bytes(op: Op) -> int:
    """Return the bytes of the hot features' weights, and where there is excess of the whole weight.

    At most, for a GPU may have it mapped for the matmul.
    """
    assert isinstance(op, Outliers)
    slab = packed_bytes(StorageFormat.F16, op.n, op.hot) + 4 * op.hot if op.hot else 0
    return slab + (packed_bytes(StorageFormat.Q8R, op.n, op.k) if op.excess else 0)
