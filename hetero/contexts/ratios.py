"""The number of bits of each chunk of a context by the paper's rule, for comparison.

It maximises sum(D_i / ratio_i) (LLMS, equations 2 and 3) over information densities (equation 1)
and favours giving dense chunks few bits. Chunks are ranked no better by density than by age, and
bits by layer (`hetero.contexts.head_bits`) beat both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Rule: TypeAlias = Literal["layers", "paper"]
RATIOS = {8: 1.0, 4: 0.5, 2: 0.25}  # of the paper: codes alone


def paper(densities: Sequence[float], ratio: float = 0.5) -> list[int]:
    """Return the bits of each chunk by equation (3): the most sum(D / ratio) of mean ratio `ratio`.

    Where chunks do not divide, the mean is below it by less than one step.
    """
    order, sums = _ranked(densities)
    count, quarters = len(densities), {bits: round(4 * x) for bits, x in RATIOS.items()}

    def value(top: int, middle: int) -> float:
        parts = (sums[top], sums[middle] - sums[top], sums[count] - sums[middle])
        return float(sum(part / each for part, each in zip(parts, RATIOS.values(), strict=True)))

    choices = _splits(count, 4 * ratio * count, quarters)
    top, middle = max(choices, key=lambda split: value(*split), default=(0, 0))
    bits = np.full(count, 2)
    bits[order[:middle]] = 4
    bits[order[:top]] = 8
    return [int(x) for x in bits]


def _splits(count: int, budget: float, sizes: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return every possible number of chunks with 8 bits, with the most that have at least 4."""
    heavy, middle, light = (sizes[bits] for bits in RATIOS)
    splits = []
    for top in range(count + 1):
        left = budget - top * heavy - (count - top) * light
        if left < 0:
            break
        splits.append((top, top + min(int(left // (middle - light)), count - top)))
    return splits


def _ranked(densities: Sequence[float]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Return the indices, densest first (the earlier of equals), and the prefix sums."""
    values = np.asarray(densities, dtype=np.float64)
    order = np.argsort(-values, kind="stable")
    return order, np.concatenate([[0.0], np.cumsum(values[order])])
