"""Decision trees that correct an NPU's roofline (paper section 4.3), shrunk towards it.

Trees learn log(time / roofline) of rows. A leaf's answer is the mean of its rows · pairs / (pairs +
shrink), for rows of few (n, k) pairs say little of others. Depth and `shrink` are each phase's own
(trees ask for it at their root): those that predict pairs best which roofline and trees have not
seen; an infinite `shrink` (the roofline alone) is among them. A leaf's spread is how far off such
predictions of its rows are.

Notation: S rows, F features, L folds (groups of pairs that are left out in turn).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.profiler.features import FEATURES, Floats
from hetero.profiler.records import Tree

if TYPE_CHECKING:
    from sklearn.tree import DecisionTreeRegressor

Ints: TypeAlias = npt.NDArray[np.intp]
Bools: TypeAlias = npt.NDArray[np.bool_]
DECODE: Final = FEATURES.index("decode")
# Standard deviation over mean absolute deviation of the normal distribution: rows that another
# program disturbed do not decide.
PER_MEAN_DEVIATION: Final = math.sqrt(math.pi / 2)


@dataclass(frozen=True, kw_only=True)
class ForestPolicy:
    """Policy of growing trees.

    count        trees, each on a bootstrap sample of the (n, k) pairs
    depths       candidates of a phase, of which leaving pairs out finds the best
    leaf_rows    rows of a leaf at least
    smallest     rows below which there are no trees
    shrinks      candidates besides infinity, which is the roofline alone; none: always that
    sure         standard errors by which trees must be better than the roofline alone
    prior_pairs  pairs that the spread of all rows counts as in a leaf's own
    """

    count: int = 8
    depths: tuple[int, ...] = (2, 3, 4)
    leaf_rows: int = 4
    smallest: int = 24
    shrinks: tuple[float, ...] = (24.0, 8.0, 3.0, 1.0, 0.0)
    sure: float = 1.5
    prior_pairs: float = 2.0


@dataclass(frozen=True)
class Residuals:
    """Rows with what the roofline is off by.

    `columns` [S, F] by `FEATURES`; `logs` [S] log(time / roofline); `logs_without` [L, S] the same
    of rooflines without the rows of each fold; `weight`, `pair` (number of (n, k)) and `fold` [S].
    """

    columns: Floats
    logs: Floats
    logs_without: Floats
    weight: Floats
    pair: Ints
    fold: Ints

    def without(self, fold: int) -> Residuals:
        """Return the other rows, with what the roofline without the fold is off by."""
        kept = self.fold != fold
        return Residuals(
            self.columns[kept],
            self.logs_without[fold, kept],
            self.logs_without[:, kept],
            self.weight[kept],
            self.pair[kept],
            self.fold[kept],
        )

    @property
    def unseen(self) -> Floats:
        """Return [S] log(time / roofline) by the roofline without the row's fold."""
        return self.logs_without[self.fold, np.arange(len(self.fold))]

    def gain(self, answers: Floats, at: Bools, sure: float) -> float:
        """Return by how much [S] answers to rows left out lower the relative error of some rows.

        The mean over the pairs, less so many of its standard errors: a gain of few pairs is chance.
        """
        before, after = (np.abs(np.expm1(x - self.unseen)) for x in (0.0, answers))
        _, pair, rows = np.unique(self.pair[at], return_inverse=True, return_counts=True)
        gains = np.bincount(pair, (before - after)[at]) / rows
        return (
            float(gains.mean() - sure * gains.std() / math.sqrt(len(gains))) if len(gains) else 0.0
        )


class _Grown(NamedTuple):
    """A tree with the mean of each node's rows, and how many pairs they are of."""

    tree: DecisionTreeRegressor
    mean: Floats
    pairs: Floats

    def values(self, shrink: float) -> Floats:
        """Return what each node answers."""
        return self.mean * self.pairs / (np.maximum(self.pairs, 1.0) + shrink)


