"""Comparison and construction helpers that every test directory shares."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import platformdirs

Command: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]  # `hetero ARGUMENTS`


def own_cache(folder: Path, *, alone: bool = False) -> Path:
    """A user's cache in `folder` without anything but the OpenCL kernels that all tests share.

    `alone`: a copy of them, to which no other test adds any.
    """
    kernels = Path(platformdirs.user_cache_dir("hetero", appauthor=False)) / "opencl"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "hetero").mkdir()
    own = folder / "hetero" / "opencl"
    if alone:
        shutil.copytree(kernels, own, ignore=shutil.ignore_patterns("runs", "*.lock", ".writing-*"))
    else:
        own.symlink_to(kernels)
    return folder


def relative_difference(
    actual: npt.NDArray[Any], expected: npt.NDArray[Any], floor: float = 0.0
) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; the numerator alone if `expected` is zero.

    `floor` is the least root mean square that `expected` counts as.
    """
    difference = np.linalg.norm(actual.astype(np.float64) - expected.astype(np.float64))
    size = max(np.linalg.norm(expected.astype(np.float64)), floor * np.sqrt(expected.size))
    return float(difference / size) if size else float(difference)


def assert_close(
    actual: npt.NDArray[Any],
    expected: npt.NDArray[Any],
    tolerance: float,
    what: str = "result",
    *,
    floor: float = 0.0,
) -> None:
    """Fail unless the relative difference is at most `tolerance` (NaN and infinity always fail).

    `floor` as in `relative_difference`.

    The message has the shape, the dtypes, and the largest and mean difference.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    found = relative_difference(actual, expected, floor)
    if found <= tolerance:
        return
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    bad = int(np.size(actual) - np.isfinite(actual).sum())
    raise AssertionError(
        f"{what}: relative difference {found:.3g} > {tolerance:.3g}; shape {actual.shape}, "
        f"dtype {actual.dtype} against {expected.dtype}, largest difference "
        f"{difference.max():.3g}, mean {difference.mean():.3g}, {bad} values not finite"
    )
