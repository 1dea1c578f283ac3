"""`Placement`: the one translation of a plan, without devices and without weights.

Who computes which tokens and rows of which node, in which calls, with which kernels, and what bytes
those hold. The engine, the compiler, the adapter, predictions and the choice of devices ask it;
only the report reads a plan's tiles besides, to draw them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, Protocol, TypeAlias

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.ops import Attention, AttentionHeads, MatMul, Op, OperandOrder, Outliers
from hetero.backends.protocol import KINDS, Capabilities, DeviceKind, prepared_sizes
from hetero.backends.weights import packed_bytes
from hetero.profiler.model_graph import ModelGraph, Node, OpName
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.node_groups import NodeGroup, node_groups
from hetero.solver.plan import (
    PHASES,
    HeadCounts,
    OpPlan,
    Phase,
    PrefillMode,
    Tile,
    device_of_other,
    entry_at,
    no_entry,
)
from hetero.solver.prompt_calls import padded_size

Span: TypeAlias = tuple[int, int]
CapabilitiesByDevice: TypeAlias = Mapping[DeviceKind, Capabilities]
_Call: TypeAlias = tuple[OpName, Phase, int, PrefillMode]
MAX_CACHED: Final = 64  # matmuls of calls that are remembered, since layers are alike


class PlanSource(Protocol):
    """Plans for token counts that a plan does not list (`hetero.solver.prepared`).

    `rows` are the row cuts of each matmul that those plans may have, `npu_head_counts` how many
    key/value heads of attention the NPU may have in them.
    """

    rows: dict[OpName, tuple[int, ...]]
    npu_head_counts: tuple[int, ...]

    def plan_for(self, m: int) -> ExecutionPlan:
        """Return the entries for prompts of m tokens, within the cuts."""


class Segment(NamedTuple):
    """Rows of a weight that a device computes with one kernel.

    Rows that tiles compute in several orders or precisions are a segment for each.
    """

    rows: Span
    order: OperandOrder = "plain"
    precision: WeightFormat | None = None

    def op(self, whole: MatMul) -> MatMul:
        """Return the operation on these rows."""
        start, stop = self.rows
        weight_format = self.precision or whole.weight_format
        return dataclasses.replace(
            whole, n=stop - start, order=self.order, weight_format=weight_format
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One launch of a matmul: tokens × rows of its output on one device.

    `graph` is the token count that the call is bound with, padding included. `rows` are rows of the
    node's weight. `precision` is None for the model's own format. `online`: the graph is prepared
    while the prompt waits.
    """

    kind: DeviceKind
    tokens: Span
    rows: Span
    graph: int
    order: OperandOrder = "plain"
    precision: WeightFormat | None = None
    online: bool = False

    @property
    def stop(self) -> int:
        """End of the tokens that are written, padding included."""
        return self.tokens[0] + self.graph

    @property
    def segment(self) -> Segment:
        """Return the kernel of all its rows."""
        return Segment(self.rows, self.order, self.precision)


class Heads(NamedTuple):
    """One launch of an attention that both devices share.

    Key/value heads first … stop - 1, bound with `graph` tokens, padding included.
    """

    kind: DeviceKind
    first: int
    stop: int
    graph: int

    def op(self, whole: Attention) -> AttentionHeads:
        """Return the operation on these heads."""
        return AttentionHeads(attention=whole, first=self.first, count=self.stop - self.first)


