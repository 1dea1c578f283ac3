"""Fitting predictors to measured rows (paper section 4.3, "prediction mode").

Knots: at each measured m the time is a + b·n + c·k + d·n·k with non-negative coefficients (reading
inputs, writing outputs, streaming weights or multiplying), least squares of the relative error. A
ridge pulls each m towards one coarse fit over all m (times how far that m is above it), so that
an m with few rows is not left alone with its noise. Where a call runs several launches, knots are
of one. The NPU's trees then learn what is left (`hetero.profiler.forest`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import OperandOrder
from hetero.backends.protocol import DeviceKind
from hetero.profiler import predict
from hetero.profiler.features import (
    FEATURES,
    Floats,
    columns,
    launches,
    padded_rows,
    padded_tokens,
    weight_bytes,
)
from hetero.profiler.forest import ForestPolicy, Ints, Residuals, grow
from hetero.profiler.records import (
    DeviceRecord,
    Knots,
    MatMulPredictor,
    MatMulRow,
    Phase,
    Regimes,
    ShapeRange,
    Validation,
)
from hetero.profiler.stats import FEW, Z95, relative_errors

Kernel: TypeAlias = tuple[DeviceKind, WeightFormat, OperandOrder]

COARSE_BREAKS: Final = (1, 8, 64)


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Policy of fitting predictors to rows.

    Each correction of plain least squares can be taken out; `python -m tests.profiler.ablation`
    says what it is worth (docs: cost-corrections.md).

    Rows (`RowTable.of`):

    weigh_rows      a row that is less certain weighs less (else: all weigh alike)
    surest          relative error that the surest row is credited with
    borrow_spread   no row is surer than its number of samples makes others of its kernel (else: its
                    own interval counts, or `unknown_spread` for one sample)
    unknown_spread  relative spread of samples where no row has enough of them
    means           rows are means of their samples, by what is typical of their kind (else medians)

    Coefficients at one m (`fit_knots`):

    ridge           of the pull towards the coarse fit over all m; 0: none
    level_shrink    rows that keep an m's level at that of the coarse fit; infinity: there it is
    shy             pull of terms other than n·k towards 0 in the coarse fit; 0: none

    Trees (the NPU's), and what is left out to choose and to validate:

    trees           how they are grown
    folds           groups of pairs that are left out in turn

    Operations that are not matmuls (`non_matmul_ops.fit_non_matmul`):

    few_separate    those of few tokens have coefficients of their own
    own_weight      of rows of the one model that is measured for; 1: as any other
    """

    weigh_rows: bool = True
    surest: float = 0.02
    borrow_spread: bool = True
    unknown_spread: float = 0.1
    means: bool = True

    ridge: float = 0.05
    level_shrink: float = 0.5
    shy: float = 1e-3

    trees: ForestPolicy = field(default_factory=ForestPolicy)
    folds: int = 6

    few_separate: bool = True
    own_weight: float = 8.0


DEFAULT: Final = Fitting()


@dataclass(frozen=True)
class RowTable:
    """Rows of one kernel as arrays [S]: sizes as computed (padded), time, weight of the row.

    Tokens and time are those of one launch.
    """

    m: Floats
    n: Floats
    k: Floats
    seconds: Floats
    weight: Floats

    @classmethod
    def of(
        cls, device: DeviceRecord, rows: Sequence[MatMulRow], fitting: Fitting = DEFAULT
    ) -> RowTable:
        """Return padded sizes; rows that are less certain weigh less."""
        m, n, k, seconds = (
            np.asarray([getattr(row, name) for row in rows], dtype=np.float64)
            for name in ("m", "n", "k", "seconds")
        )
        tokens, padded = padded_tokens(device, m), padded_rows(device, n)
        count = launches(device, rows[0].weight_format, tokens, k)
        return cls(tokens / count, padded, k, seconds / count, _weights(rows, fitting))

    @property
    def terms(self) -> Floats:
        """Return [S, 4] columns 1, n, k, n·k."""
        return np.stack((np.ones_like(self.n), self.n, self.k, self.n * self.k), axis=1)


def _weights(rows: Sequence[MatMulRow], fitting: Fitting) -> Floats:
    """Return [S] weight of each row: about 1 where it is known to 3 %."""
    if not fitting.weigh_rows:
        return np.ones(len(rows))
    spreads = [row.spread for row in rows if row.samples >= FEW]
    spread = float(np.median(spreads)) if spreads else fitting.unknown_spread
    noise = fitting.surest + np.asarray([_uncertainty(row, spread, fitting) for row in rows])
    return np.asarray(0.05 / noise)


def _uncertainty(row: MatMulRow, spread: float, fitting: Fitting) -> float:
    """Return the relative half-width of a row's 95 % interval.

    One sample has none, and that of two or three is small by chance: no row is surer than its
    number of samples makes others of this spread.
    """
    if not fitting.borrow_spread:
        return fitting.unknown_spread if row.ci is None else row.ci
    return max(row.ci or 0.0, Z95 * spread / math.sqrt(row.samples))


