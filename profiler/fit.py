"""Fitting predictors to measured rows (paper section 4.3, "prediction mode").

Knots: at each measured m the time is a + b·n + c·k + d·n·k with non-negative coefficients (reading
inputs, writing outputs, streaming weights or multiplying), least squares of the relative error. A
ridge pulls each m towards one coarse fit over all m (times how far that m is above it), so that
an m with few rows is not left alone with its noise. The NPU's trees then learn what is left:
log(time / knots).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import OperandOrder
from hetero.backends.protocol import DeviceKind
from hetero.profiler import predict
from hetero.profiler.predict import FEATURES, Floats
from hetero.profiler.records import (
    DeviceRecord,
    Knots,
    MatMulPredictor,
    MatMulRow,
    Phase,
    Regimes,
    ShapeRange,
    Tree,
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

    Trees (the NPU's):

    tree_depths     candidates, of which leaving pairs out finds the best; (0,): no trees
    tree_count      trees, each on a bootstrap sample
    leaf_rows       rows of a leaf at least
    smallest_forest  rows below which trees only learn noise
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

    tree_depths: tuple[int, ...] = (0, 2, 3, 4)
    tree_count: int = 8
    leaf_rows: int = 4
    smallest_forest: int = 24
    folds: int = 6

    few_separate: bool = True
    own_weight: float = 8.0


DEFAULT: Final = Fitting()


@dataclass(frozen=True)
class RowTable:
    """Rows of one kernel as arrays [S]: sizes as computed (padded), time, weight of the row."""

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
        tokens, padded = predict.padded_tokens(device, m), predict.padded_rows(device, n)
        return cls(tokens, padded, k, seconds, _weights(rows, fitting))

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
    depths = fitting.tree_depths[:1]
    if rows[0].device == "npu" and len(rows) >= fitting.smallest_forest:
        depths = fitting.tree_depths
    errors = {d: left_out(device, rows, d, seed, fitting=fitting) for d in depths}
    depth = min(errors, key=lambda d: _mean_error(errors[d], rows))
    predictor = fit_unchecked(device, rows, depth=depth, seed=seed, fitting=fitting)
    validation = _validation(rows, errors[depth], fitting)
    return predictor.model_copy(update={"validation": validation})


def fit_unchecked(
    device: DeviceRecord,
    rows: Sequence[MatMulRow],
    *,
    depth: int = 0,
    seed: int = 0,
    fitting: Fitting = DEFAULT,
) -> MatMulPredictor:
    """Fit with trees of a given depth (0: none)."""
    table = RowTable.of(device, rows, fitting)
    knots = fit_knots(table, fitting)
    trees: tuple[Tree, ...] = ()
    if depth and len(rows) >= fitting.smallest_forest:
        base = predict.evaluate_knots(knots, table.m, table.n, table.k)
        trees = fit_trees(device, rows, np.log(table.seconds / base), depth, seed, fitting)
    first = rows[0]
    return MatMulPredictor(
        device=first.device,
        weight_format=first.weight_format,
        order=first.order,
        knots=knots,
        features=FEATURES if trees else (),
        trees=trees,
        measured=_range(table, rows),
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


def fit_trees(
    device: DeviceRecord,
    rows: Sequence[MatMulRow],
    target: Floats,
    depth: int,
    seed: int,
    fitting: Fitting = DEFAULT,
) -> tuple[Tree, ...]:
    """Return decision trees for [S] targets, each on a bootstrap sample of the (n, k) pairs."""
    from sklearn.tree import DecisionTreeRegressor

    columns = feature_table(device, rows)
    groups = _groups(rows)
    rng = np.random.default_rng(seed)
    trees = []
    for i in range(fitting.tree_count):
        chosen = rng.integers(0, groups.max() + 1, groups.max() + 1)
        weight = np.bincount(chosen, minlength=groups.max() + 1)[groups].astype(np.float64)
        used = weight > 0
        tree = DecisionTreeRegressor(
            max_depth=depth, min_samples_leaf=fitting.leaf_rows, random_state=i
        )
        tree.fit(columns[used], target[used], sample_weight=weight[used])
        trees.append(export_tree(tree.tree_))
    return tuple(trees)


def feature_table(device: DeviceRecord, rows: Sequence[MatMulRow]) -> Floats:
    """Return [S, F] features of rows."""
    m, n, k = (np.asarray([getattr(row, name) for row in rows], dtype=np.float64) for name in "mnk")
    return predict.features(device, rows[0].weight_format, m, n, k)


def export_tree(tree: object) -> Tree:
    """Return the arrays of a scikit-learn tree; leaves get feature -1 and children 0."""
    feature = np.asarray(tree.feature)  # type: ignore[attr-defined]
    leaf = feature < 0
    return Tree(
        feature=tuple(int(f) for f in np.where(leaf, -1, feature)),
        threshold=tuple(float(t) for t in np.where(leaf, 0.0, tree.threshold)),  # type: ignore[attr-defined]
        left=tuple(int(c) for c in np.where(leaf, 0, tree.children_left)),  # type: ignore[attr-defined]
        right=tuple(int(c) for c in np.where(leaf, 0, tree.children_right)),  # type: ignore[attr-defined]
        value=tuple(float(v) for v in np.asarray(tree.value).reshape(len(feature))),  # type: ignore[attr-defined]
    )


def _groups(rows: Sequence[MatMulRow]) -> npt.NDArray[np.intp]:
    """Return number of each row's (n, k) pair."""
    pairs = sorted({(row.n, row.k) for row in rows})
    return np.asarray([pairs.index((row.n, row.k)) for row in rows])


