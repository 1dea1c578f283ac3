"""Measured times of one kernel, where a predictor is asked for what was measured or is next to it.

At a measured (m, n, k) the measurement is the answer, unless it did not converge: of such a row
the predictor knows more, which was fitted to its neighbours as well. Between two measured token
counts and between two measured numbers of rows of the same k, what the predictor is off by is
interpolated: a part of a weight is computed as the whole is. It fades over `REACH` doublings of the
rows.

Notation: S shapes; T token counts and R numbers of rows that were measured; M, N those asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from hetero.profiler import predict
from hetero.profiler.features import Floats, padded_count, padded_rows, padded_tokens
from hetero.profiler.records import DeviceRecord, MatMulPredictor, MatMulRow

REACH: Final = 1.5


class _Surface(NamedTuple):
    """Measured sizes of one k: tokens [T], log2 of rows [R], and tables [T, R].

    `logs` has log(measured / predicted), `known` 1, both 0 where nothing was measured.
    """

    tokens: Floats
    rows: Floats
    logs: Floats
    known: Floats


class MeasuredTimes:
    """The rows of a kernel, compared with its predictor."""

    def __init__(
        self, predictor: MatMulPredictor, device: DeviceRecord, rows: Sequence[MatMulRow]
    ) -> None:
        self._device = device
        self._surfaces: dict[float, _Surface] = {}
        static = device.capabilities.static_shapes  # rows of graphs that it has not are of no use
        rows = [
            row
            for row in rows
            if "unconverged" not in row.flags
            and not (static and padded_count(device, row.m) != row.m)
        ]
        if not rows:
            return
        m, n, k, seconds = (
            np.asarray([getattr(row, x) for row in rows], dtype=np.float64)
            for x in ("m", "n", "k", "seconds")
        )
        logs = np.log(seconds / predict.predict(predictor, device, m, n, k))
        tokens, padded = padded_tokens(device, m), padded_rows(device, n)
        for width in np.unique(k):
            at = k == width
            self._surfaces[float(width)] = _surface(tokens[at], padded[at], logs[at])

    def factors(self, m: Floats, n: Floats, k: Floats) -> Floats:
        """Return [S] measured over predicted times."""
        logs = np.zeros(len(k))
        for width in np.unique(k[np.isin(k, list(self._surfaces))]):
            at, surface = k == width, self._surfaces[float(width)]
            tokens, rows = self._weights(surface, m[at], n[at])
            logs[at] = np.einsum("st,tr,sr->s", tokens, surface.logs, rows)
        return np.exp(logs)

    def factor_table(self, m: Floats, n: Floats, k: float) -> Floats | float:
        """Return the [M, N] `factors` of all pairs; 1 where nothing of k was measured."""
        surface = self._surfaces.get(k)
        if surface is None:
            return 1.0
        tokens, rows = self._weights(surface, m, n)
        return np.exp(tokens @ surface.logs @ rows.T)

    def known_table(self, m: Floats, n: Floats, k: float) -> Floats | float:
        """Return the [M, N] part of each answer that is measured: 1 at what was, 0 far from it."""
        surface = self._surfaces.get(k)
        if surface is None:
            return 0.0
        tokens, rows = self._weights(surface, m, n)
        return np.asarray(tokens @ surface.known @ rows.T)

    def _weights(self, surface: _Surface, m: Floats, n: Floats) -> tuple[Floats, Floats]:
        """Return [M, T] and [N, R] weights of the measured sizes in an answer."""
        rows = np.log2(padded_rows(self._device, n))
        near = np.maximum(0.0, 1.0 - np.abs(rows[:, None] - surface.rows) / REACH)
        tokens = _hats(surface.tokens, padded_tokens(self._device, m))
        return tokens, near * _hats(surface.rows, rows)


def _surface(tokens: Floats, rows: Floats, logs: Floats) -> _Surface:
    every_m, i = np.unique(tokens, return_inverse=True)
    every_n, j = np.unique(rows, return_inverse=True)
    table, known = (np.zeros((len(every_m), len(every_n))) for _ in range(2))
    table[i, j], known[i, j] = logs, 1.0
    return _Surface(every_m, np.log2(every_n), table, known)


def _hats(points: Floats, x: Floats) -> Floats:
    """Return [X, P] weights of points in linear interpolation; of the outer ones beyond them."""
    place = np.interp(x, points, np.arange(len(points), dtype=np.float64))
    return np.maximum(0.0, 1.0 - np.abs(place[:, None] - np.arange(len(points))))
