"""Seconds of a prompt of some tokens after a text of some length, to plan the loading of contexts.

There are two sources: predictions of the solver's cost model for the running plan, in its calls and
with attention that grows with the text, where the model was opened with a profile; and a few
measured prompts. Predictions give the shape between and beyond the measured points, measurements
the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Point: TypeAlias = tuple[int, int, float]  # tokens, tokens before them, seconds
LONGEST: Final = 8192  # tokens: beyond it predictions continue with their last slope


def predict_prompts(seconds: Callable[[int, int], float], longest: int) -> list[list[float]]:
    """Return the predicted seconds at the points of a grid, up to the longest text."""
    return [
        [tokens, before, seconds(tokens, before)]
        for tokens in _grid(1, min(longest, LONGEST))
        for before in (0, *_grid(64, min(longest, LONGEST)))
    ]


def _grid(first: int, last: int) -> list[int]:
    """Return powers of two and, from 16 on, their midpoints: times are nearly linear in between."""
    counts, step = [first], first
    while step < last:
        step *= 2
        counts += [3 * step // 4, step] if step > 16 else [step]
    return [*(x for x in counts if x < last), last]


class PredictedTimes:
    """Predicted seconds, interpolated linearly between the points of a full grid, and extrapolated.

    Raises `ValueError` for points that are no grid.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        ordered = sorted(points)
        self._counts = np.unique([float(m) for m, _, _ in ordered])
        self._befores = np.unique([float(before) for _, before, _ in ordered])
        seconds = np.array([s for _, _, s in ordered])
        shape = len(self._counts), len(self._befores)
        if seconds.size != shape[0] * shape[1] or min(shape) < 2:
            raise ValueError("predicted times of prompts are no grid")
        self._seconds = seconds.reshape(shape)

    def __call__(self, tokens: Any, before: Any) -> Any:
        """Return seconds for arrays of one shape, or numbers; 0 tokens take as long as 1."""
        row, along = _between(self._counts, np.maximum(tokens, self._counts[0]))
        column, across = _between(self._befores, before)
        table = self._seconds
        low = table[row, column] * (1 - across) + table[row, column + 1] * across
        high = table[row + 1, column] * (1 - across) + table[row + 1, column + 1] * across
        return low * (1 - along) + high * along


def _between(edges: Floats, at: Any) -> tuple[Any, Any]:
    """Return the index of the edge at or before `at`, and the fraction of the way to the next.

    The fraction is above 1 beyond the last edge.
    """
    index = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(edges) - 2)
    return index, (np.asarray(at) - edges[index]) / (edges[index + 1] - edges[index])


class CalibratedTimes:
    """Predicted times, calibrated by measured ones.

    They are multiplied by measured / predicted, interpolated linearly between measured prompts and
    constant beyond them.
    """

    def __init__(
        self, priced: PredictedTimes, measured: PromptTimes, points: Sequence[Point]
    ) -> None:
        self._priced = priced
        self._befores = sorted({before for _, before, _ in points})[:2]
        self._ratios = []
        for at in self._befores:
            counts = np.array(sorted(m for m, start, _ in points if start == at), float)
            before = np.full(counts.shape, float(at))
            self._ratios.append((counts, measured(counts, before) / priced(counts, before)))

    def __call__(self, tokens: Any, before: Any) -> Any:
        """Return seconds for arrays of one shape, or numbers."""
        ratios = [np.interp(tokens, counts, ratio) for counts, ratio in self._ratios]
        if len(ratios) == 1:
            return self._priced(tokens, before) * ratios[0]
        share = np.interp(before, self._befores, (0.0, 1.0))
        return self._priced(tokens, before) * (ratios[0] * (1 - share) + ratios[1] * share)


class PromptTimes:
    """Measured seconds of prompts, interpolated linearly, with the last slope beyond the longest.

    Between (and beyond) the two context lengths that prompts were measured after they are linear,
    too. A prompt takes no longer than a longer one, nor than after a longer text: measurements that
    say so were disturbed.

    `measured` are (tokens, tokens before, seconds), with one or two values of tokens before.
    """

    def __init__(self, measured: Sequence[Point]) -> None:
        befores = sorted({before for _, before, _ in measured})[:2]
        lines = [_monotone([(m, s) for m, b, s in measured if b == before]) for before in befores]
        self._lines, self._befores = lines, befores

    def __call__(self, tokens: Any, before: Any) -> Any:
        """Return seconds for arrays of one shape, or numbers."""
        first = _along(self._lines[0], tokens)
        if len(self._lines) == 1:
            return first
        more = np.maximum(_along(self._lines[1], tokens) - first, 0.0)
        low, high = self._befores
        return first + more * np.maximum(np.asarray(before) - low, 0) / (high - low)


def _monotone(points: Sequence[tuple[int, float]]) -> tuple[Floats, Floats]:
    rising: list[tuple[int, float]] = []
    for count, taken_s in sorted(points, reverse=True):
        rising.insert(0, (count, min([taken_s, *(s for _, s in rising[:1])])))
    return np.array([m for m, _ in rising], float), np.array([s for _, s in rising], float)


def _along(line: tuple[Floats, Floats], tokens: Any) -> Any:
    counts, seconds = line
    interpolated = np.interp(tokens, counts, seconds)
    if len(counts) == 1:
        return interpolated * np.maximum(np.asarray(tokens) / counts[0], 1.0)
    slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
    return interpolated + np.maximum(np.asarray(tokens) - counts[-1], 0) * slope
