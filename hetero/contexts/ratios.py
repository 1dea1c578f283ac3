"""The number of bits of each chunk of a context.

`least_error` minimises the expected error sum(D_i · e(b_i)) for a number of bytes; D_i is a chunk's
information density (LLMS, equation 1), e(b) the square of the model's measured relative error at b
bits (with the error itself dense chunks get bits that cost the others more). `paper` is the paper's
rule (equations 2 and 3): it maximises sum(D_i / ratio_i), which favours giving dense chunks few
bits; it is there for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.contexts.codec import NESTED

Rule: TypeAlias = Literal["error", "paper"]
RATIOS = {8: 1.0, 4: 0.5, 2: 0.25}  # of the paper: codes alone


def least_error(
    densities: Sequence[float],
    budget_bytes: float,
    nbytes: Mapping[int, int],
    errors: Mapping[int, float],
) -> list[int]:
    """Return the bits of each chunk with the least sum(D · e) within `budget_bytes`.

    All get 2 bits where even that does not fit. `nbytes` and `errors` are a chunk's by bits.

    An optimum gives denser chunks no fewer bits, so two numbers describe it: how many chunks get 8
    bits, and how many 4. Given the first, the second is as large as the bytes allow.
    """
    order, sums = _ranked(densities)
    count = len(densities)

    def value(top: int, middle: int) -> float:
        parts = (sums[top], sums[middle] - sums[top], sums[count] - sums[middle])
        return float(sum(part * errors[bits] for part, bits in zip(parts, NESTED, strict=True)))

    choices = _splits(count, budget_bytes, nbytes)
    top, middle = min(choices, key=lambda split: value(*split), default=(0, 0))
    return _spread(order, top, middle)


def paper(densities: Sequence[float], ratio: float = 0.5) -> list[int]:
    """Return the bits of each chunk by equation (3): the most sum(D / ratio) of mean ratio `ratio`.

    Where chunks do not divide, the mean is below it by less than one step.
    """
    order, sums = _ranked(densities)
    count = len(densities)

    def value(top: int, middle: int) -> float:
        parts = (sums[top], sums[middle] - sums[top], sums[count] - sums[middle])
        return float(sum(part / RATIOS[bits] for part, bits in zip(parts, NESTED, strict=True)))

    quarters = {bits: round(4 * RATIOS[bits]) for bits in NESTED}
    choices = _splits(count, 4 * ratio * count, quarters)
    top, middle = max(choices, key=lambda split: value(*split), default=(0, 0))
    return _spread(order, top, middle)


def _splits(count: int, budget: float, nbytes: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return every possible number of chunks with 8 bits, with the most that have at least 4."""
    heavy, middle, light = (nbytes[bits] for bits in NESTED)
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


def _spread(order: npt.NDArray[np.intp], top: int, middle: int) -> list[int]:
    bits = np.full(len(order), 2)
    bits[order[:middle]] = 4
    bits[order[:top]] = 8
    return [int(x) for x in bits]
