"""Graphs of more tokens take at least as long, unless the profile measured otherwise.

Each token count has coefficients of its own, so beyond the measured shapes noise can make a larger
graph look faster than a smaller one. It is believed only where shapes that were measured with both
say so.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from hetero.profiler.predict import Bools, Floats
from hetero.profiler.records import MatMulRow


class GraphOrder:
    """One kernel's rows: for which token counts a larger graph may be faster, which is where the
    median of its shapes is so by `faster` or more.
    """

    def __init__(self, rows: Iterable[MatMulRow], faster: float = 0.05) -> None:
        by_shape: dict[tuple[int, int], dict[int, float]] = {}
        for row in rows:
            by_shape.setdefault((row.n, row.k), {})[row.m] = row.seconds
        self._counts = sorted({m for times in by_shape.values() for m in times})
        ratios: dict[tuple[int, int], list[float]] = {}
        for times in by_shape.values():
            for small in times:
                for large in (m for m in times if m > small):
                    ratios.setdefault((small, large), []).append(times[large] / times[small])
        self._faster = {
            pair for pair, found in ratios.items() if statistics.median(found) < 1 - faster
        }

    def may_be_faster(self, small: float, large: float) -> bool:
        """Whether a graph of `large` tokens was faster than one of `small`, or the nearest measured
        counts around the two.
        """
        if not self._faster:
            return False
        before = self._counts[max(bisect_right(self._counts, small) - 1, 0)]
        after = self._counts[min(bisect_left(self._counts, large), len(self._counts) - 1)]
        return (before, after) in self._faster

    def floors(self, graphs: Sequence[int], tokens: Floats) -> list[tuple[int, Bools]]:
        """Which of `tokens` (graph sizes) [S] take at least as long as each graph."""
        found = []
        for graph in graphs:
            larger = np.asarray([graph < t and not self.may_be_faster(graph, t) for t in tokens])
            if larger.any():
                found.append((graph, larger))
        return found
