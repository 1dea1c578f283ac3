"""What a plan says for a node at any token count: its parts, cut where weights are cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import MatMul, OperandOrder
from hetero.backends.protocol import Capabilities, DeviceKind
from hetero.profiler.model_graph import Node, OpName
from hetero.solver.calls import padded_size
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import PHASES, OpPlan, Phase, PlanError, Tile

Span = tuple[int, int]


class PlanSource(Protocol):
    """Plans for token counts that a plan does not list (`hetero.solver.prepared`).

    `rows` are the row cuts of each matmul that those plans may have.
    """

    rows: dict[OpName, tuple[int, ...]]

    def plan_for(self, m: int) -> ExecutionPlan:
        """Entries for prompts of m tokens, within the cuts."""


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


class PlanBook:
    """Answers for one plan on devices with the given capabilities.

    A token count that the plan does not list takes the entry of the next larger one, its tiles cut
    off at the call's end, unless `source` gives a plan for it. Decoding several tokens
    at once (verification) takes the entry of one token. Raises `PlanError` for what cannot run.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        capabilities: Mapping[DeviceKind, Capabilities],
        *,
        source: PlanSource | None = None,
    ) -> None:
        self.plan = plan
        self._capabilities = dict(capabilities)
        self._source = source
        self._entries: dict[tuple[Phase, str], dict[int | None, OpPlan]] = {}
        for entry in plan.ops:
            known = self._entries.setdefault((entry.phase, entry.op), {})
            if entry.m in known:
                raise PlanError(
                    f"the plan has two entries for {entry.op} in {entry.phase} at "
                    f"{entry.m or 'any'} tokens: keep one"
                )
            known[entry.m] = entry

    def with_plan(self, plan: ExecutionPlan, source: PlanSource) -> PlanBook:
        """The same devices with another plan within the same cuts."""
        return PlanBook(plan, self._capabilities, source=source)

    @property
    def online(self) -> bool:
        """Whether graphs are prepared while a prompt waits."""
        return self.plan.strategy == "online-prepare"

    def rest(self, phase: Phase) -> DeviceKind:
        """Device of everything that is not a matmul."""
        return self.plan.rest.prefill if phase == "prefill" else self.plan.rest.decode

    def parts(self, node: Node, phase: Phase, m: int) -> tuple[Part, ...]:
        """Launches of a matmul node at m tokens, in the plan's order. They cover its output."""
        return tuple(self._part(node, tile, shift) for tile, shift in self._tiles(node, phase, m))

    def devices(self, node: Node) -> frozenset[DeviceKind]:
        """Devices that run a node in any phase."""
        if node.plan_op is None:
            return frozenset(self.rest(phase) for phase in PHASES)
        return frozenset(tile.device for tile, _ in self._listed(node))

    def cuts_rows(self, node: Node) -> bool:
        """Whether a matmul's output is ever made of several runs of rows."""
        assert isinstance(node.op, MatMul)
        cuts = self._source.rows if self._source is not None else {}
        later = any(cut < node.op.n for name, _ in self._names(node) for cut in cuts.get(name, ()))
        spans = {(tile.rows[0] + at, tile.rows[1] + at) for tile, at in self._listed(node)}
        return later or len(spans) > 1

    def segments(
        self, node: Node, kind: DeviceKind
    ) -> dict[tuple[OperandOrder, WeightFormat | None], list[Span]]:
        """Runs of rows between the plan's cut points that a device computes, by order and
        precision. Every part's rows are a run of them.
        """
        tiles: dict[tuple[OperandOrder, WeightFormat | None], set[Span]] = {}
        for tile, shift in self._listed(node):
            if tile.device == kind:
                rows = (tile.rows[0] + shift, tile.rows[1] + shift)
                tiles.setdefault((tile.order, tile.precision), set()).add(rows)
        cuts = self._source.rows if self._source is not None else {}
        edges = [r + shift for name, shift in self._names(node) for r in cuts.get(name, ())]
        return {key: _segments(spans, edges) for key, spans in tiles.items()}

    def _listed(self, node: Node) -> Iterable[tuple[Tile, int]]:
        for name, shift in self._names(node):
            for phase in PHASES:
                for entry in self._entries.get((phase, name), {}).values():
                    for tile in entry.tiles:
                        yield tile, shift

    def _names(self, node: Node) -> Sequence[tuple[OpName, int]]:
        """The plan's names for a node's rows, with the first row of each."""
        assert node.plan_op is not None
        whole = any((phase, node.plan_op) in self._entries for phase in PHASES)
        apart = any((phase, name) in self._entries for phase in PHASES for name, _ in node.members)
        return [*([(node.plan_op, 0)] if whole else []), *(node.members if apart else [])]

    def _tiles(self, node: Node, phase: Phase, m: int) -> list[tuple[Tile, int]]:
        assert node.plan_op is not None
        apart = self.plan.is_apart(phase, m, node.plan_op, [name for name, _ in node.members])
        found = None if apart else self._lookup(node.plan_op, phase, m)
        if found is not None:
            return [(tile, 0) for tile in found]
        tiles: list[tuple[Tile, int]] = []
        for name, shift in node.members:
            part = self._lookup(name, phase, m)
            if part is None:
                raise PlanError(f"the plan has no entry for {name} in {phase} at {m} tokens")
            tiles += [(tile, shift) for tile in part]
        if not tiles:
            raise PlanError(f"the plan has no entry for {node.plan_op} in {phase} at {m} tokens")
        return tiles

    def _lookup(self, name: str, phase: Phase, m: int) -> list[Tile] | None:
        known = self._entries.get((phase, name))
        if known is None:
            return None
        if m in known:
            return [tile.resolved(m) for tile in known[m].tiles]
        if None in known:
            return self._in_smallest_graphs(tile.resolved(m) for tile in known[None].tiles)
        if phase == "decode" and 1 in known:
            tiles = [tile.model_copy(update={"tokens": (0, m)}) for tile in known[1].tiles]
            return self._in_smallest_graphs(tiles)
        if phase == "prefill" and self._source is not None:
            found = self._source.plan_for(m).entry(phase, m, name)
            return [tile.resolved(m) for tile in found.tiles]
        larger = [count for count in known if count is not None and count > m]
        return self._in_smallest_graphs(clip(known[min(larger)].tiles, m)) if larger else None

    def _in_smallest_graphs(self, tiles: Iterable[Tile]) -> list[Tile]:
        """Tiles with other tokens than the plan listed: `_graph` chooses among those that are
        prepared.
        """
        return [
            tile.model_copy(update={"graph_size": None})
            if tile.graph_size in self._capabilities[tile.device].graph_sizes
            else tile
            for tile in tiles
        ]

    def _part(self, node: Node, tile: Tile, shift: int) -> Part:
        start, stop = tile.tokens
        assert stop is not None
        graph = self._graph(node, tile, stop - start)
        return Part(
            kind=tile.device,
            tokens=(start, stop),
            rows=(tile.rows[0] + shift, tile.rows[1] + shift),
            graph=graph,
            order=tile.order,
            precision=tile.precision,
        )

    def _graph(self, node: Node, tile: Tile, tokens: int) -> int:
        capabilities = self._capabilities[tile.device]
        if not capabilities.static_shapes:
            return tokens
        sizes = capabilities.graph_sizes
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


def clip(tiles: Iterable[Tile], m: int) -> list[Tile]:
    """Tiles of a larger call cut off at m tokens."""
    clipped = []
    for tile in tiles:
        start, stop = tile.tokens
        if start < m:
            end = m if stop is None else min(stop, m)
            clipped.append(tile.model_copy(update={"tokens": (start, end)}))
    return clipped


def _segments(spans: Iterable[Span], more: Iterable[int] = ()) -> list[Span]:
    """The pieces between all edges that lie inside some span."""
    spans = list(spans)
    edges = sorted({edge for span in spans for edge in span} | set(more))
    return [
        (a, b)
        for a, b in itertools.pairwise(edges)
        if any(start <= a and b <= stop for start, stop in spans)
    ]
