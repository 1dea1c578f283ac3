"""`Placement`: the one translation of a plan, without devices and without weights.

Who computes which tokens and rows of which node, in which calls, with which kernels, and what bytes
those hold. The engine, the compiler, the adapter, predictions and the choice of devices ask it;
nobody else reads a plan's tiles but the report, which draws them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul, OperandOrder
from hetero.backends.protocol import Capabilities, DeviceKind, prepared_sizes
from hetero.backends.weights import packed_bytes
from hetero.profiler.model_graph import ModelGraph, Node, OpName
from hetero.solver.calls import padded_size
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.groups import NodeGroup, node_groups
from hetero.solver.plan import PHASES, OpPlan, Phase, PlanError, Tile, entry_at, no_entry

Span: TypeAlias = tuple[int, int]
Able: TypeAlias = Mapping[DeviceKind, Capabilities]


class PlanSource(Protocol):
    """Plans for token counts that a plan does not list (`hetero.solver.prepared`).

    `rows` are the row cuts of each matmul that those plans may have.
    """

    rows: dict[OpName, tuple[int, ...]]

    def plan_for(self, m: int) -> ExecutionPlan:
        """Entries for prompts of m tokens, within the cuts."""


class Segment(NamedTuple):
    """Rows of a weight that a device computes with one kernel.

    Rows that tiles compute in several orders or precisions are a segment for each.
    """

    rows: Span
    order: OperandOrder = "plain"
    precision: WeightFormat | None = None

    def op(self, whole: MatMul) -> MatMul:
        """The operation on these rows."""
        start, stop = self.rows
        weight_format = self.precision or whole.weight_format
        return dataclasses.replace(
            whole, n=stop - start, order=self.order, weight_format=weight_format
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One launch of a matmul: tokens × rows of its output on one device.

    `graph` is the token count that the call is bound with, padding included. `rows` are rows of the
    node's weight. `precision` is None for the model's own format.
    """

    kind: DeviceKind
    tokens: Span
    rows: Span
    graph: int
    order: OperandOrder = "plain"
    precision: WeightFormat | None = None

    @property
    def stop(self) -> int:
        """End of the tokens that are written, padding included."""
        return self.tokens[0] + self.graph

    @property
    def segment(self) -> Segment:
        """The kernel of all its rows."""
        return Segment(self.rows, self.order, self.precision)