def fit_all(
    devices: dict[DeviceKind, DeviceRecord],
    rows: Iterable[MatMulRow],
    *,
    validate: bool = True,
    fitting: Fitting = DEFAULT,
) -> tuple[MatMulPredictor, ...]:
    """Return one predictor for every kernel that has rows.

    Quick, without trees, unless `validate`.
    """
    kernels: dict[Kernel, list[MatMulRow]] = {}
    for row in rows:
        kernels.setdefault((row.device, row.weight_format, row.order), []).append(row)
    make = fit if validate else fit_unchecked
    return tuple(
        make(devices[kernel[0]], own, fitting=fitting) for kernel, own in sorted(kernels.items())
    )


def fit(
    device: DeviceRecord, rows: Sequence[MatMulRow], seed: int = 0, *, fitting: Fitting = DEFAULT
) -> MatMulPredictor:
    """Fit one kernel's rows (one device, format and order) and validate by leaving out pairs."""
    predictor = fit_unchecked(device, rows, fitting=fitting)
    pairs = _pairs(rows)
    folds = _folds(pairs, seed, fitting)
    if folds is None:
        return predictor
    without = _predicted_without(device, rows, folds, fitting)
    predicted = without[folds, np.arange(len(rows))]
    if rows[0].device == "npu" and len(rows) >= fitting.trees.smallest:
        sizes, seconds = sizes_of(rows), np.asarray([row.seconds for row in rows])
        whole = predict.predict(predictor, device, *sizes)
        residuals = Residuals(
            columns(device, predictor.weight_format, predictor.order, sizes, whole),
            np.log(seconds / whole),
            np.log(seconds / without),
            _weights(rows, fitting),
            pairs,
            folds,
        )
        trees, answers = grow(residuals, fitting.trees, seed)
        predictor = predictor.model_copy(update={"trees": trees, "features": FEATURES})
        predicted = predicted * np.exp(answers)
    validation = _validation(rows, predicted, int(folds.max()) + 1)
    return predictor.model_copy(update={"validation": validation})


def fit_unchecked(
    device: DeviceRecord, rows: Sequence[MatMulRow], *, fitting: Fitting = DEFAULT
) -> MatMulPredictor:
    """Fit without trees."""
    table = RowTable.of(device, rows, fitting)
    knots = fit_knots(table, fitting)
    first = rows[0]
    return MatMulPredictor(
        device=first.device,
        weight_format=first.weight_format,
        order=first.order,
        knots=knots,
        measured=_range(device, rows),
        regimes=_regimes(knots, first.weight_format),
    )


def fit_knots(table: RowTable, fitting: Fitting = DEFAULT) -> Knots:
    """See the module's docstring."""
    tokens = np.unique(table.m)
    coarse = _coarse(table, tokens, fitting.shy)
    coefficients = []
    for i, m in enumerate(tokens):
        at = table.m == m
        prior = coarse[i] * _level(table, at, coarse[i], fitting.level_shrink)
        coefficients.append(_ridge_nnls(table, at, prior, fitting.ridge))
    return Knots(
        tokens=tuple(int(m) for m in tokens),
        coefficients=tuple(tuple(float(c) for c in row) for row in coefficients),  # type: ignore[misc]
    )


def _level(table: RowTable, at: npt.NDArray[np.bool_], prior: Floats, shrink: float) -> float:
    """Return how far the rows of one m are above the prior, as one factor.

    Kernels work in tiles of tokens (six cost what eight do), which no fit that is smooth in m sees;
    one row or two show it: those of large shapes, whose time is n·k's. Shrunk towards 1.
    """
    expected = np.maximum(table.terms[at] @ prior, predict.TINY_S)
    logs = np.log(table.seconds[at] / expected)
    weight = table.weight[at] * np.square(table.terms[at][:, 3] * prior[3] / expected)
    return float(np.exp(np.sum(weight * logs) / (np.sum(weight) + shrink)))


def _coarse(table: RowTable, tokens: Floats, shy: float) -> Floats:
    """Return [T, 4] coefficients at each m of one fit in which they are piecewise linear in m."""
    low, high = float(tokens[0]), float(tokens[-1])
    breaks = np.unique([low, *(b for b in COARSE_BREAKS if low < b < high), high])
    columns = (_hats(breaks, table.m)[:, :, None] * table.terms[:, None, :]).reshape(
        len(table.m), -1
    )
    scaled = columns * (table.weight / table.seconds)[:, None]
    typical = np.abs(columns / table.seconds[:, None]).mean(axis=0)
    # Where sizes cannot separate the terms, time goes to n·k.
    pull = math.sqrt(shy * len(table.m)) * np.diag(typical * (np.arange(len(typical)) % 4 != 3))
    left = np.concatenate((scaled, pull))
    size = np.linalg.norm(left, axis=0)
    size[size == 0] = 1.0
    right = np.concatenate((table.weight, np.zeros(len(pull))))
    coefficients = _nnls(left / size, right) / size
    return np.asarray(_hats(breaks, tokens) @ coefficients.reshape(len(breaks), -1))