def left_out(
    device: DeviceRecord,
    rows: Sequence[MatMulRow],
    depth: int,
    seed: int,
    *,
    fitting: Fitting = DEFAULT,
) -> Floats:
    """Return [S] prediction of each row by a fit without the rows of its fold of pairs.

    NaN if impossible.

    Pairs go to folds at random; with few pairs each is a fold of its own.
    """
    groups = _groups(rows)
    count = int(groups.max()) + 1
    predicted = np.full(len(rows), np.nan)
    if count < 3:
        return predicted
    folds = min(fitting.folds, count)
    fold_of = np.random.default_rng(seed).permutation(count) % folds
    for fold in range(folds):
        left_out_rows = fold_of[groups] == fold
        used = [row for row, out in zip(rows, left_out_rows, strict=True) if not out]
        model = fit_unchecked(device, used, depth=depth, seed=seed, fitting=fitting)
        sizes = [
            np.asarray([getattr(row, name) for row in rows], dtype=np.float64)[left_out_rows]
            for name in "mnk"
        ]
        predicted[left_out_rows] = predict.predict(model, device, *sizes)
    return predicted


def _mean_error(predicted: Floats, rows: Sequence[MatMulRow]) -> float:
    if np.isnan(predicted).any():
        return math.inf
    return relative_errors(list(predicted), [row.seconds for row in rows])[0]


def _validation(
    rows: Sequence[MatMulRow], predicted: Floats, fitting: Fitting
) -> tuple[Validation, ...]:
    if np.isnan(predicted).any():
        return ()
    folds = min(fitting.folds, int(_groups(rows).max()) + 1)
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


def _range(table: RowTable, rows: Sequence[MatMulRow]) -> ShapeRange:
    def bounds(values: Iterable[float]) -> tuple[int, int]:
        listed = [int(value) for value in values]
        return min(listed), max(listed)

    return ShapeRange(
        m=bounds(table.m), n=bounds(row.n for row in rows), k=bounds(row.k for row in rows)
    )


def _regimes(knots: Knots, weight_format: WeightFormat) -> Regimes:
    """Return bandwidth from the first m, arithmetic from the last two, and their crossing."""
    per_weight = [row[3] for row in knots.coefficients]
    if len(per_weight) < 2 or not per_weight[0] or per_weight[-1] <= per_weight[-2]:
        return Regimes()
    nbytes = float(predict.weight_bytes(weight_format, 1, 1))
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
