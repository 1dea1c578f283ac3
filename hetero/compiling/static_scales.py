"""Static scales of activations for w8a8, and the treatment of outliers (mllm-NPU, section 3.3).

An int8 code of a matmul's input is rint(x / s) with one s for the whole tensor. A few channels hold
values far beyond the others; a scale wide enough for them leaves few codes for the rest, a narrower
one cuts them off. The paper's answer is a shadow: what the integers cannot hold is multiplied in
floating point and added. Here

    hot channels   those that hold most of the outliers leave the integer matrix (their codes are
                   zero, which makes the rows' scales smaller too) for a slab [n, h] of floats
    importance     largest |x| / s of the matmul: the least important shadows are pruned
    pruned         s is wide, or cuts off: whichever loses less

Every choice is the one of least error of the matmul's output on calibration tokens, int8 codes by
int8 weights against floats; tokens and rows beyond a sample are left out of the comparison.
`--outliers paper` follows the paper and its public code instead: s is the 99.9th percentile if the
maximum is more than five times that, else the maximum; a shadow adds all that is cut off (the
excess); pruned matmuls take the maximum.

Notation: m tokens, n rows, k features, h hot channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import StorageFormat, WeightFormat
from hetero.backends.protocol import WeightValue
from hetero.backends.reference.compute import static_codes
from hetero.backends.weights import Float32Array, PackedWeight
from hetero.compiling.constants import DEFAULT_OUTLIERS
from hetero.compiling.sketch import Sketch
from hetero.compiling.walk import CalibrationPoint, Progress, walk
from hetero.errors import UserError
from hetero.models.calibration_record import (
    Calibration,
    MatMulCalibration,
    OutlierChoice,
    matmul_shapes,
)
from hetero.models.layout import block_matrices
from hetero.models.model_weights import BlockWeights, DerivedWeights, ModelWeights, Shadow
from hetero.models.packing import SourceTensor, pack_rows

PERCENTILES: Final = (100.0, 99.99, 99.9, 99.0)  # of equal errors the first one counts
HOT_COVERAGE: Final = 0.8  # of the outliers are in the hot channels, if these are few enough
MAX_HOT: Final = 0.03  # of the channels
WORTH: Final = 0.95  # a larger slab has less than this part of a smaller one's error
PAPER_PERCENTILE: Final = 99.9
PAPER_RATIO: Final = 5.0
LARGEST_CODE: Final = 127
SAMPLE_TOKENS: Final = 512
SAMPLE_ROWS: Final = 4096
Channels = npt.NDArray[np.int32]
NO_CHANNELS: Final[Channels] = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Scale:
    """A scale of a matmul's input: float32 `step`, its percentile, and its cost.

    `hot` channels [h] are outside of it; with `excess` what the codes of the others cut off is
    added exactly.
    `error` is ‖y - exact‖² / ‖exact‖².
    """

    step: float
    percentile: float
    error: float
    hot: Channels = field(default_factory=lambda: NO_CHANNELS)
    excess: bool = False


@dataclass(frozen=True, eq=False)
class Scales:
    """Options of a matmul: with a shadow, clipped or widened without one, and widened.

    `channel_max` [k] is the maximum of |x| on the text, `outliers` [k] how many elements are beyond
    the codes of the shadowed form.
    """

    shadowed: Scale
    pruned: Scale
    widest: Scale
    channel_max: Float32Array
    outliers: npt.NDArray[np.int64]

    @property
    def importance(self) -> float:
        """Return the largest |x| in codes of the shadowed scale."""
        return float(self.channel_max.max()) / self.shadowed.step


class InputStatistics:
    """Magnitudes of a matmul's input [m, k] over all sequences."""

    def __init__(self, inputs: Sequence[Float32Array]) -> None:
        self.inputs = inputs
        self.sketch = Sketch.of(*inputs)
        self.channel_max: Float32Array = np.max(
            [np.abs(x).max(axis=0) for x in inputs], axis=0
        )  # [k]

    @property
    def largest(self) -> float:
        """Return the maximum of |x|."""
        return float(self.channel_max.max())

    def outliers(self, threshold: float) -> npt.NDArray[np.int64]:
        """Return how many elements of each channel [k] are beyond a threshold."""
        counts = [np.count_nonzero(np.abs(x) > threshold, axis=0) for x in self.inputs]
        total: npt.NDArray[np.int64] = np.sum(counts, axis=0, dtype=np.int64)
        return total

    def hot(self, threshold: float, known: Channels = NO_CHANNELS) -> Channels:
        """Return the fewest channels that hold `HOT_COVERAGE` of the outliers, with `known` ones.

        They are at most `MAX_HOT`, rising. Of two with as many outliers the one with the larger
        maximum comes first.
        """
        counts = self.outliers(threshold)
        counts[known] = 0
        order = np.lexsort((-self.channel_max, -counts))
        covered = np.cumsum(counts[order])
        if not covered[-1]:
            return known
        few = 1 + int(np.searchsorted(covered, HOT_COVERAGE * covered[-1]))
        most = max(1, int(MAX_HOT * len(counts))) - len(known)
        return np.sort(np.concatenate([known, order[: min(few, most)]])).astype(np.int32)

    def cold_sketch(self, hot: Channels) -> Sketch:
        """Return the sketch of the other channels."""
        return self.sketch.without(Sketch.of(*(x[:, hot] for x in self.inputs)))

    def hot_sets(self, known: Channels = NO_CHANNELS) -> list[Channels]:
        """Return sets of hot channels for several thresholds, smallest first.

        They are without `known` ones.
        """
        sketch = self.cold_sketch(known)
        sets = [self.hot(sketch.percentile(p), known) for p in PERCENTILES[1:]]
        distinct = {x.tobytes(): x for x in sets if len(x) > len(known)}
        return sorted(distinct.values(), key=len)

    def steps(self, hot: Channels) -> Iterator[tuple[float, float]]:
        """Return (percentile, step) to try for the channels that are not hot."""
        cold = np.delete(self.channel_max, hot)
        sketch = self.cold_sketch(hot)
        largest = float(cold.max()) if len(cold) else 0.0
        yield 100.0, step_of(largest)
        for percent in PERCENTILES[1:]:
            threshold = min(sketch.percentile(percent), largest)
            if 0 < threshold < largest:
                yield percent, step_of(threshold)


