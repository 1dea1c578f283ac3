"""The tokens that the NPU may compute: at most two runs, each one graph (paper section 4.1.1).

Notation: P choices of tiles, T token cuts (where the NPU's tokens end).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.intp]
_STEPS = 32  # token cuts to try on a device without graphs


class NpuTiles(NamedTuple):
    """Spans [from, to) of tokens and the graph of each; None where any token count runs."""

    spans: tuple[tuple[int, int], ...]
    sizes: tuple[int | None, ...]

    @property
    def tokens(self) -> int:
        """End of the NPU's tokens (they begin at 0)."""
        return self.spans[-1][1]


@dataclass(frozen=True)
class Choices:
    """All tiles for m tokens. Graphs are full but for the last one where it reaches m.

    smaller         how many of the graphs have fewer than m tokens
    cuts            [T] where the NPU's tokens end, rising
    starts          [T] first choice of each cut; choices are sorted by their cut
    first, second   [P] graphs, as places in `sizes`; `len(sizes)` for no second one
    graphs          [P] the token counts of both, or of the one

    All lengths with as many smaller graphs have the same choices, of which those beyond m share the
    last cut.
    """

    m: int
    sizes: tuple[int, ...]
    smaller: int
    cuts: Ints
    starts: Ints
    first: Ints
    second: Ints
    graphs: Sequence[tuple[int, ...]]

    def npu_tiles(self, choice: int) -> NpuTiles:
        """Return spans and graphs of one choice."""
        if not self.sizes:
            return NpuTiles(((0, int(self.cuts[choice])),), (None,))
        graphs = self.graphs[choice]
        if len(graphs) == 1:
            return NpuTiles(((0, min(graphs[0], self.m)),), graphs)
        g, h = graphs
        return NpuTiles(((0, g), (g, min(g + h, self.m))), graphs)

    def group(self, cut: int) -> slice:
        """Return the choices that end at the cut in this place."""
        stop = self.starts[cut + 1] if cut + 1 < len(self.starts) else len(self.first)
        return slice(int(self.starts[cut]), int(stop))


@lru_cache(maxsize=64)
def npu_choices(
    m: int, sizes: tuple[int, ...], alignment: int = 1, *, every: bool = False
) -> Choices:
    """Return all choices for m tokens; with `every`, each is a cut of its own."""
    if not sizes:
        return _free(m, alignment)
    smaller = bisect_left(sizes, m)
    pairs = _pairs(sizes, smaller)
    if every:
        cuts, starts = np.minimum(pairs.sums, m), np.arange(len(pairs.sums))
    else:
        last = slice(int(pairs.ends.searchsorted(m)) + 1)
        cuts, starts = np.minimum(pairs.ends[last], m), pairs.starts[last]
    return Choices(m, sizes, smaller, cuts, starts, pairs.first, pairs.second, pairs.graphs)


class _Pairs(NamedTuple):
    """Pairs [P] of a first and a second graph of one or two tiles.

    The first is not smaller; sorted by their sum; with the different sums, and the first pair of
    each, and the token counts.
    """

    first: Ints
    second: Ints
    sums: Ints
    ends: Ints
    starts: Ints
    graphs: list[tuple[int, ...]]


@lru_cache(maxsize=256)
def _pairs(sizes: tuple[int, ...], smaller: int) -> _Pairs:
    """Return where only so many graphs may come before another one."""
    one, places = len(sizes), range(len(sizes))
    pairs = [(i, one) for i in places] + [(i, j) for i in range(smaller) for j in range(i + 1)]
    tokens = (*sizes, 0)
    pairs.sort(key=lambda pair: tokens[pair[0]] + tokens[pair[1]])
    first, second = (np.asarray(x, dtype=np.intp) for x in zip(*pairs, strict=True))
    graphs = [tuple(sizes[i] for i in pair if i < one) for pair in pairs]
    sums = np.asarray([sum(graph) for graph in graphs])
    return _Pairs(first, second, sums, *np.unique(sums, return_index=True), graphs)


def _free(m: int, alignment: int) -> Choices:
    step = alignment * -(-m // (alignment * _STEPS))
    cuts = np.asarray((*range(step, m, step), m), dtype=np.intp)
    places = np.arange(len(cuts))
    none = np.zeros(len(cuts), dtype=np.intp)
    return Choices(m, (), 0, cuts, places, none, none, ())
