"""Operations and formats that a profile lacks, predicted from measured ones that do similar work.

Profiles of before an operation was measured have no times of it. What these kernels take besides
their launch is moving their tensors, so each is predicted from one that it resembles: a launch
costs the same, the rest as many times as much as it moves bytes. Matmuls on a GGUF file's weights
are predicted from those of 4-bit weights: in decoding by their bytes, in prefill as long.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hetero.backends.formats import WeightFormat
from hetero.profiler.records import (
    Contention,
    DeviceProfile,
    EveryCore,
    MatMulPredictor,
    OtherPredictor,
    PreparationPredictor,
)

# By the names of `predict.op_name`: tensors [m, d] or [m, f] that a call reads and writes, by which
# alone these operations' sizes differ (GatedAct: gate, up and product),
TENSORS: Final = {
    "RMSNorm": 2, "RMSNorm+add": 4, "LayerNorm": 2, "LayerNorm+add": 4,
    "GatedAct": 3, "Act": 2, "Add": 3, "AddPositions": 3,
}  # fmt: skip
# and what stands in for which, the likest first.
SUBSTITUTES: Final = {
    "LayerNorm": ("RMSNorm",),
    "LayerNorm+add": ("RMSNorm+add",),
    "Act": ("GatedAct",),
    "Add": ("RMSNorm+add", "RMSNorm"),
    "AddPositions": ("Add", "RMSNorm+add", "RMSNorm"),
    # Caches of another format, whose bytes are among the terms of the work.
    "Attention": ("Attention+f16", "Attention+q8"),
    "Attention+f16": ("Attention", "Attention+q8"),
    "Attention+q8": ("Attention+f16", "Attention"),
}


# Formats that stand in for a file's, the likest first.
FILE_SUBSTITUTES: Final = {
    WeightFormat.GGUF_A16: (WeightFormat.W4A16, WeightFormat.W4A8),
    WeightFormat.GGUF_A8: (WeightFormat.W4A8, WeightFormat.W4A16),
}


class Substitution(NamedTuple):
    """An operation that was not measured, and the one that it is predicted from."""

    op: str
    source: str

    @property
    def note(self) -> str:
        """For people."""
        return f"{self.op} was not measured: predicted from {self.source} by its bytes"


def stand_in(source: OtherPredictor, op: str) -> OtherPredictor:
    """What predicts `op` by the work of another operation."""
    ratio = TENSORS.get(op, 1) / TENSORS.get(source.op, 1)

    def scaled(terms: dict[str, float]) -> dict[str, float]:
        return {name: x * (1.0 if name == "calls" else ratio) for name, x in terms.items()}

    return source.model_copy(
        update={
            "op": op,
            "coefficients": scaled(source.coefficients),
            "decode": None if source.decode is None else scaled(source.decode),
        }
    )


def file_substitution(profile: DeviceProfile, wanted: WeightFormat) -> Substitution | None:
    """What a file's format is predicted from, None where it was measured or nothing is like it."""
    known = {p.weight_format for p in profile.predictors}
    if wanted in known:
        return None
    found = next((x for x in FILE_SUBSTITUTES.get(wanted, ()) if x in known), None)
    return None if found is None else Substitution(wanted.value, found.value)


def with_file_formats(profile: DeviceProfile) -> DeviceProfile:
    """The profile with records of files' formats, made of those of their substitutes."""
    found = ((wanted, file_substitution(profile, wanted)) for wanted in FILE_SUBSTITUTES)
    missing = {wanted: WeightFormat(x.source) for wanted, x in found if x is not None}
    if not missing:
        return profile
    predictors: list[MatMulPredictor] = []
    preparation: list[PreparationPredictor] = []
    contention: list[Contention] = []
    every_core: list[EveryCore] = []
    for wanted, source in missing.items():
        own = {"weight_format": wanted}
        predictors += [_of_file(p, wanted) for p in profile.predictors if p.weight_format is source]
        preparation += [
            p.model_copy(update=own)
            for p in profile.preparation_predictors
            if p.weight_format is source
        ]
        contention += [
            x.model_copy(update=own) for x in profile.contention if x.weight_format is source
        ]
        every_core += [
            x.model_copy(update=own) for x in profile.every_core if x.weight_format is source
        ]
    return profile.model_copy(
        update={
            "predictors": (*profile.predictors, *predictors),
            "preparation_predictors": (*profile.preparation_predictors, *preparation),
            "contention": (*profile.contention, *contention),
            "every_core": (*profile.every_core, *every_core),
        }
    )


def _of_file(source: MatMulPredictor, wanted: WeightFormat) -> MatMulPredictor:
    ratio = wanted.storage.bytes_per_weight / source.weight_format.storage.bytes_per_weight
    scale = {**source.scale, "decode": source.scale.get("decode", 1.0) * ratio}
    return source.model_copy(update={"weight_format": wanted, "scale": scale})
