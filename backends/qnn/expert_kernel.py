"""Routed experts: a graph of each expert and token count; the host sorts tokens by expert.

Which experts a call needs is known when it runs, so every own expert has its graphs open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from hetero.backends import ops
from hetero.backends.memory import Tensor
from hetero.backends.onnx_common.binding import Array, argument
from hetero.backends.qnn import ranges
from hetero.backends.qnn.catalog import expert_sizes
from hetero.backends.qnn.graphs import EXPERT_PEAK
from hetero.backends.qnn.kernels import QnnHost, QnnKernel, Run
from hetero.backends.qnn.shared_memory import io_binding

ExpertSessions = Callable[[int, int], ort.InferenceSession]  # of the i-th own expert, m tokens


class ExpertRows(NamedTuple):
    """Memory of one expert's graph of some token count, for all experts of a device."""

    x: Array
    y: Array
    peak: Array

    @classmethod
    def of(cls, rows: int, d: int) -> ExpertRows:
        """Return memory for so many rows [rows, d]."""
        x, y = np.zeros((rows, d), np.float32), np.zeros((rows, d), np.float32)
        return cls(x, y, np.zeros((1, 1), np.float32))


Rooms = dict[tuple[int, int], ExpertRows]


class QnnExpertsKernel(QnnKernel):
    """Gathers each expert's tokens, and runs them in the smallest graph that holds them.

    `rooms` has the rows of a graph, one for all layers.
    """

    def __init__(
        self, host: QnnHost, op: ops.Experts, sessions: ExpertSessions, rooms: Rooms, *, nbytes: int
    ) -> None:
        super().__init__(host, op, nbytes=nbytes)
        self._experts, self._sessions, self._rooms = op, sessions, rooms
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._step = ops.PASS_TOKENS  # of a call, whose experts have graphs of their own sizes

    def chunk(self, tensors: Mapping[str, Tensor], offset: int) -> Run:  # noqa: ARG002
        op, arrays = self._experts, {port: tensor.array for port, tensor in tensors.items()}
        x, routes, y = arrays["x"], arrays["routes"], arrays["y"]
        name = self.call_name(len(x))
        sizes = expert_sizes(op, self.host.capabilities.graph_sizes, len(x))
        for i in range(len(op.own)):
            for rows in sizes:
                self._bind(i, rows)
        guard = ranges.RangeGuard(name, [x], [y], keep=(tensors, self._bindings))
        own = np.asarray(op.own)

        def run() -> None:
            guard.before()
            chosen, shares = np.split(routes, 2, axis=1)
            y[...] = 0
            for i in np.flatnonzero(np.isin(own, chosen)).tolist():
                tokens, places = np.nonzero(chosen == own[i])
                weights = shares[tokens, places, None]
                for start, rows in pieces(len(tokens), sizes):
                    some = tokens[start : start + rows]
                    y[some] += weights[start : start + rows] * self._run(i, rows, x[some], name)
            guard.after()

        return run

    def _bind(self, i: int, rows: int) -> None:
        """Open the graph of an expert, unless it is."""
        if (i, rows) in self._bindings:
            return
        session, room = self._sessions(i, rows), self._room(rows)
        outputs = {"y": argument(room.y), EXPERT_PEAK: argument(room.peak)}
        self._bindings[i, rows] = io_binding(session, {"x": argument(room.x)}, outputs)

    def _room(self, rows: int) -> ExpertRows:
        key = (rows, self._experts.d)
        if key not in self._rooms:
            self._rooms[key] = ExpertRows.of(*key)
        return self._rooms[key]

    def _run(self, i: int, rows: int, x: Array, name: str) -> Array:
        """Return an expert's rows of some tokens. Raises `DeviceError` beyond fp16."""
        binding, room = self._bindings[i, rows], self._room(rows)
        room.x[: len(x)], room.x[len(x) :] = x, 0
        self._sessions(i, rows).run_with_iobinding(binding)
        y = room.y[: len(x)]
        # NaN is no overflow of these: it is the input's, and goes through.
        if room.peak[0, 0] >= ranges.LARGEST or ranges.saturated(y):
            raise ranges.overflow(f"{name}, expert {self._experts.own[i]}")
        return y

    def release(self) -> None:
        super().release()
        self._bindings.clear()


def pieces(count: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first row, token count of the graph) of what computes so many rows.

    Sizes are rising; all pieces but the last are of the largest.
    """
    largest = sizes[-1]
    starts = range(0, count, largest)
    return [(x, next(s for s in sizes if s >= min(largest, count - x))) for x in starts]