class Assignment(NamedTuple):
    """The device of a node in a call, or as one graph the `group` of nodes that begins with it.

    A matmul's `parts` are its launches. Everything else is one launch on `kind`, bound with `graph`
    tokens, padding included; of an attention whose `heads` both devices share one on each.
    """

    node: Node
    kind: DeviceKind | None = None
    graph: int = 0
    parts: tuple[Part, ...] = ()
    group: NodeGroup | None = None
    heads: tuple[Heads, ...] = ()


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
        capabilities: CapabilitiesByDevice,
        *,
        source: PlanSource | None = None,
    ) -> None:
        self.plan = fitted(plan, capabilities, solved=source is not None)
        self.graph = graph
        self._capabilities = dict(capabilities)
        self._source = source
        self._entries = _by_name(plan.ops)
        self._flights: dict[PrefillMode, dict[tuple[Phase, str], dict[int | None, OpPlan]]] = {
            flight.form: _by_name(flight.ops) for flight in plan.in_flight
        }
        self._prepared = self  # whose kernels there are
        self._edges: dict[tuple[OpName, DeviceKind, StorageFormat], frozenset[int]] = {}
        self._tiled: dict[_Call, tuple[Part, ...]] = {}
        self._parts: dict[_Call, tuple[Part, ...]] = {}
        self._check_graphs()
        self._check_heads()

    def with_plan(self, plan: ExecutionPlan, source: PlanSource) -> Placement:
        """Return the same devices and kernels with another plan within the same cuts."""
        changed = Placement(plan, self.graph, self._capabilities, source=source)
        changed._prepared = self._prepared
        return changed

    def _check_graphs(self) -> None:
        """Check that the device has every graph that the plan prepares ahead."""
        for entry in self.plan.ops:
            for tile in entry.tiles:
                able = self._capabilities.get(tile.device)
                late = self.online and tile.graph_size not in self.plan.graph_sizes
                if able is None or not able.static_shapes or tile.graph_size is None or late:
                    continue
                if tile.graph_size not in able.graph_sizes:
                    raise _no_graph(entry.op, tile.graph_size, tile.device, able)

    def _check_heads(self) -> None:
        """Check that devices that share attention are able to."""
        if not self.plan.shares_attention:
            return
        self.plan.check_heads(self.graph)
        for kind, able in self._capabilities.items():
            if not able.attention_heads:
                raise PlanError(
                    f"the plan shares the heads of attention between both devices, and the {kind} "
                    "computes all of them or none: make a plan with a profile of this device"
                )

    @property
    def online(self) -> bool:
        """Return whether graphs are prepared while a prompt waits."""
        return self.plan.strategy == "online-prepare"

    @property
    def longest(self) -> int:
        """Return the tokens of the longest call."""
        assert self.plan.step_tokens is not None
        return self.plan.step_tokens

    @property
    def written(self) -> int:
        """Return the tokens that the longest call writes, padding included."""
        return reach(self.plan, self._capabilities)

    # --- assignments ------------------------------------------------------------------------

    def rest(self, phase: Phase) -> DeviceKind:
        """Return the device of everything that is not a matmul."""
        return self.plan.rest.prefill if phase == "prefill" else self.plan.rest.decode

    def at(
        self, phase: Phase, m: int, logit_rows: int = 1, *, form: PrefillMode = "cut"
    ) -> Iterator[Assignment]:
        """Yield what computes a call of m tokens, in the model's order.

        The output head sees the last `logit_rows` tokens, and is left out where that is none. Rows
        of several contexts decode so, too; but what knows a position runs for each of them, on the
        same device (`row_graph`). `form`: of calls in flight.
        """
        inside: set[str] = set()  # nodes of groups that were yielded
        for node in self.graph.nodes:
            if node.name in inside or (node.name == "lm_head" and not logit_rows):
                continue
            group = self.groups.get(node.name) if form == "cut" else None
            graph = None if group is None else self.fused(group, phase, m)
            if group is not None and graph is not None:
                inside.update(member.name for member in group.nodes)
                yield Assignment(node, "npu", graph, group=group)
            elif node.plan_op is not None:
                tokens = logit_rows if node.name == "lm_head" else m
                yield Assignment(node, parts=self.parts(node, phase, tokens, form))
            else:
                heads = self.heads(phase, m, form) if isinstance(node.op, Attention) else ()
                yield Assignment(node, *self._other(node, phase, m), heads=heads)

    def heads(self, phase: Phase, m: int, form: PrefillMode = "cut") -> tuple[Heads, ...]:
        """Return the launches of an attention of m tokens that both devices share.

        The NPU has the first key/value heads. None where the device of the other operators has all;
        it has in decoding, of calls that are cut for being in flight together, and where no graph
        holds m tokens.
        """
        if phase != "prefill" or form != "cut" or len(self._capabilities) < len(KINDS):
            return ()
        counts = self._head_counts(m)
        if counts is None or not counts.shared:
            return ()
        able, count = self._capabilities["npu"], counts.npu
        sizes = prepared_sizes(able)
        if sizes and m > sizes[-1]:
            return ()
        graph = padded_size(m, sizes)
        return (Heads("gpu", count, count + counts.gpu, m), Heads("npu", 0, count, graph))

    def _head_counts(self, m: int) -> HeadCounts | None:
        """Return what holds for the attention of a call of m tokens."""
        known = {x.m for x in self.plan.attention}
        if self._source is not None and not known & {m, None}:
            return self._source.plan_for(m).heads(m) if self._source.npu_head_counts else None
        return self.plan.heads(m)

    @cached_property
    def head_cuts(self) -> tuple[int, ...]:
        """Return how many heads the NPU may have of an attention, rising."""
        if self._prepared is not self:
            return self._prepared.head_cuts
        later = self._source.npu_head_counts if self._source is not None else ()
        return tuple(
            sorted({x.heads.npu for x in self.plan.attention if x.heads.shared} | {*later})
        )

    def shared_heads(self, kind: DeviceKind) -> tuple[tuple[int, int], ...]:
        """Return the runs of key/value heads that a device computes of some attention."""
        if len(self._capabilities) < len(KINDS):
            return ()
        last = self.graph.kv_heads
        return tuple((0, x) if kind == "npu" else (x, last) for x in self.head_cuts)

    def _other(self, node: Node, phase: Phase, m: int) -> tuple[DeviceKind, int]:
        """Return device and tokens of a node that is no matmul."""
        # As many tokens as the rest, for a padded graph reads what is written here.
        kind = device_of_other(node.op, self.rest(phase), self._capabilities)
        return kind, self.padded(phase, m)

    def padded(self, phase: Phase, m: int) -> int:
        """Return the tokens that all operations but the matmuls compute.

        They are those of a graph, where shapes are static.
        """
        kind = self.rest(phase)
        able = self._capabilities[kind]
        try:
            return padded_size(m, able.graph_sizes if able.static_shapes else ())
        except ValueError as error:
            raise PlanError(f"{phase} on the {kind}: {error}") from None

    @property
    def row_graph(self) -> int:
        """Return the tokens that a launch for one row of a decode step is bound with.

        Padding included.
        """
        return self.padded("decode", 1)

    @cached_property
    def joins(self) -> bool:
        """Return whether rows of several contexts can decode in one step.

        Not where attention is inside the graph of a whole block, which knows one position.
        """
        return not any(
            group.fixed and self.fused(group, "decode", 1) is not None
            for group in self.groups.values()
        )

    def parts(
        self, node: Node, phase: Phase, m: int, form: PrefillMode = "cut"
    ) -> tuple[Part, ...]:
        """Return launches of a matmul node at m tokens, in the plan's order.

        They cover its output, with the same rows wherever they share one. On a device with static
        shapes the rows of each are one of its `segments`, unless it is prepared while a prompt
        waits.
        """
        assert node.plan_op is not None
        key = (node.plan_op, phase, m, form)
        if key not in self._parts:
            parts = self._split(node, self._tiles(node, phase, m, form))
            _check_spill(node, parts, m)
            _keep(self._parts, key, parts)
        return self._parts[key]

    def _tiles(
        self, node: Node, phase: Phase, m: int, form: PrefillMode = "cut"
    ) -> tuple[Part, ...]:
        """Return a part for each tile of the plan."""
        assert node.plan_op is not None
        key = (node.plan_op, phase, m, form)
        if key not in self._tiled:
            tiled = [
                self._part(node, tile, shift)
                for entry, shift in self._at(node, phase, m, form)
                for tile in entry.tiles
            ]
            _keep(self._tiled, key, tuple(tiled))
        return self._tiled[key]

    def entries(self, phase: Phase, m: int) -> tuple[OpPlan, ...]:
        """Return what computes the matmuls of a call of m tokens, in order.

        The output head sees one.
        """
        first = {node.plan_op: node for node in reversed(self.graph.nodes) if node.plan_op}
        return tuple(
            entry
            for node in reversed(first.values())
            for entry, _ in self._at(node, phase, 1 if node.plan_op == "lm_head" else m)
        )

    def block_entries(self, phase: Phase, m: int) -> tuple[OpPlan, ...]:
        """Do the same as `entries`, without the output head."""
        return tuple(entry for entry in self.entries(phase, m) if entry.op != "lm_head")

    def working(self, m: int) -> frozenset[DeviceKind]:
        """Return the devices that work in a prompt's call of m tokens, the output head aside."""
        tiles = {tile.device for x in self.block_entries("prefill", m) for tile in x.tiles}
        heads = {part.kind for part in self.heads("prefill", m)}
        return frozenset({self.rest("prefill"), *tiles, *heads})

    def devices(self, node: Node) -> frozenset[DeviceKind]:
        """Return the devices that run a node in any phase."""
        if node.plan_op is None:
            return frozenset(self._other(node, phase, 1)[0] for phase in PHASES)
        return frozenset(tile.device for _, tile, _ in self._listed(node))

    @cached_property
    def groups(self) -> dict[str, NodeGroup]:
        """Return the nodes that may run as one graph on the NPU, by their first node's name."""
        return node_groups(self.graph.nodes, self.plan.fused) if "npu" in self._capabilities else {}

    def fused(self, group: NodeGroup, phase: Phase, m: int) -> int | None:
        """Return the tokens of a group's graph if the plan has all of it, whole, on the NPU.

        Else None.
        """
        if self.rest(phase) != "npu":
            return None
        parts = [self._tiles(node, phase, m) for node in group.matmuls]
        graphs = {part.graph for launches in parts for part in launches}
        whole = all(map(_is_whole_on_npu, group.matmuls, parts))
        return graphs.pop() if whole and len(graphs) == 1 else None

    # --- which kernels exist ----------------------------------------------------------------

    def segments(self, node: Node, kind: DeviceKind) -> tuple[Segment, ...]:
        """Return what a device holds of a matmul's weight."""
        if self._prepared is not self:
            return self._prepared.segments(node, kind)
        spans: dict[tuple[OperandOrder, WeightFormat | None], set[Span]] = {}
        for _, tile, shift in self._listed(node):
            if tile.device == kind:
                spans.setdefault((tile.order, tile.precision), set()).add(_rows(tile, shift))
        return tuple(
            Segment(rows, *how)
            for how, covered in spans.items()
            for rows in _runs(covered, self._edges_of(node, kind, _storage(node, how[1])))
        )

    def _edges_of(self, node: Node, kind: DeviceKind, storage: StorageFormat) -> frozenset[int]:
        """Return rows where a device's kernels of a matmul end.

        They end at the edges of every tile that it meets (its own, the other device's), so
        that all parts of a call meet in rows. Kernels of another storage, where phases have
        different ones, are not cut for these.
        """
        if self._prepared is not self:
            return self._prepared._edges_of(node, kind, storage)
        assert node.plan_op is not None
        key = (node.plan_op, kind, storage)
        if key not in self._edges:
            edges: set[int] = set()
            for entry, _, shift in self._listed(node):
                tiles = [x for x in entry.tiles if _storage(node, x.precision) is storage]
                if tiles and entry.phase == "prefill":
                    edges.update(self._later_cuts(node))
                if any(tile.device == kind for tile in tiles):
                    edges.update(edge + shift for tile in entry.tiles for edge in tile.rows)
            self._edges[key] = frozenset(edges)
        return self._edges[key]

    def cuts_rows(self, node: Node) -> bool:
        """Return whether a matmul's output is ever made of several runs of rows."""
        assert isinstance(node.op, MatMul)
        spans = {_rows(tile, shift) for _, tile, shift in self._listed(node)}
        return len(spans) > 1 or any(row < node.op.n for row in self._later_cuts(node))

    @property
    def weight_bytes(self) -> dict[DeviceKind, int]:
        """Return the bytes of weights on each device.

        A row that two devices compute counts on both, and one of a device whose graphs own their
        weights once for each graph size.
        """
        nbytes = {
            kind: sum(
                self.rows_bytes(node, segment, kind) * self._copies(node, kind)
                for node in self.graph.nodes
                if node.plan_op is not None
                for segment in self.segments(node, kind)
            )
            for kind in self._capabilities
        }
        for node in self.graph.nodes:
            for kind in self.devices(node) if isinstance(node.op, Outliers) else ():
                nbytes[kind] += outlier_bytes(node.op)
        return nbytes

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all weights that some device uses, counted once, as stored."""
        return sum(
            packed_bytes(node.op.weight_format.storage, node.op.n, node.op.k)
            for node in self.graph.nodes
            if isinstance(node.op, MatMul)
        ) + sum(outlier_bytes(x.op) for x in self.graph.nodes if isinstance(x.op, Outliers))

    def rows_bytes(self, node: Node, segment: Segment, kind: DeviceKind) -> int:
        """Return the bytes of a run of rows on a device.

        They are as stored, or as the device says of its own layout.
        """
        assert isinstance(node.op, MatMul)
        op, own = segment.op(node.op), self._capabilities[kind].weight_bytes
        if op.weight_format in own:
            return math.ceil(own[op.weight_format] * op.n * op.k)
        return packed_bytes(op.weight_format.storage, op.n, op.k)

    def _copies(self, node: Node, kind: DeviceKind) -> int:
        """Return how often a device may come to hold the weights of a matmul.

        Prompts of other lengths than the plan lists use any graph that it has, the output head
        always sees one token.
        """
        capabilities = self._capabilities[kind]
        if capabilities.per_graph_size != "weights" or node.name == "lm_head":
            return 1
        return max(len(capabilities.graph_sizes), 1)

    # --- what the plan lists ----------------------------------------------------------------

    def _listed(self, node: Node) -> Iterator[tuple[OpPlan, Tile, int]]:
        """Yield all tiles of a matmul, with the entry and the first row of each."""
        for name, shift in self._names(node):
            for phase in PHASES:
                for entry in self._entries.get((phase, name), {}).values():
                    for tile in entry.tiles:
                        yield entry, tile, shift
        for flight in self._flights.values():
            for entry in flight.get(("prefill", node.plan_op or ""), {}).values():
                for tile in entry.tiles:
                    yield entry, tile, 0

    def _names(self, node: Node) -> Sequence[tuple[OpName, int]]:
        """Return the plan's names for a node's rows, with the first row of each."""
        assert node.plan_op is not None
        whole = any((phase, node.plan_op) in self._entries for phase in PHASES)
        unfused = any(
            (phase, name) in self._entries for phase in PHASES for name, _ in node.members
        )
        return [*([(node.plan_op, 0)] if whole else []), *(node.members if unfused else [])]

    def _later_cuts(self, node: Node) -> Iterator[int]:
        """Yield rows where plans of the source may cut a weight."""
        rows = self._source.rows if self._source is not None else {}
        for name, shift in self._names(node):
            yield from (row + shift for row in rows.get(name, ()))

    # --- a call -----------------------------------------------------------------------------

    def _at(
        self, node: Node, phase: Phase, m: int, form: PrefillMode = "cut"
    ) -> list[tuple[OpPlan, int]]:
        """Return the entries of a matmul in a call of m tokens, with the first row of each."""
        assert node.plan_op is not None
        if (flight := self._flights.get(form, {}).get((phase, node.plan_op))) is not None:
            return [(flight[None].clipped(m), 0)]
        unfused = self._is_unfused(node, phase, m)
        if not unfused and (whole := self._entry(node.plan_op, phase, m)) is not None:
            return [(whole, 0)]
        parts = [(self._entry(name, phase, m), name, shift) for name, shift in node.members]
        for entry, name, _ in parts or [(None, node.plan_op, 0)]:
            if entry is None:
                raise no_entry(name, phase, m, self._entries.get((phase, name), ()))
        return [(entry, shift) for entry, _, shift in parts if entry is not None]

    def _is_unfused(self, node: Node, phase: Phase, m: int) -> bool:
        """Return whether a matmul's members have entries for exactly m tokens, and it has none.

        They go before what the plan says of it at other token counts.
        """
        assert node.plan_op is not None
        whole, *members = (
            m in self._entries.get((phase, name), ())
            for name in (node.plan_op, *(name for name, _ in node.members))
        )
        return not whole and bool(members) and all(members)

    def _entry(self, name: OpName, phase: Phase, m: int) -> OpPlan | None:
        """Return what holds for a matmul in a call of m tokens."""
        known = self._entries.get((phase, name))
        if known is None:
            return None
        if m in known:
            return known[m].clipped(m)
        if phase == "decode" and 1 in known and None not in known:
            return self._in_smallest_graphs(_open(known[1]).clipped(m))
        if phase == "prefill" and self._source is not None and None not in known:
            return self._source.plan_for(m).entry(phase, m, name).clipped(m)
        planned = entry_at(known, m)
        return None if planned is None else self._in_smallest_graphs(planned.clipped(m))

    def _in_smallest_graphs(self, entry: OpPlan) -> OpPlan:
        """Return an entry for other tokens than the plan listed.

        `_graph_of` chooses among the graphs that are prepared.
        """
        tiles = [
            tile.model_copy(update={"graph_size": None})
            if tile.graph_size in self._sizes(tile.device)
            else tile
            for tile in entry.tiles
        ]
        return entry.model_copy(update={"tiles": tuple(tiles)})

    def _sizes(self, kind: DeviceKind) -> tuple[int, ...]:
        capabilities = self._capabilities.get(kind)
        return capabilities.graph_sizes if capabilities is not None else ()

    def _part(self, node: Node, tile: Tile, shift: int) -> Part:
        start, stop = tile.tokens
        assert stop is not None
        able = self._capabilities[tile.device]
        online = self.online and able.static_shapes
        online = online and tile.graph_size not in (None, *able.graph_sizes)
        return Part(
            kind=tile.device,
            tokens=(start, stop),
            rows=_rows(tile, shift),
            graph=stop - start if online else self._graph_of(node, tile, stop - start),
            order=tile.order,
            precision=tile.precision,
            online=online,
        )

    def _split(self, node: Node, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return parts cut at every edge of rows, then joined along tokens.

        Where one device has both.

        Each panel of the output is then written with one row length by every part in it.
        """
        edges: set[int] = set()
        for part in parts:
            edges.update(part.rows)
            if self._is_static(part.kind) and not part.online:
                start, stop = part.rows
                known = self._edges_of(node, part.kind, _storage(node, part.precision))
                edges.update(e for e in known if start < e < stop)
        joined: list[Part] = []
        for part in parts:
            inside = sorted(e for e in edges if part.rows[0] <= e <= part.rows[1])
            for span in itertools.pairwise(inside):
                self._join(joined, dataclasses.replace(part, rows=span))
        return tuple(joined)

    def _join(self, joined: list[Part], part: Part) -> None:
        """Append a part, or lengthen the one that ends where it begins."""
        for i, other in enumerate(joined):
            same = (other.kind, other.segment) == (part.kind, part.segment)
            if same and not self._is_static(part.kind) and other.tokens[1] == part.tokens[0]:
                tokens = (other.tokens[0], part.tokens[1])
                joined[i] = dataclasses.replace(other, tokens=tokens, graph=tokens[1] - tokens[0])
                return
        joined.append(part)

    def _is_static(self, kind: DeviceKind) -> bool:
        return self._capabilities[kind].static_shapes

    def _graph_of(self, node: Node, tile: Tile, tokens: int) -> int:
        """Return the token count of the call that computes a tile."""
        able = self._capabilities[tile.device]
        if not able.static_shapes:
            return tokens
        sizes = able.graph_sizes
        if tile.graph_size is not None and tile.graph_size not in sizes:
            raise _no_graph(node.name, tile.graph_size, tile.device, able)
        if tile.graph_size is not None and tile.graph_size >= tokens:
            return tile.graph_size
        try:
            return padded_size(tokens, sizes)
        except ValueError as error:
            raise PlanError(f"{node.name}: {error}") from None


