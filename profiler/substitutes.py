"""Operations and formats that a profile lacks, predicted from measured ones that do similar work.

Older profiles have no times of operations that were not measured then. What these kernels take
besides their launch is moving their tensors, so each is predicted from one that it resembles: a
launch costs the same, the rest as many times as much as it moves bytes. Matmuls on a GGUF file's
weights are predicted from those of 4-bit weights: in decoding by their bytes, in prefill as long,
on cores of a processor as many times as long as was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from hetero.backends.formats import WeightFormat
from hetero.profiler.records import (
    Contention,
    DeviceProfile,
    DeviceRecord,
    EveryCore,
    MatMulPredictor,
    NonMatmulPredictor,
    Phase,
    PreparationPredictor,
)

# By the names of `predict.op_name`: tensors [m, d] or [m, f] that a call reads and writes, by which
# alone these operations' sizes differ (GatedAct: gate, up and product),
TENSORS: Final = {
    "RMSNorm": 2, "RMSNorm+add": 4, "LayerNorm": 2, "LayerNorm+add": 4,
    "GatedAct": 3, "Act": 2, "Add": 3, "AddPositions": 3, "ShortConv": 2, "ShortConv+gated": 4,
    "SigmoidGate": 3, "GatedInput": 4, "GatedAdd": 4,
}  # fmt: skip
# and the proxies of each, the most similar first.
SUBSTITUTES: Final = {
    "LayerNorm": ("RMSNorm",),
    "LayerNorm+add": ("RMSNorm+add",),
    "Act": ("GatedAct",),
    "SigmoidGate": ("GatedAct", "Add"),
    "GatedInput": ("SigmoidGate", "GatedAct", "Add"),
    "Add": ("RMSNorm+add", "RMSNorm"),
    "GatedAdd": ("RMSNorm+add", "Add"),
    "ShortConv": ("ShortConv+gated", "Act", "GatedAct"),
    "ShortConv+gated": ("ShortConv", "GatedAct"),
    "AddPositions": ("Add", "RMSNorm+add", "RMSNorm"),
    # By its multiply-adds and what it reads and writes, which are among the terms of the work.
    "GatedDelta": ("Attention", "Attention+f16", "Attention+q8"),
    # Caches of another format, whose bytes are among the terms of the work.
    "Attention": ("Attention+f16", "Attention+q8"),
    "Attention+f16": ("Attention", "Attention+q8"),
    "Attention+q8": ("Attention+f16", "Attention"),
}


# Proxies of a file's formats, the most similar first.
FILE_SUBSTITUTES: Final = {
    WeightFormat.GGUF_A16: (WeightFormat.W4A16, WeightFormat.W4A8),
    WeightFormat.GGUF_A8: (WeightFormat.W4A8, WeightFormat.W4A16),
}


# Times of a usual file's kernels on cores of a processor over those of their substitutes: 4-bit
# blocks with a minimum, and 6-bit ones for a fifth of the weights (`USUAL_PARTS`), whose products
# ONNX Runtime makes in two graphs, of a dequantised weight. Measured by the threads' CPU time on an
# AMX processor, shapes of 576 and 1536 features, 1 to 256 tokens.
FILES_ON_PROCESSORS: Final[dict[tuple[str, WeightFormat, WeightFormat], dict[Phase, float]]] = {
    ("opencl", WeightFormat.W4A16, WeightFormat.GGUF_A16): {"prefill": 1.25},
    ("opencl", WeightFormat.W4A8, WeightFormat.GGUF_A8): {"prefill": 1.25},
    ("ort-cpu", WeightFormat.W4A16, WeightFormat.GGUF_A16): {"prefill": 1.5},
    ("ort-cpu", WeightFormat.W4A8, WeightFormat.GGUF_A8): {"prefill": 1.75, "decode": 1.6},
}


class Substitution(NamedTuple):
    """An operation that was not measured, and the one that it is predicted from."""

    op: str
    source: str

    @property
    def note(self) -> str:
        """Return the substitution in words."""
        return f"{self.op} was not measured: predicted from {self.source} by its bytes"


def proxy_predictor(source: NonMatmulPredictor, op: str) -> NonMatmulPredictor:
    """Return a predictor of `op` by the work of another operation."""
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
    """Return what a file's format is predicted from.

    None where it was measured or nothing is like it.
    """
    known = {p.weight_format for p in profile.predictors}
    if wanted in known:
        return None
    source = next((x for x in FILE_SUBSTITUTES.get(wanted, ()) if x in known), None)
    return None if source is None else Substitution(wanted.value, source.value)


def with_file_formats(profile: DeviceProfile) -> DeviceProfile:
    """Return the profile with records of files' formats.

    Missing ones are made of their substitutes', kind by kind, for a profile may have matmuls
    of a format and nothing else.
    """
    predictors: tuple[MatMulPredictor, ...] = profile.predictors
    preparation: tuple[PreparationPredictor, ...] = profile.preparation_predictors
    contention: tuple[Contention, ...] = profile.contention
    every_core: tuple[EveryCore, ...] = profile.every_core
    for wanted in FILE_SUBSTITUTES:
        own = {"weight_format": wanted}
        predictors += tuple(
            _of_file(p, wanted, profile.devices.get(p.device)) for p in _sources(predictors, wanted)
        )
        preparation += tuple(p.model_copy(update=own) for p in _sources(preparation, wanted))
        contention += tuple(p.model_copy(update=own) for p in _sources(contention, wanted))
        every_core += tuple(p.model_copy(update=own) for p in _sources(every_core, wanted))
    return profile.model_copy(
        update={
            "predictors": predictors,
            "preparation_predictors": preparation,
            "contention": contention,
            "every_core": every_core,
        }
    )


OfFormat = TypeVar("OfFormat", MatMulPredictor, PreparationPredictor, Contention, EveryCore)


def _sources(records: Sequence[OfFormat], wanted: WeightFormat) -> list[OfFormat]:
    """Return the records that are proxies of a file's format; none where it has its own."""
    known = {record.weight_format for record in records}
    if wanted in known:
        return []
    source = next((x for x in FILE_SUBSTITUTES[wanted] if x in known), None)
    return [record for record in records if source is not None and record.weight_format is source]


def _of_file(
    source: MatMulPredictor, wanted: WeightFormat, device: DeviceRecord | None
) -> MatMulPredictor:
    by_bytes = wanted.storage.bytes_per_weight / source.weight_format.storage.bytes_per_weight
    ratios: dict[Phase, float] = {"prefill": 1.0, "decode": by_bytes}
    if device is not None and device.on_processor:
        ratios |= FILES_ON_PROCESSORS.get((device.backend, source.weight_format, wanted), {})
    scale = {phase: source.scale.get(phase, 1.0) * ratio for phase, ratio in ratios.items()}
    return source.model_copy(update={"weight_format": wanted, "scale": scale})
