"""A plan's entries by matmul: what computes a call of any token count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from hetero.backends.protocol import KINDS, Capabilities, DeviceKind
from hetero.profiler.model_graph import Node, OpName
from hetero.solver.errors import PlanError
from hetero.solver.execution_plan import ExecutionPlan
from hetero.solver.plan import PHASES, OpPlan, Phase, PrefillMode, Tile, entry_at, no_entry

CapabilitiesByDevice: TypeAlias = Mapping[DeviceKind, Capabilities]


def share_heads(able: CapabilitiesByDevice) -> bool:
    """Return whether both devices can compute some of the heads of an attention each."""
    return all(kind in able and able[kind].attention_heads for kind in KINDS)


OpsByName: TypeAlias = dict[tuple[Phase, str], dict[int | None, OpPlan]]


class PlanSource(Protocol):
    """Plans for token counts that a plan does not list (`hetero.solver.prepared`).

    `rows` are the row cuts of each matmul that those plans may have, `npu_head_counts` how many
    key/value heads of attention the NPU may have in them.
    """

    rows: dict[OpName, tuple[int, ...]]
    npu_head_counts: tuple[int, ...]

    def plan_for(self, m: int) -> ExecutionPlan:
        """Return the entries for prompts of m tokens, within the cuts."""


class MatmulEntries:
    """The entries of one plan, by matmul and token count; `source` gives those of other counts.

    A fused matmul's entry may be of its whole weight or of its members; the first row of a member
    is returned with it. Raises `PlanError` where a matmul has two entries for one token count.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        capabilities: CapabilitiesByDevice,
        source: PlanSource | None,
    ) -> None:
        self._capabilities, self._source = capabilities, source
        self._ops = _by_name(plan.ops)
        self._flights: dict[PrefillMode, OpsByName] = {
            flight.mode: _by_name(flight.ops) for flight in plan.in_flight
        }
        self._bands = [_by_name(band.ops) for band in plan.bands]

    def at(
        self, node: Node, phase: Phase, m: int, mode: PrefillMode = "cut"
    ) -> list[tuple[OpPlan, int]]:
        """Return the entries of a matmul in a call of m tokens, with the first row of each."""
        assert node.plan_op is not None
        if (flight := self._flights.get(mode, {}).get((phase, node.plan_op))) is not None:
            return [(flight[None].clipped(m), 0)]
        unfused = self._is_unfused(node, phase, m)
        if not unfused and (whole := self._entry(node.plan_op, phase, m)) is not None:
            return [(whole, 0)]
        parts = [(self._entry(name, phase, m), name, shift) for name, shift in node.members]
        for entry, name, _ in parts or [(None, node.plan_op, 0)]:
            if entry is None:
                raise no_entry(name, phase, m, self._ops.get((phase, name), ()))
        return [(entry, shift) for entry, _, shift in parts if entry is not None]

    def listed(self, node: Node) -> Iterator[tuple[OpPlan, Tile, int]]:
        """Yield all tiles of a matmul, in bands too, with the entry and the first row of each."""
        for name, shift in self._names(node):
            for phase in PHASES:
                for entry in self._ops.get((phase, name), {}).values():
                    for tile in entry.tiles:
                        yield entry, tile, shift
        for flight in self._flights.values():
            for entry in flight.get(("prefill", node.plan_op or ""), {}).values():
                for tile in entry.tiles:
                    yield entry, tile, 0
        for band in self._bands:
            for entry in band.get(("decode", node.plan_op or ""), {}).values():
                for tile in entry.tiles:
                    yield entry, tile, 0

    def later_cuts(self, node: Node) -> Iterator[int]:
        """Yield rows where plans of the source may cut a weight."""
        rows = self._source.rows if self._source is not None else {}
        for name, shift in self._names(node):
            yield from (row + shift for row in rows.get(name, ()))

    def _names(self, node: Node) -> Sequence[tuple[OpName, int]]:
        """Return the plan's names for a node's rows, with the first row of each."""
        assert node.plan_op is not None
        whole = any((phase, node.plan_op) in self._ops for phase in PHASES)
        unfused = any((phase, name) in self._ops for phase in PHASES for name, _ in node.members)
        return [*([(node.plan_op, 0)] if whole else []), *(node.members if unfused else [])]

    def _is_unfused(self, node: Node, phase: Phase, m: int) -> bool:
        """Return whether a matmul's members have entries for exactly m tokens, and it has none.

        They go before what the plan says of it at other token counts.
        """
        assert node.plan_op is not None
        whole, *members = (
            m in self._ops.get((phase, name), ())
            for name in (node.plan_op, *(name for name, _ in node.members))
        )
        return not whole and bool(members) and all(members)

    def _entry(self, name: OpName, phase: Phase, m: int) -> OpPlan | None:
        """Return what holds for a matmul in a call of m tokens."""
        known = self._ops.get((phase, name))
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

        `MatmulLaunches` chooses among the graphs that are prepared.
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


def _by_name(ops: Iterable[OpPlan]) -> OpsByName:
    """Return the entries of each matmul by their token counts."""
    entries: OpsByName = {}
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
