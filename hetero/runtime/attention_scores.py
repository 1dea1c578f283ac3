"""Attention scores that a step's sampled rows give to each column.

A step that measures them has a launch after each attention, on the same device where that has the
operation (`ops.SumScores`), whose sums the host reads once a step. Elsewhere a host call reads the
queries of the sampled rows and the context's keys (`HostScores`, numpy). Steps whose attention is
inside an NPU graph, or reads its queries from panels, have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends.memory import Tensor
from hetero.backends.ops import Attention, SumScores
from hetero.backends.protocol import BoundCall, Device, DeviceKind, Kernel, Operand
from hetero.runtime.kv.attention_stats import DECODE_EVERY, PROMPT_EVERY, sampled, sum_scores
from hetero.solver.plan import Phase

EVERY: Final[Mapping[Phase, int]] = {"prefill": PROMPT_EVERY, "decode": DECODE_EVERY}


def rows_of(phase: Phase, first: int, count: int) -> list[int]:
    """Return the sampled rows of a step."""
    return sampled(first, count, EVERY[phase])


class StepScores:
    """Sums of the step that runs: over its sampled rows and the layers that reported any."""

    def __init__(self, columns: int, layers: int) -> None:
        self._sums, self._layers, self._layers_seen = np.zeros(columns), layers, 0
        self._added: dict[tuple[DeviceKind, int], Tensor] = {}

    def begin(self) -> None:
        """Reset the sums for the next step."""
        self._sums[:], self._layers_seen = 0, 0
        for tensor in self._added.values():
            tensor.array[:] = 0

    def add(self, sums: npt.NDArray[Any], layers: int = 1) -> None:
        """Add the sums of some layers of one chunk of a prompt."""
        self._sums[: len(sums)] += sums
        self._layers_seen += layers

    def on(self, kind: DeviceKind, device: Device, heads: int) -> Tensor:
        """Return the tensor that a device adds to, float32 [heads, columns]."""
        if (kind, heads) not in self._added:
            shape = heads, len(self._sums)
            self._added[kind, heads] = Tensor(device.allocate(4 * heads * len(self._sums)), shape)
        return self._added[kind, heads]

    def end(self, chunks: int) -> npt.NDArray[Any] | None:
        """Return the means over layers of a step of `chunks` chunks.

        None where not all layers reported.
        """
        return self._sums / self._layers if self._layers_seen == self._layers * chunks else None


class ScoreReader(BoundCall):
    """Takes what a device has added up of a chunk of a prompt, or of a step that decodes."""

    name = "reading column row_scores"

    def __init__(self, score_sums: StepScores, tensor: Tensor, layers: int, m: int) -> None:
        self.m = m
        self._scores, self._tensor, self._layers = score_sums, tensor, layers

    def run(self) -> None:
        """Add the layers' sums, and reset them."""
        self._scores.add(self._tensor.array.sum(axis=0), self._layers)
        self._tensor.array[:] = 0


class RowScores:
    """Score sums of a step's rows, of several contexts; a step on one context has only the first.

    The devices' kernels that add up scores are here, too.
    """

    def __init__(self, columns: int, layers: int, devices: Mapping[DeviceKind, Device]) -> None:
        self._columns, self._layers, self._devices = columns, layers, devices
        self._row_scores: list[StepScores] = []
        self._kernels: dict[tuple[DeviceKind, SumScores], Kernel | None] = {}

    def kernel(self, kind: DeviceKind, op: SumScores) -> Kernel | None:
        """Return the kernel that sums columns on a device, if it has one."""
        key = kind, op
        if key not in self._kernels:
            device = self._devices[kind]
            self._kernels[key] = device.prepare(op, {}) if device.accepts(op) else None
        return self._kernels[key]

    def of(self, row: int) -> StepScores:
        """Return the sums of one row."""
        while row >= len(self._row_scores):
            self._row_scores.append(StepScores(self._columns, self._layers))
        return self._row_scores[row]

    def begin(self) -> None:
        """Begin a step."""
        for score_sums in self._row_scores:
            score_sums.begin()


class HostScores(Kernel):
    """Bound like the attention that it follows, without its output and its values."""

    def __init__(self, op: Attention, score_sums: StepScores, every: int) -> None:
        self.op, self._scores, self._every = op, score_sums, every

    def bind(self, tensors: Mapping[str, Operand], m: int) -> BoundCall:
        """Return the call on these tensors."""
        qkv, position, keys = (tensors[port] for port in ("qkv", "position", "k_cache"))
        assert isinstance(qkv, Tensor)
        assert isinstance(position, Tensor)
        assert isinstance(keys, Tensor)
        assert isinstance(self.op, Attention)
        return _TapCall(self.op, self._scores, self._every, qkv, position, keys, m)


class _TapCall(BoundCall):
    name = "attention score sums"

    def __init__(
        self,
        op: Attention,
        score_sums: StepScores,
        every: int,
        qkv: Tensor,
        position: Tensor,
        keys: Tensor,
        m: int,
    ) -> None:
        self.m = m
        self._op, self._scores, self.every = op, score_sums, every
        self._qkv, self._position, self._keys = qkv, position, keys

    def run(self) -> None:
        """Add the layer's score sums."""
        first = int(self._position.array[0])
        rows = sampled(first, self.m, self.every)
        op, positions = self._op, [first + row for row in rows]
        queries = self._qkv.array[rows, : op.heads * op.head_dim]
        queries = queries.reshape(len(rows), op.heads, op.head_dim)
        keys = self._keys.array[:, : positions[-1] + 1 if rows else 0]
        self._scores.add(sum_scores(op, queries, keys, positions))