def _hats(breaks: Floats, m: Floats) -> Floats:
    """Return [S, B] weights of the breaks in linear interpolation at m."""
    identity = np.eye(len(breaks))
    return np.stack([np.interp(m, breaks, column) for column in identity], axis=1)


def _ridge_nnls(
    table: RowTable, at: npt.NDArray[np.bool_], prior: Floats, strength: float
) -> Floats:
    """Return coefficients at one m; the ridge works in units of relative time."""
    relative = table.terms[at] / table.seconds[at][:, None] * table.weight[at][:, None]
    typical = np.abs(table.terms[at] / table.seconds[at][:, None]).mean(axis=0)
    ridge = math.sqrt(strength) * np.diag(typical)
    left = np.concatenate((relative, ridge))
    right = np.concatenate((table.weight[at], ridge @ prior))
    size = np.linalg.norm(left, axis=0)
    size[size == 0] = 1.0
    return np.asarray(_nnls(left / size, right) / size)


def sizes_of(rows: Sequence[MatMulRow]) -> tuple[Floats, Floats, Floats]:
    """Return m, n, k of rows, [S] each."""
    m, n, k = (np.asarray([getattr(row, x) for row in rows], dtype=np.float64) for x in "mnk")
    return m, n, k


def _pairs(rows: Sequence[MatMulRow]) -> Ints:
    """Return number of each row's (n, k) pair."""
    pairs = sorted({(row.n, row.k) for row in rows})
    return np.asarray([pairs.index((row.n, row.k)) for row in rows])


def _folds(pairs: Ints, seed: int, fitting: Fitting) -> Ints | None:
    """Return the group in which each row is left out; None with too few pairs.

    Pairs go to folds at random; with few pairs each is a fold of its own.
    """
    count = int(pairs.max()) + 1
    if count < 3:
        return None
    fold_of = np.random.default_rng(seed).permutation(count) % min(fitting.folds, count)
    return np.asarray(fold_of[pairs])


def _predicted_without(
    device: DeviceRecord, rows: Sequence[MatMulRow], folds: Ints, fitting: Fitting
) -> Floats:
    """Return [L, S] predictions of all rows by the rooflines without the rows of each fold."""
    sizes = sizes_of(rows)
    predicted = []
    for fold in range(int(folds.max()) + 1):
        kept = [row for row, other in zip(rows, folds, strict=True) if other != fold]
        model = fit_unchecked(device, kept, fitting=fitting)
        predicted.append(predict.predict(model, device, *sizes))
    return np.stack(predicted)


def _validation(rows: Sequence[MatMulRow], predicted: Floats, folds: int) -> tuple[Validation, ...]:
    validations = []
    phases: tuple[Phase, ...] = ("decode", "prefill")
    for phase in phases:
        at = [i for i, row in enumerate(rows) if row.phase == phase]
        if at:
            mape, p95 = relative_errors([predicted[i] for i in at], [rows[i].seconds for i in at])
            validations.append(
                Validation(phase=phase, mape=mape, p95=p95, folds=folds, rows=len(at))
            )
    return tuple(validations)


def _range(device: DeviceRecord, rows: Sequence[MatMulRow]) -> ShapeRange:
    def bounds(values: Floats) -> tuple[int, int]:
        return int(values.min()), int(values.max())

    m, n, k = sizes_of(rows)
    return ShapeRange(m=bounds(padded_tokens(device, m)), n=bounds(n), k=bounds(k))


def _regimes(knots: Knots, weight_format: WeightFormat) -> Regimes:
    """Return bandwidth from the first m, arithmetic from the last two, and their crossing."""
    per_weight = [row[3] for row in knots.coefficients]
    if len(per_weight) < 2 or not per_weight[0] or per_weight[-1] <= per_weight[-2]:
        return Regimes()
    nbytes = float(weight_bytes(weight_format, 1, 1))
    slope = (per_weight[-1] - per_weight[-2]) / (knots.tokens[-1] - knots.tokens[-2])
    start = per_weight[-1] - slope * knots.tokens[-1]
    knee = (per_weight[0] - start) / slope
    return Regimes(
        bytes_per_s=nbytes / per_weight[0],
        flops_per_s=2.0 / slope,
        knee_m=knee if knee > 0 else None,
    )


def _nnls(columns: Floats, target: Floats) -> Floats:
    from scipy.optimize import nnls

    return np.asarray(nnls(columns, target)[0])


def fit_nonnegative(columns: Floats, seconds: Floats, weight: Floats | None = None) -> Floats:
    """Return non-negative coefficients that minimise the relative error.

    The error is that of columns · coefficients, each row's times its `weight` (1).
    """
    weight = np.ones(len(seconds)) if weight is None else weight
    scaled = columns * (weight / seconds)[:, None]
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1.0
    return np.asarray(_nnls(scaled / size, weight) / size)