def grow(rows: Residuals, policy: ForestPolicy, seed: int) -> tuple[tuple[Tree, ...], Floats]:
    """Return trees, and [S] what such trees answer for each row when its fold is left out."""
    alone = math.inf, policy.depths[0]
    candidates = itertools.product(policy.shrinks, policy.depths)
    answers = {x: np.zeros(len(rows.fold)) for x in (alone, *candidates)}
    for fold in np.unique(rows.fold):
        out = rows.fold == fold
        known = rows.without(fold)
        for depth in policy.depths:
            forest = _forest(known, policy, depth, seed)
            for shrink in policy.shrinks:
                answers[shrink, depth][out] = _answer(forest, rows.columns[out], shrink)
    decode, left_out = rows.columns[:, DECODE] > 0, np.zeros(len(rows.fold))
    of_phase: list[list[Tree]] = []
    for phase in (~decode, decode):
        gains = {x: rows.gain(answer, phase, policy.sure) for x, answer in answers.items()}
        best = max(gains, key=gains.__getitem__)
        left_out[phase] = answers[best][phase]
        off = np.abs(rows.unseen - answers[best])
        forest = _forest(rows, policy, best[1], seed)
        of_phase.append([_export(x, rows, off, phase, best[0], policy) for x in forest])
    return tuple(_joined(*both) for both in zip(*of_phase, strict=True)), left_out


def _forest(rows: Residuals, policy: ForestPolicy, depth: int, seed: int) -> list[_Grown]:
    from sklearn.tree import DecisionTreeRegressor

    numbers, pair = np.unique(rows.pair, return_inverse=True)
    rng = np.random.default_rng(seed)
    forest = []
    for i in range(policy.count):
        drawn = np.bincount(rng.integers(0, len(numbers), len(numbers)), minlength=len(numbers))
        used = drawn[pair] > 0
        weight = (drawn[pair] * rows.weight)[used]
        tree = DecisionTreeRegressor(
            max_depth=depth, min_samples_leaf=policy.leaf_rows, random_state=i
        )
        tree.fit(rows.columns[used], rows.logs[used], sample_weight=weight)
        mean = tree.tree_.value.reshape(-1)
        forest.append(_Grown(tree, mean, _pairs(tree.apply(rows.columns[used]), pair[used], mean)))
    return forest


def _pairs(leaves: Ints, pair: Ints, nodes: Floats) -> Floats:
    """Return the number of different pairs of each node's rows; of leaves alone."""
    counts = np.zeros(len(nodes))
    for leaf in np.unique(leaves):
        counts[leaf] = len(np.unique(pair[leaves == leaf]))
    return counts


def _answer(forest: Sequence[_Grown], columns: Floats, shrink: float) -> Floats:
    answers = [grown.values(shrink)[grown.tree.apply(columns)] for grown in forest]
    return np.asarray(np.mean(answers, axis=0))


def _export(
    grown: _Grown, rows: Residuals, off: Floats, phase: Bools, shrink: float, policy: ForestPolicy
) -> Tree:
    """Return a tree for one phase; rows [S] were `off` by so much when they were left out."""
    values, leaves = grown.values(shrink), grown.tree.apply(rows.columns)
    weight = rows.weight * phase
    prior = float(np.average(off, weights=weight)) if phase.any() else 0.0
    spread = np.full(len(values), prior)
    for leaf in np.unique(leaves[phase]):
        at = phase & (leaves == leaf)
        count = len(np.unique(rows.pair[at]))
        own = float(np.average(off[at], weights=rows.weight[at]))
        spread[leaf] = (count * own + policy.prior_pairs * prior) / (count + policy.prior_pairs)
    return export_tree(grown.tree.tree_, values, PER_MEAN_DEVIATION * spread)


def export_tree(tree: Any, values: Floats, spread: Floats | None = None) -> Tree:
    """Return the arrays of a scikit-learn tree; leaves get feature -1 and children 0."""
    feature = np.asarray(tree.feature)
    leaf = feature < 0
    return Tree(
        feature=tuple(np.where(leaf, -1, feature).tolist()),
        threshold=tuple(np.where(leaf, 0.0, tree.threshold).tolist()),
        left=tuple(np.where(leaf, 0, tree.children_left).tolist()),
        right=tuple(np.where(leaf, 0, tree.children_right).tolist()),
        value=tuple(values.tolist()),
        spread=() if spread is None else tuple(spread.tolist()),
    )


def _joined(prefill: Tree, decode: Tree) -> Tree:
    """Return one tree whose root asks for the phase."""
    first, second = 1, 1 + len(prefill.feature)

    def moved(tree: Tree, children: tuple[int, ...], by: int) -> tuple[int, ...]:
        return tuple(x + by if f >= 0 else 0 for x, f in zip(children, tree.feature, strict=True))

    return Tree(
        feature=(DECODE, *prefill.feature, *decode.feature),
        threshold=(0.5, *prefill.threshold, *decode.threshold),
        left=(first, *moved(prefill, prefill.left, first), *moved(decode, decode.left, second)),
        right=(second, *moved(prefill, prefill.right, first), *moved(decode, decode.right, second)),
        value=(0.0, *prefill.value, *decode.value),
        spread=(0.0, *prefill.spread, *decode.spread),
    )
