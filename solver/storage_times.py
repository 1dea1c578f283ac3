"""Times of matmuls by how their weights are stored: what a profile says of a file's mixed types.

A profile has times of formats. Those of blocks are one format there, `gguf-a16` or `gguf-a8`, whose
decode times are scaled to a type's bytes. Formats that were not measured are predicted from those
of 4-bit weights: in decoding by their bytes, in prefill on a processor as many times as long as was
measured, elsewhere as long.
"""

from __future__ import annotations

from typing import Final

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.protocol import DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import DeviceProfile, phase_of

FOUR_BITS: Final = {False: WeightFormat.W4A16, True: WeightFormat.W4A8}
BLOCKS: Final = {False: WeightFormat.GGUF_A16, True: WeightFormat.GGUF_A8}
WIDE: Final = {
    StorageFormat.Q8: WeightFormat.W8A16,
    StorageFormat.F16: WeightFormat.F16,
    StorageFormat.F32: WeightFormat.F32,
}
# Prefill of wide formats over that of w4a16 on a processor.
ON_PROCESSORS: Final = {StorageFormat.Q8: 1.0, StorageFormat.F16: 1.0, StorageFormat.F32: 1.0}


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
    """Answers from one profile."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._known = {(p.device, p.weight_format) for p in cost.profile.predictors}

    def seconds(
        self, device: DeviceKind, storage: StorageFormat, int8: bool, m: int, n: int, k: int
    ) -> float:
        """Return the seconds of a kernel.

        Raises `ProfileError` where the profile has no times of 4-bit weights either.
        """
        wanted = format_of(storage, int8)
        candidates = (wanted, FOUR_BITS[int8], FOUR_BITS[not int8])
        source = next((x for x in candidates if (device, x) in self._known), None)
        if source is None:
            raise ProfileError(
                f"profile {self.cost.profile.name} has no times of {wanted} or w4a16 on {device}: "
                f"measure them with `hetero profile --weights w4a16 --weights {wanted}`"
            )
        seconds = float(self.cost.matmul_s(device, source, m, n, k).seconds)
        return seconds * self._ratio(device, storage, source, wanted, m)

    def _ratio(
        self,
        device: DeviceKind,
        storage: StorageFormat,
        source: WeightFormat,
        wanted: WeightFormat,
        m: int,
    ) -> float:
        decode = phase_of(m) == "decode"
        if source is wanted:
            mixed = source.of_file and decode
            by_bytes = storage.bytes_per_weight / source.storage.bytes_per_weight
            return by_bytes if mixed else 1.0
        if storage is StorageFormat.Q4:
            return 1.0  # with other activations
        if decode:
            return storage.bytes_per_weight / source.storage.bytes_per_weight
        record = self.cost.device(device)
        here = "cpu" in record.details or record.backend == "ort-cpu"
        return ON_PROCESSORS.get(storage, 1.0) if here else 1.0
