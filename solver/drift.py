"""Costs of devices that have become slower or faster than their profile says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import OperandOrder
from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import Cost, CostModel, Sizes
from hetero.profiler.predict import Floats
from hetero.profiler.records import DECODE_TOKENS, Phase

# Measured over predicted seconds of a device's matmuls in a phase; 1 where nothing is known.
Factors: TypeAlias = Mapping[tuple[DeviceKind, Phase], float]


class DriftedCost(CostModel):
    """A profile's costs with every matmul's seconds multiplied by its device's factor.

    What belongs to synchronisation and to the other operators stays as the profile has it.
    """

    def __init__(self, base: CostModel, factors: Factors) -> None:
        super().__init__(base.profile)
        self._base = base
        self.factors = dict(factors)

    def contention(
        self, device: DeviceKind, phase: Phase, weight_format: WeightFormat | None = None
    ) -> float:
        """See `CostModel.contention`."""
        return self._base.contention(device, phase, weight_format)

    def spread(self, device: DeviceKind, phase: Phase, weight_format: WeightFormat) -> float:
        """See `CostModel.spread`."""
        return self._base.spread(device, phase, weight_format)

    def matmul_s(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        m: Sizes,
        n: Sizes,
        k: Sizes,
        order: OperandOrder = "plain",
    ) -> Cost:
        """See `CostModel.matmul_s`."""
        cost = self._base.matmul_s(device, weight_format, m, n, k, order)
        tokens = np.broadcast_to(np.asarray(m, dtype=np.float64), cost.seconds.shape)
        return cost._replace(seconds=cost.seconds * self._of(device, tokens))

    def table_s(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        ms: Floats,
        ns: Floats,
        k: int,
        order: OperandOrder = "plain",
    ) -> Floats:
        """See `CostModel.table_s`."""
        seconds = self._base.table_s(device, weight_format, ms, ns, k, order)
        return seconds * self._of(device, ms)[:, None]

    def uncertainty(
        self,
        device: DeviceKind,
        weight_format: WeightFormat,
        ms: Floats,
        ns: Floats,
        k: int,
        order: OperandOrder = "plain",
    ) -> Floats:
        """See `CostModel.uncertainty`."""
        return self._base.uncertainty(device, weight_format, ms, ns, k, order)

    def _of(self, device: DeviceKind, tokens: npt.NDArray[np.float64]) -> Floats:
        decode = self.factors.get((device, "decode"), 1.0)
        prefill = self.factors.get((device, "prefill"), 1.0)
        return np.where(tokens <= DECODE_TOKENS, decode, prefill)
