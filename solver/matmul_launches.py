"""The launches of a matmul in a call: the plan's tiles, cut at kernels and padded to graphs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from hetero.backends.protocol import Capabilities, DeviceKind
from hetero.profiler.model_graph import Node, OpName
from hetero.solver.assignments import Part
from hetero.solver.errors import PlanError
from hetero.solver.matmul_entries import CapabilitiesByDevice, MatmulEntries
from hetero.solver.plan import Phase, PrefillMode, Tile
from hetero.solver.planned_kernels import PlannedKernels, rows_of, storage_of
from hetero.solver.prompt_calls import padded_size

_Call: TypeAlias = tuple[OpName, Phase, int, PrefillMode]
MAX_CACHED: Final = 64  # matmuls of calls that are remembered, since layers are alike


class MatmulLaunches:
    """The launches of matmuls by call; remembers the last `MAX_CACHED`.

    `online`: graphs that are not prepared ahead are prepared while a prompt waits.
    """

    def __init__(
        self,
        entries: MatmulEntries,
        kernels: PlannedKernels,
        capabilities: CapabilitiesByDevice,
        *,
        online: bool,
    ) -> None:
        self._entries, self._kernels = entries, kernels
        self._capabilities, self._online = capabilities, online
        self._tiled: dict[_Call, tuple[Part, ...]] = {}
        self._parts: dict[_Call, tuple[Part, ...]] = {}

    def parts(
        self, node: Node, phase: Phase, m: int, mode: PrefillMode = "cut"
    ) -> tuple[Part, ...]:
        """Return launches of a matmul node at m tokens, in the plan's order.

        They cover its output, with the same rows wherever they share one. On a device that
        prepares rows those of each are one of `PlannedKernels.segments`, unless it is prepared
        while a prompt waits.
        """
        assert node.plan_op is not None
        key = (node.plan_op, phase, m, mode)
        if key not in self._parts:
            parts = self._split(node, self.tiles(node, phase, m, mode))
            _check_spill(node, parts, m)
            _keep(self._parts, key, parts)
        return self._parts[key]

    def tiles(
        self, node: Node, phase: Phase, m: int, mode: PrefillMode = "cut"
    ) -> tuple[Part, ...]:
        """Return a part for each tile of the plan."""
        assert node.plan_op is not None
        key = (node.plan_op, phase, m, mode)
        if key not in self._tiled:
            tiled = [
                self._part(node, tile, shift)
                for entry, shift in self._entries.at(node, phase, m, mode)
                for tile in entry.tiles
            ]
            _keep(self._tiled, key, tuple(tiled))
        return self._tiled[key]

    def _part(self, node: Node, tile: Tile, shift: int) -> Part:
        start, stop = tile.tokens
        assert stop is not None
        able = self._capabilities[tile.device]
        online = self._online and able.static_shapes
        online = online and tile.graph_size not in (None, *able.graph_sizes)
        return Part(
            kind=tile.device,
            tokens=(start, stop),
            rows=rows_of(tile, shift),
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
            if self._prepares(part.kind) and not part.online:
                start, stop = part.rows
                known = self._kernels.edges(node, part.kind, storage_of(node, part.precision))
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
            if same and not self._prepares(part.kind) and other.tokens[1] == part.tokens[0]:
                tokens = (other.tokens[0], part.tokens[1])
                joined[i] = dataclasses.replace(other, tokens=tokens, graph=tokens[1] - tokens[0])
                return
        joined.append(part)

    def _prepares(self, kind: DeviceKind) -> bool:
        return self._capabilities[kind].prepares_rows

    def _graph_of(self, node: Node, tile: Tile, tokens: int) -> int:
        """Return the token count of the call that computes a tile."""
        able = self._capabilities[tile.device]
        if not able.static_shapes:
            return tokens
        sizes = able.graph_sizes
        if tile.graph_size is not None and tile.graph_size not in sizes:
            raise no_graph(node.name, tile.graph_size, tile.device, able)
        if tile.graph_size is not None and tile.graph_size >= tokens:
            return tile.graph_size
        try:
            return padded_size(tokens, sizes)
        except ValueError as error:
            raise PlanError(f"{node.name}: {error}") from None


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


def no_graph(name: str, size: int, kind: DeviceKind, able: Capabilities) -> PlanError:
    return PlanError(
        f"{name}: the plan wants a graph of {size} tokens, and the {kind} has graphs of "
        f"{', '.join(map(str, able.graph_sizes)) or 'none'}: make a plan with --graph-sizes of "
        "these, or with a profile of this device"
    )