class Placement:
    """Answers for one plan of a model on devices with the given capabilities.

    `plan` is the one that was given, in calls that the devices' graphs can run (`fitted`). A token
    count that it does not list takes the entry of the next larger one, its tiles cut off at the
    call's end, unless `source` gives a plan for it. Decoding several tokens at once (verification)
    takes the entry of one token. Raises `PlanError` for what cannot run.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        graph: ModelGraph,
        capabilities: Able,
        *,
        source: PlanSource | None = None,
    ) -> None:
        self.plan = fitted(plan, capabilities, solved=source is not None)
        self.graph = graph
        self._capabilities = dict(capabilities)
        self._source = source
        self._entries = _by_name(plan.ops)

    def with_plan(self, plan: ExecutionPlan, source: PlanSource) -> Placement:
        """The same devices with another plan within the same cuts."""
        return Placement(plan, self.graph, self._capabilities, source=source)

    @property
    def online(self) -> bool:
        """Whether graphs are prepared while a prompt waits."""
        return self.plan.strategy == "online-prepare"

    @property
    def longest(self) -> int:
        """Tokens of the longest call."""
        assert self.plan.step_tokens is not None
        return self.plan.step_tokens

    @property
    def written(self) -> int:
        """Tokens that the longest call writes, padding included."""
        return reach(self.plan, self._capabilities)

    # --- who computes what ------------------------------------------------------------------

    def rest(self, phase: Phase) -> DeviceKind:
        """Device of everything that is not a matmul."""
        return self.plan.rest.prefill if phase == "prefill" else self.plan.rest.decode

    def parts(self, node: Node, phase: Phase, m: int) -> tuple[Part, ...]:
        """Launches of a matmul node at m tokens, in the plan's order. They cover its output."""
        return tuple(
            self._part(node, tile, shift)
            for entry, shift in self._at(node, phase, m)
            for tile in entry.tiles
        )

    def entries(self, phase: Phase, m: int) -> tuple[OpPlan, ...]:
        """What computes the matmuls of a call of m tokens, in order; the output head sees one."""
        first = {node.plan_op: node for node in reversed(self.graph.nodes) if node.plan_op}
        return tuple(
            entry
            for node in reversed(first.values())
            for entry, _ in self._at(node, phase, 1 if node.plan_op == "lm_head" else m)
        )

    def working(self, m: int) -> frozenset[DeviceKind]:
        """Devices that work in a prompt's call of m tokens, the output head aside."""
        blocks = [entry for entry in self.entries("prefill", m) if entry.op != "lm_head"]
        tiles = {tile.device for entry in blocks for tile in entry.tiles}
        return frozenset({self.rest("prefill"), *tiles})

    def devices(self, node: Node) -> frozenset[DeviceKind]:
        """Devices that run a node in any phase."""
        if node.plan_op is None:
            return frozenset(self.rest(phase) for phase in PHASES)
        return frozenset(tile.device for _, tile, _ in self._listed(node))

    @cached_property
    def groups(self) -> dict[str, NodeGroup]:
        """Nodes that may run as one graph on the NPU, by the name of their first node."""
        return node_groups(self.graph.nodes, self.plan.fused) if "npu" in self._capabilities else {}

    def fused(self, group: NodeGroup, phase: Phase, m: int) -> int | None:
        """Tokens of a group's graph if the plan has all of it, whole, on the NPU; else None."""
        if self.rest(phase) != "npu":
            return None
        parts = [self.parts(node, phase, m) for node in group.matmuls]
        graphs = {part.graph for found in parts for part in found}
        whole = all(map(_is_whole_on_npu, group.matmuls, parts))
        return graphs.pop() if whole and len(graphs) == 1 else None

    # --- which kernels exist ----------------------------------------------------------------

    def segments(self, node: Node, kind: DeviceKind) -> tuple[Segment, ...]:
        """What a device holds of a matmul's weight. Every part's rows are a run of them."""
        spans: dict[tuple[OperandOrder, WeightFormat | None], set[Span]] = {}
        for _, tile, shift in self._listed(node):
            if tile.device == kind:
                spans.setdefault((tile.order, tile.precision), set()).add(_rows(tile, shift))
        edges = set(self._later_cuts(node))
        return tuple(
            Segment(rows, *how) for how, found in spans.items() for rows in _runs(found, edges)
        )

    def cuts_rows(self, node: Node) -> bool:
        """Whether a matmul's output is ever made of several runs of rows."""
        assert isinstance(node.op, MatMul)
        spans = {_rows(tile, shift) for _, tile, shift in self._listed(node)}
        return len(spans) > 1 or any(row < node.op.n for row in self._later_cuts(node))

    @property
    def weight_bytes(self) -> dict[DeviceKind, int]:
        """Bytes of weights on each device. A row that two devices compute counts on both, and one
        of a device whose graphs own their weights once for each graph size.
        """
        return {
            kind: sum(
                self.rows_bytes(node, segment.rows, kind) * self._copies(node, kind)
                for node in self.graph.nodes
                if node.plan_op is not None
                for segment in self.segments(node, kind)
            )
            for kind in self._capabilities
        }

    def rows_bytes(self, node: Node, rows: Span, kind: DeviceKind) -> int:
        """Bytes of a run of rows on a device: as stored, or as it says of its own layout."""
        assert isinstance(node.op, MatMul)
        count, own = rows[1] - rows[0], self._capabilities[kind].weight_bytes
        if node.op.weight_format in own:
            return math.ceil(own[node.op.weight_format] * count * node.op.k)
        return packed_bytes(node.op.weight_format.storage, count, node.op.k)

    def _copies(self, node: Node, kind: DeviceKind) -> int:
        """How often a device may come to hold the weights of a matmul: prompts of other lengths
        than the plan lists use any graph that it has, the output head always sees one token.
        """
        capabilities = self._capabilities[kind]
        if capabilities.per_graph_size != "weights" or node.name == "lm_head":
            return 1
        return max(len(capabilities.graph_sizes), 1)

    # --- what the plan lists ----------------------------------------------------------------

    def _listed(self, node: Node) -> Iterator[tuple[OpPlan, Tile, int]]:
        """All tiles of a matmul, with the entry that each is of and the first row of its weight."""
        for name, shift in self._names(node):
            for phase in PHASES:
                for entry in self._entries.get((phase, name), {}).values():
                    for tile in entry.tiles:
                        yield entry, tile, shift

    def _names(self, node: Node) -> Sequence[tuple[OpName, int]]:
        """The plan's names for a node's rows, with the first row of each."""
        assert node.plan_op is not None
        whole = any((phase, node.plan_op) in self._entries for phase in PHASES)
        apart = any((phase, name) in self._entries for phase in PHASES for name, _ in node.members)
        return [*([(node.plan_op, 0)] if whole else []), *(node.members if apart else [])]

    def _later_cuts(self, node: Node) -> Iterator[int]:
        """Rows where plans of the source may cut a weight."""
        rows = self._source.rows if self._source is not None else {}
        for name, shift in self._names(node):
            yield from (row + shift for row in rows.get(name, ()))

    # --- a call -----------------------------------------------------------------------------

    def _at(self, node: Node, phase: Phase, m: int) -> list[tuple[OpPlan, int]]:
        """Entries of a matmul in a call of m tokens, with the first row of each."""
        assert node.plan_op is not None
        apart = self._is_apart(node, phase, m)
        if not apart and (found := self._entry(node.plan_op, phase, m)) is not None:
            return [(found, 0)]
        parts = [(self._entry(name, phase, m), name, shift) for name, shift in node.members]
        for entry, name, _ in parts or [(None, node.plan_op, 0)]:
            if entry is None:
                raise no_entry(name, phase, m, self._entries.get((phase, name), ()))
        return [(entry, shift) for entry, _, shift in parts if entry is not None]

    def _is_apart(self, node: Node, phase: Phase, m: int) -> bool:
        """Whether the members of a matmul have entries for exactly m tokens, and it has none: they
        go before what the plan says of it at other token counts.
        """
        assert node.plan_op is not None
        whole, *members = (
            m in self._entries.get((phase, name), ())
            for name in (node.plan_op, *(name for name, _ in node.members))
        )
        return not whole and bool(members) and all(members)

    def _entry(self, name: OpName, phase: Phase, m: int) -> OpPlan | None:
        """What holds for a matmul in a call of m tokens."""
        known = self._entries.get((phase, name))
        if known is None:
            return None
        if m in known:
            return known[m].clipped(m)
        if phase == "decode" and 1 in known and None not in known:
            return self._in_smallest_graphs(_open(known[1]).clipped(m))
        if phase == "prefill" and self._source is not None and None not in known:
            return self._source.plan_for(m).entry(phase, m, name).clipped(m)
        found = entry_at(known, m)
        return None if found is None else self._in_smallest_graphs(found.clipped(m))

    def _in_smallest_graphs(self, entry: OpPlan) -> OpPlan:
        """An entry for other tokens than the plan listed: `_graph_of` chooses among the graphs that
        are prepared.
        """
        tiles = [
            tile.model_copy(update={"graph_size": None})
            if tile.graph_size in self._sizes(tile.device)
            else tile
            for tile in entry.tiles
        ]
        return entry.model_copy(update={"tiles": tuple(tiles)})

    def _sizes(self, kind: DeviceKind) -> tuple[int, ...]:
        found = self._capabilities.get(kind)
        return found.graph_sizes if found is not None else ()

    def _part(self, node: Node, tile: Tile, shift: int) -> Part:
        start, stop = tile.tokens
        assert stop is not None
        return Part(
            kind=tile.device,
            tokens=(start, stop),
            rows=_rows(tile, shift),
            graph=self._graph_of(node, tile, stop - start),
            order=tile.order,
            precision=tile.precision,
        )

    def _graph_of(self, node: Node, tile: Tile, tokens: int) -> int:
        """Token count of the call that computes a tile."""
        if not self._capabilities[tile.device].static_shapes:
            return tokens
        sizes = self._sizes(tile.device)
        if self.online and tile.graph_size not in (None, *sizes):
            return tokens
        if tile.graph_size is not None and tile.graph_size not in sizes:
            raise PlanError(
                f"{node.name}: the plan wants a graph of {tile.graph_size} tokens, and the "
                f"{tile.device} has graphs of {', '.join(map(str, sizes))}: make a plan for this "
                "device"
            )
        if tile.graph_size is not None and tile.graph_size >= tokens:
            return tile.graph_size
        try:
            return padded_size(tokens, sizes)
        except ValueError as error:
            raise PlanError(f"{node.name}: {error}") from None


