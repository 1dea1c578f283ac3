"""Tables of which a step needs a few rows: they are read where they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.weights import ROW_BLOCK, Float32Array, PackedWeight

Ids: TypeAlias = npt.NDArray[np.integer[Any]]
RowTable: TypeAlias = Callable[[Ids], Float32Array]  # of rows [m] to their values [m, k]


class GivenRows:
    """A table of rows that are given before each look-up, in order, whatever is looked up.

    Without any left the rows are zeros.
    """

    def __init__(self, width: int) -> None:
        self._rows: Float32Array = np.zeros((0, width), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def give(self, rows: Float32Array) -> None:
        """Set the rows that are left."""
        self._rows = rows

    def __call__(self, ids: Ids) -> Float32Array:
        """Take as many rows as there are ids."""
        rows, self._rows = self._rows[: len(ids)], self._rows[len(ids) :]
        lacking = len(ids) - len(rows)
        return np.pad(rows, ((0, lacking), (0, 0))) if lacking else rows


def packed_rows(weight: PackedWeight) -> RowTable:
    """Return the rows of a packed weight."""

    def row(i: int) -> Float32Array:
        start = i - i % ROW_BLOCK
        block = weight.rows(start, min(start + ROW_BLOCK, weight.n))
        values: Float32Array = block.dequantize()[i - start]
        return values

    return lambda ids: np.stack([row(int(i)) for i in ids])


def scaled(table: RowTable, scale: float) -> RowTable:
    """Return the rows times a number."""
    return lambda ids: table(ids) * np.float32(scale)
