"""Which tokens the NPU may compute: at most two pieces, each one graph (paper section 4.1.1)."""

from __future__ import annotations

from typing import NamedTuple

_STEPS = 32  # token cuts to try on a device without graphs


class Pieces(NamedTuple):
    """Spans [from, to) of tokens and the graph of each; None where any token count runs."""

    spans: tuple[tuple[int, int], ...]
    sizes: tuple[int | None, ...]

    @property
    def tokens(self) -> int:
        """End of the NPU's tokens (they begin at 0)."""
        return self.spans[-1][1]


def npu_pieces(m: int, sizes: tuple[int, ...], alignment: int = 1) -> tuple[Pieces, ...]:
    """All pieces for m tokens. Graphs are full but for the last one where it reaches m."""
    if not sizes:
        return _free_pieces(m, alignment)
    found = [Pieces(((0, min(g, m)),), (g,)) for g in sizes]
    for first in sizes:
        if first < m:
            found += [
                Pieces(((0, first), (first, min(first + g, m))), (first, g))
                for g in sizes
                if g <= first
            ]
    return tuple(found)


def _free_pieces(m: int, alignment: int) -> tuple[Pieces, ...]:
    step = alignment * -(-m // (alignment * _STEPS))
    return tuple(Pieces(((0, t),), (None,)) for t in (*range(step, m, step), m))
