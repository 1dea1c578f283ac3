"""Tables of which a step needs a few rows: they are read where they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.weights import ROW_BLOCK, Float32Array, PackedWeight

Ids: TypeAlias = npt.NDArray[np.integer[Any]]
RowTable: TypeAlias = Callable[[Ids], Float32Array]  # of rows [m] to their values [m, k]


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
