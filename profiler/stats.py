"""Robust summaries of a few timings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.96
SMOOTHED_S = 1.5  # a device is as slow as the median of so long a time says
OUTLIER = 2.0  # times the median: more is something else's doing
FEW = 6  # below this many samples order statistics give no 95 % interval


class Summary(NamedTuple):
    """Median, relative half-width of its 95 % confidence interval, spread, count and skew.

    The half-width is infinite for one sample; the spread is relative (1.4826 · median absolute
    deviation / median); skew is mean / median, where a sample of more than twice the median counts
    as twice.
    """

    median: float
    ci: float
    spread: float
    samples: int
    skew: float


def summarize(samples: Sequence[float]) -> Summary:
    """Return the summary of at least one positive sample; distribution-free (order statistics).

    With fewer than six samples the whole range stands for the interval.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(ordered)
    middle = float(np.median(ordered))
    spread = 1.4826 * float(np.median(np.abs(ordered - middle))) / middle
    skew = float(np.minimum(ordered / middle, OUTLIER).mean())
    if count == 1:
        return Summary(middle, math.inf, spread, count, skew)
    low, high = 0, count - 1
    if count >= FEW:
        reach = Z95 * math.sqrt(count) / 2
        low = max(0, math.floor(count / 2 - reach))
        high = min(count - 1, math.ceil(count / 2 + reach) - 1)
    ci = float(ordered[high] - ordered[low]) / 2 / middle
    return Summary(middle, ci, spread, count, skew)


def drift(at_s: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the relative standard deviation of a kernel that was timed now and then.

    By its medians over `SMOOTHED_S`, which single timings scatter about. It is half of the distance
    between the 16th and the 84th percentile, because the tails are other programs' work.
    """
    points = sorted(zip(at_s, seconds, strict=True))
    medians, first = [], 0
    for i, (at, _) in enumerate(points):
        while first < i and points[first][0] <= at - SMOOTHED_S:
            first += 1
        medians.append(statistics.median(value for _, value in points[first : i + 1]))
    low, middle, high = np.quantile(medians, (0.16, 0.5, 0.84))
    return float(high - low) / 2 / float(middle)


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Return (mean, 95th percentile) of |predicted - measured| / measured, as fractions."""
    errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1.0)
    return float(errors.mean()), float(np.percentile(errors, 95))