def step_of(threshold: float) -> float:
    """Return the float32 step of which `LARGEST_CODE` make a threshold; 1 where all is zero."""
    return float(np.float32(threshold / LARGEST_CODE)) or 1.0


class Trial:
    """Errors of a matmul's output on sampled tokens and rows."""

    def __init__(self, weight: Float32Array, inputs: Sequence[Float32Array]) -> None:
        tokens = np.concatenate(list(inputs))
        self.x = tokens[_spread(len(tokens), SAMPLE_TOKENS)]
        self.weight = weight[_spread(len(weight), SAMPLE_ROWS)]
        self.exact = self.x @ self.weight.T
        self._norm = max(float(np.square(self.exact, dtype=np.float64).sum()), 1e-30)
        self._packed: tuple[bytes, PackedWeight] | None = None

    def error(self, step: float, hot: Channels = NO_CHANNELS, *, excess: bool = False) -> float:
        """Return the error of int8 codes of a step, with hot channels or an excess as floats."""
        y = static_product(self.x, self._rows_without(hot), step, unclipped=excess)
        if len(hot):
            slab: Float32Array = self.weight[:, hot].astype(np.float16).astype(np.float32)
            y = np.add(y, self.x[:, hot] @ slab.T, dtype=np.float32)
        return float(np.square(y - self.exact, dtype=np.float64).sum()) / self._norm

    def _rows_without(self, hot: Channels) -> PackedWeight:
        key = hot.tobytes()
        if self._packed is None or self._packed[0] != key:
            self._packed = key, pack_without(self.weight, hot)
        return self._packed[1]


