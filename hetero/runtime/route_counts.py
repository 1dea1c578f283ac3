"""Counts of how often a model's routers choose each expert, made behind every router of a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hetero.backends.ops import Router
from hetero.backends.protocol import BoundCall
from hetero.profiler.model_graph import ModelGraph, Node
from hetero.runtime.chunk_slots import ChunkSlots
from hetero.runtime.step import PendingLaunch


class RouteCounts:
    """Counts by layer and expert; the control thread waits for every router to make them."""

    def __init__(self, graph: ModelGraph) -> None:
        self.layers: Mapping[int, npt.NDArray[np.int64]] = {
            node.layer: np.zeros(node.op.experts, np.int64)
            for node in graph.nodes
            if isinstance(node.op, Router) and node.layer is not None
        }

    def launch(self, node: Node, slots: ChunkSlots) -> tuple[str, list[PendingLaunch]]:
        """Return what counts the choices of a router for a chunk's fed tokens, with its name."""
        assert isinstance(node.op, Router)
        assert node.layer is not None
        routes, reads = node.slots["y"], frozenset({slots.ref(node.slots["y"])})
        tensor, name = slots.tensor(routes), f"{node.name} counts"
        chosen, counts = tensor.array[:, : node.op.chosen], self.layers[node.layer]
        call = CountRoutes(name, chosen, counts, slots)
        item = PendingLaunch(None, call, reads, frozenset(), slots.span, None, {"x": tensor})
        return name, [item]


class CountRoutes(BoundCall):
    """Add one to the counter of each expert that a token has chosen."""

    def __init__(
        self,
        name: str,
        chosen: npt.NDArray[np.float32],
        counts: npt.NDArray[np.int64],
        slots: ChunkSlots,
    ) -> None:
        (self._first, stop), self.name = slots.span, name
        self.m, self._fed, self._chunk = stop - self._first, slots.pool.fed, slots.chunk
        self._chosen, self._counts = chosen, counts

    def run(self) -> None:
        """See `BoundCall.run`."""
        count = max(min(self._fed[self._chunk] - self._first, self.m), 0)
        chosen = self._chosen[:count].astype(np.int64)
        self._counts += np.bincount(chosen.ravel(), minlength=len(self._counts))