def fitted(
    plan: ExecutionPlan, capabilities: CapabilitiesByDevice, *, solved: bool = False
) -> ExecutionPlan:
    """Return the plan in calls that devices can run; `solved` as in `ExecutionPlan.for_graphs`."""
    return plan.for_graphs(
        {kind: prepared_sizes(x) for kind, x in capabilities.items()}, solved=solved
    )


def reach(plan: ExecutionPlan, capabilities: CapabilitiesByDevice) -> int:
    """Return the tokens that the longest call of a fitted plan writes, padding included."""
    assert plan.step_tokens is not None
    longest = plan.step_tokens
    resident = [
        [size for size in prepared_sizes(x) if size >= longest] for x in capabilities.values()
    ]
    return max([longest, *(min(sizes) for sizes in resident if sizes)])


def _by_name(ops: Iterable[OpPlan]) -> dict[tuple[Phase, str], dict[int | None, OpPlan]]:
    """Return the entries of each matmul by their token counts."""
    entries: dict[tuple[Phase, str], dict[int | None, OpPlan]] = {}
    for entry in ops:
        known = entries.setdefault((entry.phase, entry.op), {})
        if entry.m in known:
            raise PlanError(
                f"the plan has two entries for {entry.op} in {entry.phase} at "
                f"{entry.m or 'any'} tokens: keep one"
            )
        known[entry.m] = entry
    return entries