def _spread(count: int, limit: int) -> npt.NDArray[np.intp]:
    """Return at most `limit` of `count` numbers, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).astype(np.intp))


def pack_without(weight: Float32Array, hot: Channels) -> PackedWeight:
    """Return a weight [n, k] with one scale a row, its hot columns zero."""
    if len(hot):
        weight = weight.copy()
        weight[:, hot] = 0
    return pack_rows([SourceTensor("weight", weight)], StorageFormat.Q8R)


def static_product(
    x: Float32Array, weight: PackedWeight, step: float, *, unclipped: bool = False
) -> Float32Array:
    """Codes of x [m, k] by codes of a weight [n, k], scaled: float32 [m, n].

    `unclipped` codes have no limits: int8 codes and the excess over them together.
    """
    assert weight.scales is not None
    codes = np.rint(x / np.float32(step)) if unclipped else static_codes(x, step)
    sums = codes.astype(np.float32) @ weight.codes().astype(np.float32).T
    scales = np.float32(step) * weight.scales.reshape(-1)[: weight.n]
    product: Float32Array = np.multiply(sums, scales, dtype=np.float32)
    return product


def choose_scales(
    weight: Float32Array,
    inputs: Sequence[Float32Array],
    *,
    paper: bool = False,
    shadow: bool = True,
    excess: bool = True,
) -> Scales:
    """Return scales for the inputs [m, k] of a weight [n, k], the pruned forms without `shadow`.

    `paper`: by the rule of mllm-NPU. `excess`: a shadow also adds what the codes cut off, so that
    an outlier of a channel that the text did not have is not lost.
    """
    statistics, trial = InputStatistics(inputs), Trial(weight, inputs)
    flat = [Scale(s, p, trial.error(s)) for p, s in statistics.steps(NO_CHANNELS)]
    pruned = widest = flat[0]
    if not paper:
        pruned = min(flat, key=lambda scale: scale.error)
    shadowed = pruned
    if shadow:
        if paper:
            shadowed = _paper_scale(statistics, widest)
        else:
            shadowed = _slab_scale(statistics, trial, pruned)
        if paper or excess:
            error = trial.error(shadowed.step, shadowed.hot, excess=True)
            shadowed = replace(shadowed, excess=True, error=error)
    outliers = statistics.outliers((LARGEST_CODE + 0.5) * shadowed.step)
    return Scales(shadowed, pruned, widest, statistics.channel_max, outliers)


def _paper_scale(statistics: InputStatistics, widest: Scale) -> Scale:
    """Return the scale of the paper's public code, its error not known yet."""
    threshold = statistics.sketch.percentile(PAPER_PERCENTILE)
    if threshold <= 0 or statistics.largest <= PAPER_RATIO * threshold:
        return widest
    return Scale(step_of(threshold), PAPER_PERCENTILE, widest.error)


def _slab_scale(statistics: InputStatistics, trial: Trial, pruned: Scale) -> Scale:
    """Hot channels and the scale of the others; `pruned`, the form without any, if no worse.

    Where a few channels hide the outliers of others, the second round finds these.
    """
    best: Scale | None = None
    for _ in range(2):
        for hot in statistics.hot_sets(NO_CHANNELS if best is None else best.hot):
            scales = [Scale(s, p, trial.error(s, hot), hot) for p, s in statistics.steps(hot)]
            least = min(scales, key=lambda scale: scale.error)
            if best is None or least.error < WORTH * best.error:
                best = least
    return best if best is not None and best.error < pruned.error else pruned


