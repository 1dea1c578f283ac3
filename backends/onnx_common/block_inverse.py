"""The inverse of a lower unit triangle in ONNX graphs, as matmuls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.backends.onnx_common.builder import GraphBuilder


def unit_inverse(
    graph: GraphBuilder, a: str, rows: int, constant: Callable[[npt.NDArray[Any]], str]
) -> str:
    """Return (I + tril(a, -1))⁻¹, of which `a` [..., rows, rows] may have the upper part too.

    Block by block: T is the inverse of the blocks of b rows on the diagonal, and T - T M T that of
    the blocks of 2b, M being the part of `a` in them that T has not had. A product of powers of `a`
    would be fewer matmuls, whose terms grow beyond float32 where rows are alike. `constant` adds a
    float32 matrix [rows, rows] to the graph.
    """
    at, size = np.arange(rows), 1
    inverse = constant(np.eye(rows, dtype=np.float32))
    while size < rows:
        same = at[:, None] // (2 * size) == at // (2 * size)
        under = same & (at[:, None] // size > at // size)
        rest = graph.node("Mul", a, constant(under.astype(np.float32)))
        if size > 1:
            rest = graph.node("MatMul", graph.node("MatMul", inverse, rest), inverse)
        inverse = graph.node("Sub", inverse, rest)
        size *= 2
    return inverse
