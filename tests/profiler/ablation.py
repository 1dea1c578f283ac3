"""What each correction of the profiler is worth, by the rows that a profile has.

python -m tests.profiler.ablation
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import Op
from hetero.backends.protocol import DeviceKind
from hetero.profiler import active, fit
from hetero.profiler.cost import CostModel
from hetero.profiler.fit import DEFAULT, Fitting
from hetero.profiler.grid import Task
from hetero.profiler.non_matmul_ops import BLOCKS, fit_non_matmul, reference_ops, sizes_of
from hetero.profiler.predict import op_name, other_s
from hetero.profiler.records import DeviceProfile, MatMulRow, NonMatmulRow, Phase, phase_of, typical
from hetero.profiler.stats import relative_errors

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from common import finish, one_command, table
from parts.accuracy import GROUPS, predicted, quarter_of

Errors: TypeAlias = dict[tuple[DeviceKind, Phase], float]
Timed: TypeAlias = tuple[NonMatmulRow, Op]
Key: TypeAlias = tuple[str, str, str, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How predictors are made of rows. `drift` is the scaling of samples by the reference kernels,
    `means` that of a row's median to a mean; `trees` may be chosen.
    """

    fitting: Fitting = DEFAULT
    drift: bool = True
    means: bool = True
    trees: bool = False

    def rows(self, profile: DeviceProfile) -> list[MatMulRow]:
        """A profile's rows without the corrections that are switched off."""
        rows = list(profile.matmuls)
        if not self.drift:
            rows = [row.model_copy(update={"seconds": row.seconds * row.reference}) for row in rows]
        if not self.means:
            skews = typical(rows, lambda row: row.skew)
            rows = [
                row.model_copy(update={"seconds": row.seconds / skews.get(row.kind, 1.0)})
                for row in rows
            ]
        return rows

    def cost(self, profile: DeviceProfile, rows: Sequence[MatMulRow]) -> CostModel:
        """Predictors of these rows."""
        found = fit.fit_all(profile.devices, rows, validate=self.trees, fitting=self.fitting)
        return CostModel(profile.model_copy(update={"predictors": found, "matmuls": ()}))


ALL: Final = Variant()
MATMULS: Final[Mapping[str, Variant]] = {
    "row weights": Variant(fitting=Fitting(weigh_rows=False)),
    "borrowed spread": Variant(fitting=Fitting(borrow_spread=False)),
    "ridge": Variant(fitting=Fitting(ridge=0.0)),
    "level": Variant(fitting=Fitting(level_shrink=math.inf)),
    "shy terms": Variant(fitting=Fitting(shy=0.0)),
    "drift": Variant(drift=False),
    "means": Variant(means=False),
}
OTHERS: Final[Mapping[str, Fitting]] = {
    "few tokens apart": Fitting(few_separate=False),
    "own weight": Fitting(own_weight=1.0),
}


def known_rows(profile: DeviceProfile) -> dict[str, set[Key]]:
    """Keys of the rows that predict all others: those that a profile starts with; a quarter of
    them, chosen as the profiler would; those of one k, as of a model with few shapes.
    """
    tasks = [Task(r.device, r.weight_format, r.order, r.m, r.n, r.k) for r in profile.matmuls]
    k, _ = Counter(row.k for row in profile.matmuls).most_common(1)[0]
    return {
        "start": {task.key for task in active.first_tasks(tasks)},
        "quarter": {row.key for row in quarter_of(profile)},
        f"k={k}": {row.key for row in profile.matmuls if row.k == k},
    }


def errors(profile: DeviceProfile, variant: Variant, known: set[Key]) -> Errors:
    """Mean relative error by device and phase: of every (n, k) pair, each left out of a fit in
    turn, or where some keys are `known` of all other rows.
    """
    rows = variant.rows(profile)
    splits = [[row.key in known for row in rows]]
    if not known:
        pairs = sorted({(row.n, row.k) for row in rows})
        splits = [[(row.n, row.k) != pair for row in rows] for pair in pairs]
    judged: list[tuple[MatMulRow, float]] = []
    for kept in splits:
        cost = variant.cost(profile, [row for row, keep in zip(rows, kept, strict=True) if keep])
        out = [row for row, keep in zip(rows, kept, strict=True) if not keep]
        judged += zip(out, each_predicted(cost, out), strict=True)
    return by_group(judged)


def each_predicted(cost: CostModel, rows: Sequence[MatMulRow]) -> list[float]:
    """Seconds of rows of any kernels."""
    kernels = dict.fromkeys((row.device, row.weight_format) for row in rows)
    seconds: dict[Key, float] = {}
    for kernel in kernels:
        own = [row for row in rows if (row.device, row.weight_format) == kernel]
        keys = [row.key for row in own]
        seconds |= dict(zip(keys, predicted(cost, own, kernel[0]).tolist(), strict=True))
    return [seconds[row.key] for row in rows]


