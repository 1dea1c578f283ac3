"""Checks of a contributed profile: `hetero profile --check`.

Its schema is checked by reading it. Then: whether it predicts (`quality.grade`), whether every
device and every measured row is as fast as a processor may be, by the chips that are known from
published rates, and whether the machine kept its speed while it was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from hetero.backends.protocol import KINDS, DeviceKind
from hetero.measuring.device_checks import Finding
from hetero.profiler import profile_files, stats
from hetero.profiler.cost import CostModel
from hetero.profiler.errors import ProfileError
from hetero.profiler.quality import grade
from hetero.profiler.records import DeviceProfile, MatMulPredictor

SLOWER: Final = 1 / 50  # of the slowest known processor: one core of a PC
FASTER: Final = 4.0  # times the fastest one
MAX_DRIFT: Final = 0.2  # of a reference kernel, relative
MAX_FLAGGED: Final = 0.75  # share of rows that were disturbed, drifted or did not converge
SIZE: Final = 4096  # rows and features of the matmul by which devices are compared
PREFILL_TOKENS: Final = 512
AGAIN: Final = "take it again with `hetero profile`, on a machine that does nothing else"


class Speed(NamedTuple):
    """The speed of a matmul: arithmetic of many tokens, bytes of weights of one."""

    flops_per_s: float
    bytes_per_s: float


def check_profile(path: str | Path) -> list[Finding]:
    """Return the findings of a profile file, or of the profile in a doctor's report.

    Raises `ProfileError` for a file that is no profile.
    """
    profile = load_contributed(path)
    counted = f"{len(profile.matmuls)} rows, {len(profile.predictors)} predictors"
    schema = Finding(profile.name, "file", True, f"{profile.numbers} numbers: {counted}")
    return [schema, *_quality(profile), *_plausible(profile), *_rows(profile), *_drift(profile)]


def load_contributed(path: str | Path) -> DeviceProfile:
    """Return the profile in a file: its own, or that of `hetero doctor --report`."""
    text = profile_files.read_profile(path)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict) and "checks" in document:
        if not document.get("profile"):
            raise ProfileError(
                f"{path} is a report without a profile: run `hetero profile` before "
                "`hetero doctor --report`"
            )
        text = json.dumps(document["profile"])
    return DeviceProfile.parse(text, path)


def _quality(profile: DeviceProfile) -> Iterator[Finding]:
    graded = grade(profile)
    for problem in graded.problems:
        yield Finding("predictions", "file", False, problem, AGAIN)
    if graded.good:
        said = [x for x in graded.sentences if x.startswith("Predicts")]
        yield Finding("predictions", "file", True, said[0] if said else "all devices are known")


def _plausible(profile: DeviceProfile) -> Iterator[Finding]:
    """Yield whether each device's speed is that of a processor."""
    cost = CostModel(profile)
    slowest, fastest = _bounds()
    for kind in KINDS:
        predictor = next((p for p in profile.predictors if p.device == kind), None)
        if predictor is None:
            continue
        try:
            speed = _speed(cost, predictor)
        except ProfileError as error:
            yield Finding("speed", kind, False, str(error), AGAIN)
            continue
        shown = f"{speed.flops_per_s / 1e9:.3g} GFLOP/s, {speed.bytes_per_s / 1e9:.3g} GB/s"
        within = all(low <= x <= high for low, x, high in zip(slowest, speed, fastest, strict=True))
        allowed = (
            f"{slowest.flops_per_s / 1e9:.3g} to {fastest.flops_per_s / 1e9:.3g} GFLOP/s and "
            f"{slowest.bytes_per_s / 1e9:.3g} to {fastest.bytes_per_s / 1e9:.3g} GB/s"
        )
        detail = shown if within else f"{shown}: known chips have {allowed}"
        yield Finding("speed", kind, within, detail, "" if within else AGAIN)


def _speed(cost: CostModel, predictor: MatMulPredictor) -> Speed:
    """Return what a large matmul of a device reaches by its predictor."""
    kernel = predictor.device, predictor.weight_format
    many, one = (
        float(cost.matmul_s(*kernel, m, SIZE, SIZE, order=predictor.order).seconds)
        for m in (PREFILL_TOKENS, 1)
    )
    stored = predictor.weight_format.storage.bytes_per_weight
    return Speed(2 * PREFILL_TOKENS * SIZE**2 / many, stored * SIZE**2 / one)


@cache
def _bounds() -> tuple[Speed, Speed]:
    """Return the slowest and the fastest that a device may be, by the shipped chips' units."""
    units = [
        unit for name in profile_files.shipped_names() for unit in DeviceProfile.load(name).units
    ]
    flops = [x.flops_per_s for x in units]
    memory = [x.bandwidth_bytes_per_s for x in units]
    slowest = Speed(SLOWER * min(flops), SLOWER * min(memory))
    return slowest, Speed(FASTER * max(flops), FASTER * max(memory))


def _rows(profile: DeviceProfile) -> Iterator[Finding]:
    """Yield whether measured rows are possible, and how many were disturbed."""
    if not profile.matmuls:
        return
    _, fastest = _bounds()
    absurd = [
        row
        for row in profile.matmuls
        if 2 * row.m * row.n * row.k / row.seconds > fastest.flops_per_s
    ]
    if absurd:
        row = max(absurd, key=lambda x: x.m * x.n * x.k / x.seconds)
        detail = (
            f"{len(absurd)} rows are faster than any chip, such as {row.m}×{row.n}×{row.k} on the "
            f"{row.device} in {row.seconds:.3g} s"
        )
        yield Finding("rows", row.device, False, detail, AGAIN)
    flagged = sum(bool(row.flags) for row in profile.matmuls) / len(profile.matmuls)
    detail = f"{flagged:.0%} of {len(profile.matmuls)} were disturbed, drifted or not certain"
    good = flagged <= MAX_FLAGGED
    yield Finding("disturbed rows", "file", good, detail, "" if good else AGAIN)


def _drift(profile: DeviceProfile) -> Iterator[Finding]:
    """Yield how far each reference kernel moved while the profile was taken."""
    for kind, phase in _series(profile):
        points = [
            (x.at_s, x.seconds) for x in profile.references if (x.device, x.phase) == (kind, phase)
        ]
        drift = stats.drift(*zip(*points, strict=True))
        detail = f"{phase} kernels moved by {drift:.1%} over {len(points)} timings"
        good = drift <= MAX_DRIFT
        yield Finding("drift", kind, good, detail, "" if good else AGAIN)


def _series(profile: DeviceProfile) -> Iterable[tuple[DeviceKind, str]]:
    return dict.fromkeys((x.device, x.phase) for x in profile.references)