class StaticWeights(DerivedWeights):
    """w8a8 weights of `exact` (f32) with a chosen scale for every matmul by name.

    Matrices are packed when they are asked for.
    """

    def __init__(
        self,
        exact: ModelWeights,
        chosen: Mapping[str, Scale],
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__(exact, WeightFormat.W8A8)
        self.chosen = dict(chosen)
        self.calibration = calibration

    def model_vector(self, name: str) -> Float32Array:
        """Return a vector outside of the blocks."""
        if name == "lm_head_x_scale":
            return np.array([self.chosen["lm_head"].step], dtype=np.float32)
        return super().model_vector(name)

    def _load_block(self, index: int) -> BlockWeights:
        exact = self.inner.block(index)
        packed: dict[str, PackedWeight] = {}
        steps: dict[str, Float32Array] = {}
        shadows: dict[str, Shadow] = {}
        for matrix in block_matrices(self.config, index):
            scale = self.chosen[f"blocks.{index}.{matrix.name}"]
            dense = exact.matrix(matrix.name).dequantize()
            packed[matrix.name] = self._pack(dense, scale)
            steps[f"{matrix.name}_x_scale"] = np.array([scale.step], dtype=np.float32)
            if len(scale.hot):
                columns = np.ascontiguousarray(dense[:, scale.hot], dtype=np.float16)
                shadows[matrix.name] = Shadow(scale.hot, columns)
        names = (x.name for x in self.vectors(index))
        vectors = {name: exact.vectors[name] for name in names if name not in steps}
        return BlockWeights(packed, steps | vectors, shadows=shadows)

    def _load_matrix(self, name: str) -> PackedWeight:
        if name != "lm_head":
            return pack_without(self.inner.outer_matrix(name).dequantize(), NO_CHANNELS)
        return self._pack(self.inner.lm_head().dequantize(), self.chosen["lm_head"])

    @staticmethod
    def _pack(dense: Float32Array, scale: Scale) -> PackedWeight:
        return pack_without(dense, scale.hot)


def static_weights(
    exact: ModelWeights,
    sequences: Sequence[Sequence[int]],
    *,
    outliers: str = DEFAULT_OUTLIERS,
    excess: bool = True,
    text: str = "",
    progress: Progress | None = None,
) -> StaticWeights:
    """w8a8 weights of `exact` (f32) with static scales from calibration tokens.

    `sequences` are token ids, each of which fits the model's context; the float model is walked
    once. `excess`: see `choose_scales`. Raises `UserError` for shadows that the architecture cannot
    have.
    """
    choice = OutlierChoice.parse(outliers)
    if exact.weight_format != "f32":
        raise UserError("calibration makes w8a8 weights of f32 ones: open the model as f32")
    if choice.kept:
        check_shadows(exact)
    shadows = choice.kept > 0
    scales = collect_scales(
        exact, sequences, paper=choice.paper, shadows=shadows, excess=excess, progress=progress
    )
    kept = most_important(scales, choice.kept)
    chosen = choose(scales, kept)
    records = {name: _record(x, chosen[name], name not in kept) for name, x in scales.items()}
    calibration = Calibration(
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        tokens=sum(len(x) for x in sequences),
        outliers=outliers,
        excess=shadows and (choice.paper or excess),
        matmuls=records,
    )
    return StaticWeights(exact, chosen, calibration)


def check_shadows(weights: ModelWeights) -> None:
    """Raise `UserError` if nothing can be added next to a model's matmuls."""
    if weights.config.out_norms:
        raise UserError(
            f"{weights.config.architecture} norms what a matmul gives before it is added, so "
            "outliers cannot be added next to it; use --outliers none"
        )


def most_important(scales: Mapping[str, Scales], part: float) -> set[str]:
    """Return the names of this part of the matmuls, those with the farthest outliers.

    It is at least one. The output head is never among them: nothing runs next to it, and where it
    is tied its columns are the embeddings' too.
    """
    order = sorted(scales.keys() - {"lm_head"}, key=lambda name: (-scales[name].importance, name))
    return set(order[: max(round(part * len(scales)), 1) if part else 0])


def choose(scales: Mapping[str, Scales], kept: Collection[str]) -> dict[str, Scale]:
    """Return the shadowed form of `kept` matmuls, the pruned one of the others."""
    return {name: x.shadowed if name in kept else x.pruned for name, x in scales.items()}


def _record(scales: Scales, chosen: Scale, pruned: bool) -> MatMulCalibration:
    return MatMulCalibration(
        x_scale=chosen.step,
        percentile=chosen.percentile,
        importance=scales.importance,
        hot=len(chosen.hot),
        pruned=pruned,
        error=chosen.error,
    )


def collect_scales(
    exact: ModelWeights,
    sequences: Sequence[Sequence[int]],
    *,
    paper: bool = False,
    shadows: bool = True,
    excess: bool = True,
    progress: Progress | None = None,
) -> dict[str, Scales]:
    """Return the scales of every matmul by name, in the order of `matmul_shapes`."""
    scales_by_name: dict[str, Scales] = {}

    def visit(site: CalibrationPoint) -> Mapping[str, WeightValue]:
        prefix = "" if site.node.layer is None else f"blocks.{site.node.layer}."
        if not all(np.isfinite(x).all() for x in site.inputs):
            raise UserError(
                f"{prefix}{site.role}: its inputs on the calibration text are not finite, so the "
                "model's weights are damaged; download it again"
            )
        shadow = shadows and site.role != "lm_head"
        scales_by_name[prefix + site.role] = choose_scales(
            site.dense(), site.inputs, paper=paper, shadow=shadow, excess=excess
        )
        return site.values

    walk(exact, sequences, visit, progress=progress)
    return {name: scales_by_name[name] for name in matmul_shapes(exact.config)}
