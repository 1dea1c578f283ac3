"""The quality of a profile: the faster device by phase, errors, and whether it is usable.

A profile is bad where predictions of one of its devices cannot be relied on: nothing was measured
or left out to check them by, or they are off by more than `MAX_ERROR` on the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from hetero.backends.formats import WeightFormat
from hetero.backends.protocol import KINDS
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.records import DeviceProfile, Phase

MAX_ERROR: Final = 0.3
PREFILL_TOKENS: Final = 256


class QualityGrade(NamedTuple):
    """Sentences, each with its subject before a colon, and problems, empty if there are none."""

    sentences: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Return whether plans can be made from the profile."""
        return not self.problems


def grade(profile: DeviceProfile) -> QualityGrade:
    """Return the grade of a profile."""
    problems = tuple(_problems(profile))
    said = list(_speeds(profile))
    if checked := _errors(profile):
        listed = ", ".join(f"{what} {error:.0%}" for what, error in checked.items())
        said.append(f"Predicts: matmuls that it had not seen with a mean error of {listed}")
    elif _simulated(profile):
        said.append("Predicts: a chip that is not here; nothing was measured to check it by")
    coverage = profile.coverage
    if coverage.measured_tasks < coverage.grid_tasks:
        small = profile.numbers == "compiler-predicted"
        said.append(
            f"{profile.numbers.capitalize()}: {coverage.measured_tasks} of {coverage.grid_tasks} "
            f"matmuls, the {'small' if small else 'ones that teach most'} first; "
            f"the others are predicted from them{_left(profile)}"
        )
    return QualityGrade((*said, *(f"Bad: {problem}" for problem in problems)), problems)


def _left(profile: DeviceProfile) -> str:
    """Return which token counts have fewer rows than others."""
    counts: dict[int, int] = {}
    for row in profile.matmuls:
        counts[row.m] = counts.get(row.m, 0) + 1
    few = sorted(m for m, n in counts.items() if n <= max(counts.values()) // 2)
    return f" (fewest at {', '.join(map(str, few[:6]))} tokens)" if few else ""


def _speeds(profile: DeviceProfile) -> Iterator[str]:
    """Yield the faster device in each phase, at the largest weight that both were measured at."""
    if not set(KINDS) <= set(profile.devices):
        return
    faster: dict[str, str] = {}
    phases: tuple[tuple[Phase, int], ...] = (("prefill", PREFILL_TOKENS), ("decode", 1))
    for phase, m in phases:
        if (speeds := _seconds(profile, m)) is not None:
            gpu_s, npu_s = speeds
            fast, ratio = ("NPU", gpu_s / npu_s) if npu_s < gpu_s else ("GPU", npu_s / gpu_s)
            slow = "GPU" if fast == "NPU" else "NPU"
            faster[phase] = f"{fast} {ratio:.1f} × the {slow} in {phase}"
    if faster:
        yield f"Faster: {', '.join(faster.values())}"


def _seconds(profile: DeviceProfile, m: int) -> tuple[float, float] | None:
    """Return seconds on GPU and NPU of m tokens by the largest weight that both know.

    Both are in one format.
    """
    model = CostModel(profile)
    formats: dict[WeightFormat, set[str]] = {}
    for row in profile.predictors:
        formats.setdefault(row.weight_format, set()).add(row.device)
    both = [name for name, devices in formats.items() if set(KINDS) <= devices]
    pairs = [{(r.n, r.k) for r in profile.matmuls if r.device == kind} for kind in ("gpu", "npu")]
    n, k = max(pairs[0] & pairs[1] or {(4096, 4096)}, key=lambda pair: pair[0] * pair[1])
    if not both:
        return None
    try:
        times = [float(model.matmul_s(kind, both[0], m, n, k).seconds) for kind in ("gpu", "npu")]
    except ProfileError:
        return None
    return (times[0], times[1]) if min(times) > 0 else None


def _errors(profile: DeviceProfile) -> dict[str, float]:
    """Return mean errors by device and phase, the worst of its formats."""
    errors: dict[str, float] = {}
    for predictor in profile.predictors:
        for entry in predictor.validation:
            what = f"{predictor.device.upper()} {entry.phase}"
            errors[what] = max(errors.get(what, 0.0), entry.mape)
    return errors


def _problems(profile: DeviceProfile) -> Iterator[str]:
    measured = {predictor.device for predictor in profile.predictors}
    for kind in profile.devices:
        if kind not in measured:
            yield f"nothing of the {kind.upper()} was measured"
    if _simulated(profile):
        return
    errors = _errors(profile)
    for kind in sorted(measured):
        for phase in ("prefill", "decode"):
            what = f"{kind.upper()} {phase}"
            if what not in errors:
                yield f"too little of {what} was measured to check its predictions"
            elif errors[what] > MAX_ERROR:
                yield f"{what} is predicted with a mean error of {errors[what]:.0%}"


def _simulated(profile: DeviceProfile) -> bool:
    return any(record.numbers != "measured" for record in profile.devices.values())
