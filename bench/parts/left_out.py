"""The NPU's predictor on (n, k) pairs of recorded profiles that it was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer
from common import finish, table

from hetero.profiler import fit
from hetero.profiler.cost import CostModel
from hetero.profiler.fit import Fitting
from hetero.profiler.forest import ForestPolicy
from hetero.profiler.predict import Floats
from hetero.profiler.records import DECODE_TOKENS, DeviceProfile, MatMulRow
from parts.accuracy import predicted

SEEDS = (100, 101, 102)
FOLDS = 6
FITTINGS = (Fitting(trees=ForestPolicy(shrinks=())), Fitting())


def errors(profile: DeviceProfile, rows: Sequence[MatMulRow], fitting: Fitting) -> Floats:
    """Mean relative error of each row over the seeds: `CostModel`'s by the rows of other pairs.

    Depth and shrinking of the trees are chosen without the row as well.
    """
    pairs = sorted({(row.n, row.k) for row in rows})
    device, total = profile.devices["npu"], np.zeros(len(rows))
    for seed in SEEDS:
        fold_of = np.random.default_rng(seed).permutation(len(pairs)) % min(FOLDS, len(pairs))
        fold = np.asarray([fold_of[pairs.index((row.n, row.k))] for row in rows])
        for i in range(int(fold.max()) + 1):
            kept = [row for row, x in zip(rows, fold, strict=True) if x != i]
            out = [row for row, x in zip(rows, fold, strict=True) if x == i]
            known = {
                "matmuls": tuple(kept),
                "predictors": (fit.fit(device, kept, fitting=fitting),),
            }
            seconds = predicted(CostModel(profile.model_copy(update=known)), out, "npu")
            total[fold == i] += np.abs(seconds / [row.seconds for row in out] - 1)
    return total / len(SEEDS)


def left_out(
    profiles: Annotated[list[str] | None, typer.Argument(help="files or shipped names")] = None,
) -> None:
    """Errors of the NPU's predictor on pairs that were left out, with trees and without."""
    cells = []
    for name in profiles or ("host", "host-avx2", "host-amx"):
        profile = DeviceProfile.load(name)
        kernels = dict.fromkeys(r.key[:3] for r in profile.matmuls if r.device == "npu")
        for kernel in kernels:
            rows = [row for row in profile.matmuls if row.key[:3] == kernel]
            decode = np.asarray([row.m <= DECODE_TOKENS for row in rows])
            alone, grown = (errors(profile, rows, fitting) for fitting in FITTINGS)
            for phase, at in (("decode", decode), ("prefill", ~decode)):
                both = [f"{100 * each[at].mean():.2f} %" for each in (alone, grown)]
                cells.append([profile.name, kernel[1], kernel[2], phase, int(at.sum()), *both])
    print("predicted and recorded; mean relative error of pairs left out, 3 seeds\n")
    table("profile|weights|order|phase|rows|roofline alone|with trees", cells)
    finish()
