"""GPTQ (Frantar et al., arXiv 2210.17323): 4-bit weights chosen by the activations of a text.

The format stays w4 (groups of 32 along k, one fp16 scale each): only the codes are chosen better
than by rounding to nearest. Features are quantised one after the other; the error of each is
compensated by the remaining features, weighted by the inverse of H = Xᵀ·X, X being the matmul's
input on a calibration text. The model is run on that text node by node, in the arithmetic of
`hetero.backends.reference`, so that every matmul sees the output of those quantised before it.

Notation: n rows, k features, G = 32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import GROUP_SIZE, StorageFormat, WeightFormat
from hetero.backends.host.files import LONGEST_TEXT_BYTES
from hetero.backends.protocol import WeightValue
from hetero.backends.weights import ROW_BLOCK, Float32Array, PackedWeight, pack, pack_q4, padded
from hetero.compiling.constants import DEFAULT_OUTLIERS
from hetero.compiling.static_scales import NO_CHANNELS, Channels, StaticWeights, static_weights
from hetero.compiling.walk import CalibrationPoint, Progress, walk
from hetero.errors import UserError
from hetero.models import LoadedModel, open_model
from hetero.models.fields import read_text
from hetero.models.layout import block_matrices
from hetero.models.model_weights import BlockWeights, DerivedWeights, ModelWeights
from hetero.models.original import without_floats
from hetero.models.packing import SourceTensor, pack_rows

DAMPING: Final = 0.01  # of the mean diagonal of H, as in the paper
SEQUENCE_TOKENS: Final = 512
SHRINKS: Final = (1.0, 0.95, 0.9, 0.85, 0.8)  # scales tried for each group, of the full one
_CHOICES: Final = "choose w4a16 or w4a8 (GPTQ), or w8a8 (static scales)"
Float64Array = npt.NDArray[np.float64]


class RoundedWeights(DerivedWeights):
    """The matrices of `exact` (f32) rounded to a format, without the columns of `hot` channels."""

    def __init__(
        self, exact: ModelWeights, weight_format: WeightFormat, hot: Mapping[str, Channels]
    ) -> None:
        super().__init__(exact, weight_format)
        self._hot = dict(hot)

    def _load_block(self, index: int) -> BlockWeights:
        exact = self.inner.block(index)
        packed = {
            x.name: self._pack(exact.matrix(x.name), f"blocks.{index}.{x.name}")
            for x in block_matrices(self.config, index)
        }
        vectors = {x.name: exact.vectors[x.name] for x in self.vectors(index)}
        return BlockWeights(packed, vectors)

    def _load_matrix(self, name: str) -> PackedWeight:
        return self._pack(self.inner.outer_matrix(name), name)

    def _pack(self, weight: PackedWeight, name: str) -> PackedWeight:
        cold, _ = split_hot(weight.dequantize(), self._hot.get(name, NO_CHANNELS))
        return pack_rows([SourceTensor(name, cold)], self.weight_format.storage)


def split_hot(weight: Float32Array, hot: Channels) -> tuple[Float32Array, Float32Array]:
    """Return a weight [n, k] with zeros in hot columns, and these as a slab [n, h] holds them."""
    slab: Float32Array = weight[:, hot].astype(np.float16).astype(np.float32)
    if not len(hot):
        return weight, slab
    cold = weight.copy()
    cold[:, hot] = 0
    return cold, slab


class CalibratedWeights(DerivedWeights):
    """4-bit weights of `exact` (f32), chosen on calibration tokens.

    `sequences` are token ids, each of which fits the model's context. All blocks are made at once.
    Columns of `hot` channels, by block and matmul, stay floats and are not in them.
    """

    def __init__(
        self,
        exact: ModelWeights,
        weight_format: WeightFormat,
        sequences: Sequence[Sequence[int]],
        progress: Progress | None = None,
        hot: Mapping[str, Channels] | None = None,
    ) -> None:
        super().__init__(exact, weight_format)
        self._hot = dict(hot or {})
        if weight_format.storage is not StorageFormat.Q4 or exact.weight_format != "f32":
            raise UserError(f"GPTQ makes 4-bit weights of f32 ones: {_CHOICES}")
        self._sequences = [list(x) for x in sequences if len(x)]
        self._made: list[BlockWeights] = []
        self._head: PackedWeight | None = None
        self._calibrate(progress)

    def _load_block(self, index: int) -> BlockWeights:
        return self._made[index]

    def _load_matrix(self, name: str) -> PackedWeight:
        if name == "lm_head" and self._head is not None:
            return self._head
        return pack(self.inner.outer_matrix(name).dequantize(), StorageFormat.Q4)

    def _calibrate(self, progress: Progress | None) -> None:
        """Run the decoder node by node on all sequences; every matmul is quantised on the way."""
        chosen: dict[str, PackedWeight] = {}

        def quantise(site: CalibrationPoint) -> Mapping[str, WeightValue]:
            if site.role == "lm_head" and self.config.tie_word_embeddings:
                return site.values
            hot = self._hot.get(f"blocks.{site.node.layer}.{site.role}", NO_CHANNELS)
            cold, slab = split_hot(site.dense(), hot)
            chosen[site.role] = gptq(cold, hessian(site.inputs))
            goes_on = chosen[site.role].dequantize()
            goes_on[:, hot] += slab
            return {**site.values, "weight": pack(goes_on, StorageFormat.F32)}

        walk(
            self.inner,
            self._sequences,
            quantise,
            after_block=lambda block: self._keep(block, chosen),
            progress=progress,
        )
        self._head = chosen.get("lm_head")

    def _keep(self, block: BlockWeights, chosen: dict[str, PackedWeight]) -> None:
        vectors = {x.name: block.vectors[x.name] for x in self.vectors(len(self._made))}
        packed = {name: chosen.pop(name) for name in block.matrices}
        self._made.append(BlockWeights(packed, vectors))


def hessian(inputs: Sequence[npt.NDArray[Any]]) -> Float64Array:
    """Return Xᵀ·X [k, k] over all tokens, damped so that it has an inverse."""
    k = inputs[0].shape[1]
    total = np.zeros((k, k))
    for x in inputs:
        wide = x.astype(np.float64)
        total += wide.T @ wide
    total[np.diag_indices(k)] += DAMPING * max(float(np.diag(total).mean()), 1e-12)
    return total


def gptq(weight: Float32Array, h: Float64Array) -> PackedWeight:
    """Quantise a weight [n, k] to 4 bits with little error on inputs whose XᵀX is `h` [k, k]."""
    n, k = weight.shape
    groups = padded(k, GROUP_SIZE) // GROUP_SIZE
    rows = padded(n, ROW_BLOCK)
    codes = np.full((rows, groups, GROUP_SIZE), 8, dtype=np.uint8)
    scales = np.zeros((rows, groups), dtype=np.float16)
    left = weight.astype(np.float64)
    # Rows of the upper Cholesky factor of h⁻¹: what one feature's error asks of the later ones.
    factor = np.linalg.cholesky(np.linalg.inv(h)).T
    for group in range(groups):
        start, stop = group * GROUP_SIZE, min((group + 1) * GROUP_SIZE, k)
        scale = best_scales(left[:, start:stop], np.diag(h)[start:stop])
        scales[:n, group] = scale
        errors = np.zeros((n, stop - start))
        for at in range(start, stop):
            code = _codes(left[:, at], scale)
            codes[:n, group, at - start] = code
            stored = (code.astype(np.float64) - 8) * scale.astype(np.float64)
            errors[:, at - start] = (left[:, at] - stored) / factor[at, at]
            left[:, at + 1 : stop] -= np.outer(errors[:, at - start], factor[at, at + 1 : stop])
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return pack_q4(codes, scales, n, k)


def best_scales(values: Float64Array, importance: Float64Array) -> npt.NDArray[np.float16]:
    """Return scales [n] of one group [n, G]: Q4_0's or a little less, whichever loses least.

    `importance` [G] weighs the features' squared errors.
    """
    peak = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)[:, 0]
    best = np.zeros(len(values), dtype=np.float16)
    least = np.full(len(values), np.inf)
    for shrink in SHRINKS:
        scale = (shrink * peak / -8.0).astype(np.float16)
        stored = (_codes(values, scale[:, None]).astype(np.float64) - 8) * scale[:, None]
        lost = (np.square(values - stored) * importance).sum(axis=1)
        better = lost < least
        best[better], least[better] = scale[better], lost[better]
    return best


def _codes(values: Float64Array, scale: npt.NDArray[np.float16]) -> npt.NDArray[np.uint8]:
    wide = scale.astype(np.float64)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0)
    return np.rint(values * inverse + 8).clip(0, 15).astype(np.uint8)


def calibrated(
    model: str,
    weights: str,
    text: Path,
    limit: int,
    progress: Progress | None = None,
    *,
    outliers: str = DEFAULT_OUTLIERS,
    excess: bool = True,
) -> CalibratedWeights | StaticWeights:
    """Return weights of a MODEL, chosen on at most `limit` tokens of a text file.

    They are of 4 bits by GPTQ, or of w8a8 with static scales of activations and `outliers`, with
    `excess` of channels that the text did not have, too. Raises `UserError` for a text that cannot
    be read or is too short.
    """
    weight_format = WeightFormat(weights)
    if not (weight_format.activations.static or weight_format.storage is StorageFormat.Q4):
        raise UserError(f"calibration has nothing to choose for {weights}: {_CHOICES}")
    loaded, words, sequences = calibration_sequences(model, text, limit)
    if loaded.config.experts is not None:
        raise UserError(
            f"{model}: has routed experts, whose weights are not calibrated; quantise it without "
            "--calibrate"
        )
    if weight_format.activations.static:
        return static_weights(
            loaded.weights,
            sequences,
            outliers=outliers,
            excess=excess,
            text=words,
            progress=progress,
        )
    return CalibratedWeights(loaded.weights, weight_format, sequences, progress)


def calibrated_together(
    formats: Sequence[WeightFormat],
    model: str,
    text: Path,
    limit: int,
    progress: Progress | None = None,
    *,
    outliers: str = DEFAULT_OUTLIERS,
) -> tuple[ModelWeights, list[ModelWeights]]:
    """Return weights of a MODEL in the first of some formats (`calibrated`), and in the others.

    The others are stored with them. Raises `UserError`, also where a format has nothing to
    calibrate.
    """
    first, *others = formats
    # Shadows belong to all formats, of which the others cut nothing off.
    options: dict[str, Any] = {"outliers": outliers, "excess": not others}
    source = calibrated(model, first.value, text, limit, progress, **options)
    if not isinstance(source, StaticWeights):
        return source, [calibrated(model, x.value, text, limit, progress) for x in others]
    return source, [besides(source, x, model, text, limit, progress) for x in others]


def besides(
    first: StaticWeights,
    weight_format: WeightFormat,
    model: str,
    text: Path,
    limit: int,
    progress: Progress | None = None,
) -> ModelWeights:
    """Return the matrices of a MODEL in another format, to be stored with those of w8a8.

    Both are calibrated on the same text, and the shadows of w8a8 belong to both, so hot columns are
    in neither. 4 bits by GPTQ. Raises `UserError` where the shadow is what w8a8's codes cut off,
    which other formats do not.
    """
    if first.calibration is not None and first.calibration.excess and first.calibration.shadowed:
        raise UserError(
            f"--outliers paper adds what the codes of w8a8 cut off, which {weight_format} does "
            "not: store one format, or choose other --outliers"
        )
    loaded, _, sequences = calibration_sequences(model, text, limit)
    hot = {name: scale.hot for name, scale in first.chosen.items()}
    if weight_format.storage is StorageFormat.Q4:
        return CalibratedWeights(loaded.weights, weight_format, sequences, progress, hot)
    return RoundedWeights(loaded.weights, weight_format, hot)


def first_tokens(model: LoadedModel, text: Path, limit: int) -> tuple[str, list[int]]:
    """Return a text file's words, and their first tokens, at most `limit`; none of blanks alone.

    Raises `UserError` for a text that cannot be read.
    """
    words = read_text(text, LONGEST_TEXT_BYTES)
    return words, model.encode(words)[:limit] if words.strip() else []


def calibration_sequences(
    model: str, text: Path, limit: int
) -> tuple[LoadedModel, str, list[list[int]]]:
    """Return a MODEL as f32, a text, and at most `limit` tokens of it as sequences.

    The sequences fit the context. Raises `UserError` for a text that cannot be read or is too
    short.
    """
    if (manifest := without_floats(model)) is not None:
        raise UserError(
            f"{model} holds {' and '.join(manifest.stored)}: calibration needs floats; give the "
            "model that it was made from"
        )
    loaded = open_model(model, weights="f32")
    words, tokens = first_tokens(loaded, text, limit)
    if len(tokens) < GROUP_SIZE:
        raise UserError(
            f"{text}: has {len(tokens)} tokens, calibration needs at least {GROUP_SIZE}; give more "
            "text"
        )
    length = min(SEQUENCE_TOKENS, loaded.config.max_position)
    return loaded, words, [tokens[i : i + length] for i in range(0, len(tokens), length)]
