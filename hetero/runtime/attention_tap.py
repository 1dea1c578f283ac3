"""Attention that a step's sampled rows give to each column, computed on the control thread.

The slow twin of an operation on the devices, which does not exist yet: a step that is to tell it
has a host call behind each attention, which reads the queries of its sampled rows and the context's
keys. Steps whose attention is inside an NPU graph, or reads its queries from panels, have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends.memory import Tensor
from hetero.backends.ops import Attention
from hetero.backends.protocol import BoundCall, Kernel, Operand
from hetero.contexts.density import DECODE_EVERY, PROMPT_EVERY, column_mass, sampled
from hetero.solver.plan import Phase

EVERY: Final[Mapping[Phase, int]] = {"prefill": PROMPT_EVERY, "decode": DECODE_EVERY}


def rows_of(phase: Phase, first: int, count: int) -> list[int]:
    """The sampled rows of a step."""
    return sampled(first, count, EVERY[phase])


class StepMass:
    """Sums of the step that runs: over its sampled rows and the layers that told any."""

    def __init__(self, columns: int, layers: int) -> None:
        self._sums, self._layers, self._told = np.zeros(columns), layers, 0

    def begin(self) -> None:
        """A step begins."""
        self._sums[:], self._told = 0, 0

    def add(self, sums: npt.NDArray[Any]) -> None:
        """Of one layer, and one chunk of a prompt."""
        self._sums[: len(sums)] += sums
        self._told += 1

    def end(self, chunks: int) -> npt.NDArray[Any] | None:
        """Means over layers of a step of so many chunks; None where not all layers told."""
        return self._sums / self._layers if self._told == self._layers * chunks else None


class RowMasses:
    """Those of a step's rows, of several contexts; a step on one context has the first alone."""

    def __init__(self, columns: int, layers: int) -> None:
        self._columns, self._layers = columns, layers
        self._masses: list[StepMass] = []

    def of(self, row: int) -> StepMass:
        """Of one row."""
        while row >= len(self._masses):
            self._masses.append(StepMass(self._columns, self._layers))
        return self._masses[row]

    def begin(self) -> None:
        """A step begins."""
        for mass in self._masses:
            mass.begin()


class AttentionTap(Kernel):
    """Bound like the attention that it follows, without its output and its values."""

    def __init__(self, op: Attention, mass: StepMass, every: int) -> None:
        self.op, self._mass, self._every = op, mass, every

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        """See `Kernel.bind`."""
        qkv, position, keys = (tensors[port] for port in ("qkv", "position", "k_cache"))
        assert isinstance(qkv, Tensor)
        assert isinstance(position, Tensor)
        assert isinstance(keys, Tensor)
        assert isinstance(self.op, Attention)
        return _TapCall(self.op, self._mass, self._every, qkv, position, keys, m)


class _TapCall(BoundCall):
    name = "attention mass"

    def __init__(
        self,
        op: Attention,
        mass: StepMass,
        every: int,
        qkv: Tensor,
        position: Tensor,
        keys: Tensor,
        m: int,
    ) -> None:
        self.m = m
        self._op, self._mass, self.every = op, mass, every
        self._qkv, self._position, self._keys = qkv, position, keys

    def run(self) -> None:
        """Add the layer's mass."""
        first = int(self._position.array[0])
        rows = sampled(first, self.m, self.every)
        op, positions = self._op, [first + row for row in rows]
        queries = self._qkv.array[rows, : op.heads * op.head_dim]
        queries = queries.reshape(len(rows), op.heads, op.head_dim)
        keys = self._keys.array[:, : positions[-1] + 1 if rows else 0]
        self._mass.add(column_mass(op, queries, keys, positions))
