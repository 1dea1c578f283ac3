"""The preparation time of a matmul's graph or kernel, by a profile."""

from __future__ import annotations

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.profiler.features import weight_bytes
from hetero.profiler.records import DeviceProfile, PreparationPredictor


class PreparationTimes:
    """Measured and fitted times of one profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._predictors = profile.preparation_predictors
        self._measured = {(r.device, r.weight_format, r.n, r.k): r for r in profile.preparation}

    def seconds(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        n: int,
        k: int,
        *,
        cached: bool = False,
        m: int = 0,
    ) -> float:
        """Return the time to prepare one matmul graph (of m tokens) or kernel.

        It is as measured where this one was, else as fitted; 0 if nothing was measured.
        """
        entry = self._preparation(device, weight_format)
        if entry is None:
            return 0.0
        row = self._measured.get((device, weight_format, n, k))
        if row is not None:
            return (row.cached_s if cached else row.cold_s) + entry.s_per_token * m
        nbytes = float(weight_bytes(weight_format, n, k))
        if cached:
            return entry.cached_fixed_s + entry.cached_s_per_byte * nbytes
        return entry.fixed_s + entry.s_per_byte * nbytes + entry.s_per_token * m

    def layers_share(self, device: DeviceKind, weight_format: WeightFormat) -> bool:
        """Return whether one graph serves a matmul of all layers."""
        entry = self._preparation(device, weight_format)
        return entry is not None and entry.layers_share

    def _preparation(
        self, device: DeviceKind, weight_format: WeightFormat
    ) -> PreparationPredictor | None:
        wanted = (device, weight_format)
        return next((e for e in self._predictors if (e.device, e.weight_format) == wanted), None)