def fitted(plan: ExecutionPlan, capabilities: Able, *, solved: bool = False) -> ExecutionPlan:
    """The plan in calls that devices can run; `solved` as in `ExecutionPlan.for_graphs`."""
    return plan.for_graphs(
        {kind: prepared_sizes(x) for kind, x in capabilities.items()}, solved=solved
    )


def reach(plan: ExecutionPlan, capabilities: Able) -> int:
    """Tokens that the longest call of a fitted plan writes on any device, padding included."""
    assert plan.step_tokens is not None
    longest = plan.step_tokens
    held = [[size for size in prepared_sizes(x) if size >= longest] for x in capabilities.values()]
    return max([longest, *(min(sizes) for sizes in held if sizes)])


def _by_name(ops: Iterable[OpPlan]) -> dict[tuple[Phase, str], dict[int | None, OpPlan]]:
    """Entries of each matmul by their token counts."""
    found: dict[tuple[Phase, str], dict[int | None, OpPlan]] = {}
    for entry in ops:
        known = found.setdefault((entry.phase, entry.op), {})
        if entry.m in known:
            raise PlanError(
                f"the plan has two entries for {entry.op} in {entry.phase} at "
                f"{entry.m or 'any'} tokens: keep one"
            )
        known[entry.m] = entry
    return found


def _open(entry: OpPlan) -> OpPlan:
    """An entry whose tiles have all tokens of a call."""
    tiles = tuple(tile.model_copy(update={"tokens": (0, None)}) for tile in entry.tiles)
    return entry.model_copy(update={"tiles": tiles})


def _rows(tile: Tile, shift: int) -> Span:
    """Rows of the node's weight."""
    return tile.rows[0] + shift, tile.rows[1] + shift


def _is_whole_on_npu(node: Node, parts: Sequence[Part]) -> bool:
    """Whether these are one graph of all rows, as groups are prepared."""
    assert isinstance(node.op, MatMul)
    first = parts[0]
    plain = first.order == "plain" and first.precision is None
    return plain and len(parts) == 1 and (first.kind, first.rows) == ("npu", (0, node.op.n))


def _runs(spans: Iterable[Span], more: Iterable[int]) -> list[Span]:
    """The pieces between all edges that lie inside some span."""
    spans = list(spans)
    edges = sorted({edge for span in spans for edge in span} | set(more))
    return [
        (a, b)
        for a, b in itertools.pairwise(edges)
        if any(start <= a and b <= stop for start, stop in spans)
    ]
