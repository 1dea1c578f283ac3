"""Fits the constants of `hetero.profiler.compiled.ChipModel` to published timings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.profiler.compiled import CallWork, ChipModel


def fit_model(
    works: Sequence[CallWork], seconds: Sequence[float], dram_bytes_per_s: float
) -> ChipModel:
    """Return the launch time and vector rate with the least squared relative error, by search.

    Two parameters and a maximum: a grid of both, refined twice, is exact enough and cannot fail.
    """
    best, launch_range, rate_range = None, (0.0, min(seconds)), (1e9, 1e12)
    for _ in range(3):
        launches = np.linspace(*launch_range, 41)
        rates = np.geomspace(*rate_range, 161)
        models = [
            ChipModel(float(launch), dram_bytes_per_s, float(rate))
            for launch in launches
            for rate in rates
        ]
        best = min(models, key=lambda model: _loss(model, works, seconds))
        step = (launch_range[1] - launch_range[0]) / 20
        launch_range = (max(best.launch_s - step, 0.0), best.launch_s + step)
        rate_range = (best.hvx_bytes_per_s / 1.1, best.hvx_bytes_per_s * 1.1)
    assert best is not None
    return best


def _loss(model: ChipModel, works: Sequence[CallWork], seconds: Sequence[float]) -> float:
    errors = [
        np.log(model.seconds(work) / wanted) ** 2
        for work, wanted in zip(works, seconds, strict=True)
    ]
    return float(sum(errors))


def leave_one_out(
    works: Sequence[CallWork], seconds: Sequence[float], dram_bytes_per_s: float
) -> list[float]:
    """Return signed relative error of each point under the model that is fitted to the others."""
    errors = []
    for i, wanted in enumerate(seconds):
        others = [j for j in range(len(seconds)) if j != i]
        model = fit_model(
            [works[j] for j in others], [seconds[j] for j in others], dram_bytes_per_s
        )
        errors.append(model.seconds(works[i]) / wanted - 1)
    return errors