def _open(entry: OpPlan) -> OpPlan:
    """Return an entry whose tiles have all tokens of a call."""
    tiles = tuple(tile.model_copy(update={"tokens": (0, None)}) for tile in entry.tiles)
    return entry.model_copy(update={"tiles": tiles})


def _rows(tile: Tile, shift: int) -> Span:
    """Return the rows of the node's weight."""
    return tile.rows[0] + shift, tile.rows[1] + shift


def _is_whole_on_npu(node: Node, parts: Sequence[Part]) -> bool:
    """Return whether these are one graph of all rows, as groups are prepared."""
    assert isinstance(node.op, MatMul)
    first = parts[0]
    plain = first.order == "plain" and first.precision is None
    return plain and len(parts) == 1 and (first.kind, first.rows) == ("npu", (0, node.op.n))


def _keep(known: dict[_Call, tuple[Part, ...]], key: _Call, parts: tuple[Part, ...]) -> None:
    if len(known) >= MAX_CACHED:
        known.clear()
    known[key] = parts


def _check_spill(node: Node, parts: Iterable[Part], m: int) -> None:
    """Check that a padded graph writes after the call's last token alone.

    Never over another part's tokens.
    """
    for part in parts:
        if part.stop > part.tokens[1] < m:
            raise PlanError(
                f"{node.name}: the graph of {part.graph} tokens at {part.tokens[0]} reaches over "
                f"tokens from {part.tokens[1]} on, which another tile computes: end the tile with "
                "the graph, or at the last token"
            )


