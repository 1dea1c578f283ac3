"""Which tokens the NPU may compute: at most two pieces, each one graph (paper section 4.1.1).

Notation: P choices of pieces, T token cuts (where the NPU's tokens end).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.intp]
_STEPS = 32  # token cuts to try on a device without graphs


class Pieces(NamedTuple):
    """Spans [from, to) of tokens and the graph of each; None where any token count runs."""

    spans: tuple[tuple[int, int], ...]
    sizes: tuple[int | None, ...]

    @property
    def tokens(self) -> int:
        """End of the NPU's tokens (they begin at 0)."""
        return self.spans[-1][1]


@dataclass(frozen=True)
class Choices:
    """All pieces for m tokens. Graphs are full but for the last one where it reaches m.

    cuts            [T] where the NPU's tokens end, rising
    starts          [T] first choice of each cut; choices are sorted by their cut
    first, second   [P] graphs, as places in `sizes`; `len(sizes)` for no second one
    """

    m: int
    sizes: tuple[int, ...]
    cuts: Ints
    starts: Ints
    first: Ints
    second: Ints

    def pieces(self, choice: int) -> Pieces:
        """Spans and graphs of one choice."""
        if not self.sizes:
            return Pieces(((0, int(self.cuts[choice])),), (None,))
        g = self.sizes[self.first[choice]]
        if self.second[choice] == len(self.sizes):
            return Pieces(((0, min(g, self.m)),), (g,))
        h = self.sizes[self.second[choice]]
        return Pieces(((0, g), (g, min(g + h, self.m))), (g, h))

    def group(self, cut: int) -> slice:
        """Choices that end at the cut in this place."""
        stop = self.starts[cut + 1] if cut + 1 < len(self.starts) else len(self.first)
        return slice(int(self.starts[cut]), int(stop))


@lru_cache(maxsize=64)
def npu_choices(
    m: int, sizes: tuple[int, ...], alignment: int = 1, *, every: bool = False
) -> Choices:
    """All choices for m tokens; with `every`, each is a cut of its own."""
    if not sizes:
        return _free(m, alignment)
    pairs = _pairs(sizes)
    kept = pairs.before < m
    first, second, cuts = pairs.first[kept], pairs.second[kept], np.minimum(pairs.sums[kept], m)
    if every:
        starts = np.arange(len(cuts))
    else:
        starts = np.flatnonzero(np.concatenate(([True], cuts[1:] != cuts[:-1])))
    return Choices(m, sizes, cuts[starts], starts, first, second)


class _Pairs(NamedTuple):
    """[P] first and second graphs of one or two pieces (the first not smaller), their sum, by which
    they are sorted, and the tokens before the last piece.
    """

    first: Ints
    second: Ints
    sums: Ints
    before: Ints


@lru_cache(maxsize=64)
def _pairs(sizes: tuple[int, ...]) -> _Pairs:
    one = len(sizes)
    pairs = [(i, one) for i in range(one)] + [(i, j) for i in range(one) for j in range(i + 1)]
    first, second = (np.asarray(x, dtype=np.intp) for x in zip(*pairs, strict=True))
    starts = np.asarray(sizes)[first]
    sums = starts + np.asarray((*sizes, 0))[second]
    order = np.argsort(sums, kind="stable")
    before = np.where(second == one, 0, starts)
    return _Pairs(*(x[order] for x in (first, second, sums, before)))


def _free(m: int, alignment: int) -> Choices:
    step = alignment * -(-m // (alignment * _STEPS))
    cuts = np.asarray((*range(step, m, step), m), dtype=np.intp)
    places = np.arange(len(cuts))
    none = np.zeros(len(cuts), dtype=np.intp)
    return Choices(m, (), cuts, places, none, none)
