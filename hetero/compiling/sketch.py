"""Quantiles of magnitudes in bounded memory, independent of order and split of the values."""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

_DROPPED_BITS: Final = 14  # of a float32's mantissa of 23: buckets are 0.2 % wide
_BUCKETS: Final = 1 << (31 - _DROPPED_BITS)


class Sketch:
    """Counts of |x| in buckets whose width grows with |x|: 1 MiB, however many values.

    A bucket is a float32 without its sign and the last bits of its mantissa, as in HDR histograms
    and DDSketch (Masson et al., VLDB 2019), so that a quantile is at most 2⁻⁹ too large.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BUCKETS, dtype=np.int64)

    @classmethod
    def of(cls, *values: npt.NDArray[Any]) -> Self:
        """Return the sketch of all elements of some arrays."""
        sketch = cls()
        for x in values:
            sketch.add(x)
        return sketch

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count every element. Raises `ValueError` for values that are not finite."""
        magnitudes = np.abs(np.asarray(values, dtype=np.float32)).reshape(-1)
        if not np.isfinite(magnitudes).all():
            raise ValueError("a sketch counts finite values")
        buckets = magnitudes.view(np.uint32) >> np.uint32(_DROPPED_BITS)
        self.counts += np.bincount(buckets, minlength=_BUCKETS)

    def without(self, other: Sketch) -> Sketch:
        """Return the sketch without `other`, a part of this."""
        left = Sketch()
        left.counts = self.counts - other.counts
        return left

    def percentile(self, percent: float) -> float:
        """Return the upper end of the bucket at or below which `percent` % of the values are.

        It is 0 without values and where that many are zero.
        """
        rising = np.cumsum(self.counts)
        if not rising[-1]:
            return 0.0
        rank = max(1, int(np.ceil(percent / 100 * float(rising[-1]))))
        bucket = int(np.searchsorted(rising, rank))
        if bucket == 0:
            return 0.0  # zeros, and what float32 hardly holds
        end = np.array([bucket + 1], dtype=np.uint32) << np.uint32(_DROPPED_BITS)
        return float(np.nextafter(end.view(np.float32)[0], np.float32(0)))