def _no_graph(name: str, size: int, kind: DeviceKind, able: Capabilities) -> PlanError:
    return PlanError(
        f"{name}: the plan wants a graph of {size} tokens, and the {kind} has graphs of "
        f"{', '.join(map(str, able.graph_sizes)) or 'none'}: make a plan with --graph-sizes of "
        "these, or with a profile of this device"
    )


def _storage(node: Node, precision: WeightFormat | None) -> StorageFormat:
    """Return how the weights are stored that a tile or part computes with."""
    assert isinstance(node.op, MatMul)
    return (precision or node.op.weight_format).storage


def _runs(spans: Iterable[Span], edges: Iterable[int]) -> list[Span]:
    """Return the pieces between edges that are inside some span."""
    spans = list(spans)
    return [
        (a, b)
        for a, b in itertools.pairwise(sorted(edges))
        if any(start <= a and b <= stop for start, stop in spans)
    ]


def outlier_bytes(op: Op) -> int:
    """Return the bytes of the hot features' weights, and where there is excess of the whole weight.

    At most, for a GPU may have it mapped for the matmul.
    """
    assert isinstance(op, Outliers)
    slab = packed_bytes(StorageFormat.F16, op.n, op.hot) + 4 * op.hot if op.hot else 0
    return slab + (packed_bytes(StorageFormat.Q8R, op.n, op.k) if op.excess else 0)
