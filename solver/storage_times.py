"""Times of matmuls by how their weights are stored: what a profile says of a file's mixed types.

A profile has times of formats. Those of blocks are one format there, `gguf-a16` or `gguf-a8`,
measured on a usual mix of types. Formats that were not measured are predicted from those of 4-bit
weights. In decoding times are scaled by bytes; in prefill on a processor by what was measured
(`ON_PROCESSORS`), elsewhere they are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import DeviceProfile, phase_of
from hetero.profiler.workload import USUAL_PARTS

FOUR_BITS: Final = {False: WeightFormat.W4A16, True: WeightFormat.W4A8}
BLOCKS: Final = {False: WeightFormat.GGUF_A16, True: WeightFormat.GGUF_A8}
WIDE: Final = {
    StorageFormat.Q8: WeightFormat.W8A16,
    StorageFormat.F16: WeightFormat.F16,
    StorageFormat.F32: WeightFormat.F32,
}
# Prefill over that of 4-bit weights with the same inputs, floats and int8, by backend. Measured by
# CPU time on a core with AVX2, 256 tokens, shapes of 576 to 2048 features.
ON_PROCESSORS: Final[Mapping[str, Mapping[StorageFormat, tuple[float, float]]]] = {
    "opencl": {
        StorageFormat.Q8: (1.0, 1.0),
        StorageFormat.F16: (1.0, 1.0),
        StorageFormat.F32: (1.25, 1.25),
        StorageFormat.Q4_1: (1.35, 1.25),
        StorageFormat.Q4_K: (1.1, 1.05),
        StorageFormat.Q5_0: (1.4, 1.3),
        StorageFormat.Q5_1: (1.4, 1.3),
        StorageFormat.Q5_K: (1.4, 1.3),
        StorageFormat.Q6_K: (1.3, 1.3),
    },
    "ort-cpu": {
        StorageFormat.Q8: (3.5, 3.5),
        StorageFormat.F16: (1.0, 1.0),
        StorageFormat.F32: (1.05, 1.05),
        StorageFormat.Q4_1: (1.1, 1.25),
        StorageFormat.Q4_K: (1.15, 1.3),
        StorageFormat.Q5_0: (3.7, 1.6),
        StorageFormat.Q5_1: (3.7, 1.7),
        StorageFormat.Q5_K: (3.7, 1.7),
        StorageFormat.Q6_K: (4.0, 3.6),
    },
}


def format_of(storage: StorageFormat, int8: bool) -> WeightFormat:
    """Return the format whose kernels multiply such weights, with inputs rounded to int8 or not.

    Weights of 8 bits and floats are multiplied with floats in any case.
    """
    if storage in WIDE:
        return WIDE[storage]
    return (FOUR_BITS if storage is StorageFormat.Q4 else BLOCKS)[int8]


def not_measured(profile: DeviceProfile) -> list[WeightFormat]:
    """Return the formats of mixed types that are predicted from those of 4-bit weights."""
    return sorted(
        {*WIDE.values(), *BLOCKS.values()} - {x.weight_format for x in profile.predictors}
    )


class StorageTimes:
    """Answers from one profile; `cost` is its cost model."""

    def __init__(self, profile: DeviceProfile, cost: CostModel) -> None:
        self.cost = cost
        self._measured = {(p.device, p.weight_format) for p in profile.predictors}

    def seconds(
        self, device: DeviceKind, storage: StorageFormat, int8: bool, m: int, n: int, k: int
    ) -> float:
        """Return the seconds of a kernel.

        Raises `ProfileError` where the profile has no times of 4-bit weights either.
        """
        wanted = format_of(storage, int8)
        int8 = int8 and storage not in WIDE
        candidates = (wanted, FOUR_BITS[int8], FOUR_BITS[not int8])
        source = next((x for x in candidates if (device, x) in self._measured), None)
        if source is None:
            raise ProfileError(
                f"profile {self.cost.profile.name} has no times of {wanted} or w4a16 on {device}: "
                f"measure them with `hetero profile --weights w4a16 --weights {wanted}`"
            )
        seconds = float(self.cost.matmul_s(device, source, m, n, k).seconds)
        if source is wanted and not wanted.of_file:
            return seconds
        if phase_of(m) == "decode":
            by_bytes = storage.bytes_per_weight / source.storage.bytes_per_weight
            return seconds * (by_bytes if storage is not source.storage else 1.0)
        ratios = self._ratios(device)
        usual = sum(share * ratios.get(x, (1.0, 1.0))[int8] for x, share in USUAL_PARTS)
        return seconds * ratios.get(storage, (1.0, 1.0))[int8] / (usual if source.of_file else 1.0)

    def _ratios(self, device: DeviceKind) -> Mapping[StorageFormat, tuple[float, float]]:
        record = self.cost.device(device)
        return ON_PROCESSORS.get(record.backend, {}) if record.on_processor else {}