def by_group(judged: Sequence[tuple[MatMulRow | NonMatmulRow, float]]) -> Errors:
    """Mean relative error of rows and their predictions, by device and phase."""
    found: Errors = {}
    for group in GROUPS:
        own = [(s, row.seconds) for row, s in judged if (row.device, phase_of(row.m)) == group]
        found[group] = relative_errors(*zip(*own, strict=True))[0]
    return found


def moved(profile: DeviceProfile, variant: Variant) -> float:
    """By how much predictions of the measured shapes change, on average."""
    rows = list(profile.matmuls)
    (before, after) = (
        each_predicted(each.cost(profile, each.rows(profile)), rows) for each in (ALL, variant)
    )
    return relative_errors(after, before)[0]


def points(errors: Errors, base: Errors) -> list[str]:
    """Cells: percentage points by which an error is larger, of each group and their mean."""
    more = [100 * (errors[group] - base[group]) for group in GROUPS]
    return [f"{value:+.2f}" for value in (*more, statistics.mean(more))]


def shown(errors: Errors) -> list[str]:
    """Cells: errors of each group and their mean, in per cent."""
    values = [100 * errors[group] for group in GROUPS]
    return [f"{value:.2f}" for value in (*values, statistics.mean(values))]


def matmuls(names: Sequence[str], wanted: Sequence[str]) -> Iterable[list[object]]:
    """Rows of the table of matmuls: the error with all corrections, then without each."""
    for name in names:
        profile = DeviceProfile.load(name)
        splits: dict[str, set[Key]] = {"all": set()} | known_rows(profile)
        for part, known in splits.items():
            if wanted and part not in wanted:
                continue
            base = errors(profile, ALL, known)
            yield [name, part, "none", "-", *shown(base)]
            variants = dict(MATMULS)
            if part == "all":  # where there are enough rows for them
                variants["trees"] = replace(ALL, trees=True)
            for correction, variant in variants.items():
                found = errors(profile, variant, known)
                first, second = (base, found) if correction == "trees" else (found, base)
                shift = f"{100 * moved(profile, variant):.2f}"
                yield [name, part, correction, shift, *points(first, second)]


def timed_ops(profile: DeviceProfile) -> list[Timed]:
    """The rows of operators that are not matmuls, with their operators."""
    known = {
        (op_name(op), frozenset(sizes_of(op).items())): op
        for block in BLOCKS
        for op in reference_ops(block, WeightFormat.W4A16, outliers=True)
    }
    return [(row, known[row.op, frozenset(row.sizes.items())]) for row in profile.others]


def other_errors(rows: Sequence[Timed], fitting: Fitting, own: Sequence[Op]) -> Errors:
    """As `errors` of operators in `own`, each row left out of its own operator's fit in turn."""
    judged: list[tuple[NonMatmulRow, float]] = []
    for i, (row, op) in enumerate(rows):
        if op in own:
            alike = [x for j, x in enumerate(rows) if j != i and x[0].op == row.op]
            kept = [x for x in alike if x[0].device == row.device]
            (predictor,) = fit_non_matmul(kept, own, fitting)
            judged.append((row, other_s(predictor, op, row.m, row.context)))
    return by_group(judged)


def others(names: Sequence[str]) -> Iterable[list[object]]:
    """Rows of the table of other operators, as if the profile were for the smaller block's model
    (`own weight`) or for none.
    """
    for name in names:
        rows = timed_ops(DeviceProfile.load(name))
        small = reference_ops(BLOCKS[1], WeightFormat.W4A16)
        every = [op for _, op in rows]
        for correction, fitting in OTHERS.items():
            judged = small if correction == "own weight" else every
            base = other_errors(rows, Fitting(), judged)
            found = other_errors(rows, fitting, judged)
            yield [name, correction, "-", *shown(base)]
            yield [name, correction, "without", *points(found, base)]


def ablate(
    profile: Annotated[list[str] | None, typer.Option(help="profiles; the shipped PCs")] = None,
    rows: Annotated[list[str] | None, typer.Option(help="which rows predict; all ways")] = None,
) -> None:
    """Errors of predictions with each of the profiler's corrections switched off.

    Matmuls: every (n, k) pair is left out in turn; then some of the rows predict all others.
    Nothing is measured.
    """
    names = profile or ["host", "host-avx2"]
    groups = "|".join([*(f"{kind} {phase}" for kind, phase in GROUPS), "mean"])
    print("predicted against the rows of profiles; mean relative error in %, and by how many")
    print("points it is larger with one correction switched off\n")
    table(f"profile|rows|without|predictions move by %|{groups}", matmuls(names, rows or ()))
    print("\noperators that are not matmuls: error, and points more without a correction\n")
    table(f"profile|correction||{groups}", others(names))
    finish()


if __name__ == "__main__":
    one_command(ablate)()
