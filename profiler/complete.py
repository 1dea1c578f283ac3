"""Kernels that a profile lacks, measured later on its devices and compared with its own.

A profile of before a kernel was timed predicts it from one that does similar work (`substitutes`).
Both are timed here, in one go, and times are scaled so that the known one takes what the profile
says: a machine is not equally fast on two days, and its predictions are to fit together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final, NamedTuple

from hetero.backends.host.clock import Clock, ManualClock, SystemClock
from hetero.backends.ops import Experts, Op
from hetero.backends.protocol import KINDS, Device, DeviceKind
from hetero.profiler.device_overheads import DeviceOverheads
from hetero.profiler.errors import ProfileError
from hetero.profiler.non_matmul_ops import fit_non_matmul, reference_ops
from hetero.profiler.options import Options
from hetero.profiler.predict import op_name, other_s
from hetero.profiler.records import (
    DECODE_TOKENS,
    DeviceProfile,
    DeviceRecord,
    NonMatmulPredictor,
    NonMatmulRow,
    Quarantine,
)
from hetero.profiler.substitutes import SUBSTITUTES
from hetero.profiler.workload import Workload

ROUNDS: Final = 3
# Kernels that resemble none, and whose times are scaled by what these take now.
ALONE: Final = {"Experts": ("Attention", "Attention+f16", "Attention+q8")}


class Lack(NamedTuple):
    """A kernel that a device has, and the profile does not; and which one scales its times."""

    device: DeviceKind
    op: str
    source: str


def lacking(profile: DeviceProfile, devices: Mapping[DeviceKind, Device]) -> list[Lack]:
    """Return the kernels that could be measured.

    Raises `ProfileError` where these are not its devices.
    """
    _check(profile, devices)
    measured = {(x.device, x.op) for x in profile.other_predictors}
    known = measured | {(x.device, x.op) for x in profile.quarantined}
    lacks: dict[Lack, None] = {}
    for kind, device in devices.items():
        formats = (x.weight_format for x in profile.predictors)
        first = next(formats, device.capabilities.weight_formats[0])
        for block in Options().blocks if kind in KINDS else ():
            for op in reference_ops(block, first):
                name = op_name(op)
                alike = SUBSTITUTES.get(name, ALONE.get(type(op).__name__, ()))
                source = next((x for x in alike if (kind, x) in measured), None)
                if (kind, name) not in known and source is not None and device.accepts(op):
                    lacks[Lack(kind, name, source)] = None
    return list(lacks)


def completed(
    profile: DeviceProfile,
    devices: Mapping[DeviceKind, Device],
    options: Options,
    *,
    clock: Clock | None = None,
    only: str = "",
) -> DeviceProfile:
    """Return the profile with what it was `lacking`: kernels whose names begin with `only`.

    The caller pins the thread. Raises `ProfileError`.
    """
    wanted = [lack for lack in lacking(profile, devices) if lack.op.startswith(only)]
    if not wanted:
        return profile
    names = {(x.device, name) for x in wanted for name in (x.op, x.source)}
    clock = clock or SystemClock()
    virtual = isinstance(clock, ManualClock)
    cold = 0 if virtual else options.cold_bytes
    workload = Workload(devices, clock=clock, cold=cold, seed=options.seed)
    around = DeviceOverheads(devices, workload, options, options.weight_formats[0], virtual)
    rounds = [
        around.timed_non_matmul(profile.devices, lambda kind, op: (kind, op_name(op)) in names)
        for _ in range(ROUNDS)
    ]
    timed = _medians([timed for timed, _ in rounds])
    quarantined = _wrong(profile, wanted, rounds[0][1])
    known = {(x.device, x.op): x for x in profile.other_predictors}
    new: list[tuple[NonMatmulRow, Op]] = []
    notes = [f"{x.op} of the {x.device} computes wrongly here: {x.detail}" for x in quarantined]
    for lack in wanted:
        own = [(row, op) for row, op in timed if (row.device, row.op) == lack[:2]]
        if not own:
            continue  # it is among the quarantined
        source = known[lack.device, lack.source]
        factors = {few: _factor(source, timed, few=few) for few in (True, False)}
        for row, op in own:
            seconds = row.seconds * factors[row.m <= DECODE_TOKENS]
            new.append((row.model_copy(update={"seconds": seconds}), op))
        day = datetime.now(UTC).date().isoformat()
        notes.append(
            f"{lack.op} of the {lack.device} was measured on {day}, times {factors[True]:.2f} for "
            f"few tokens and {factors[False]:.2f} for many, so that {lack.source} takes what it "
            "took"
        )
    rows = tuple(row for row, _ in new) if profile.others else ()
    return profile.model_copy(
        update={
            "other_predictors": (*profile.other_predictors, *fit_non_matmul(new)),
            "others": (*profile.others, *rows),
            "quarantined": (*profile.quarantined, *quarantined),
            "notes": (*profile.notes, *notes),
            "devices": _with_experts(profile, {row.device for row, op in new if _routed(op)}),
        }
    )


def _routed(op: Op) -> bool:
    return isinstance(op, Experts)


def _with_experts(
    profile: DeviceProfile, kinds: Collection[DeviceKind]
) -> dict[DeviceKind, DeviceRecord]:
    """Return the devices, of which some are now known to compute routed experts."""
    devices = dict(profile.devices)
    for kind in kinds:
        able = devices[kind].capabilities.model_copy(update={"experts": True})
        devices[kind] = devices[kind].model_copy(update={"capabilities": able})
    return devices


def _wrong(
    profile: DeviceProfile, wanted: Sequence[Lack], quarantined: Sequence[Quarantine]
) -> list[Quarantine]:
    """Return the wanted kernels that compute wrongly. Raises `ProfileError` if a known one does."""
    new = {lack[:2] for lack in wanted}
    known = next((x for x in quarantined if (x.device, x.op) not in new), None)
    if known is not None:
        raise ProfileError(
            f"profile {profile.name} has times of {known.op} of the {known.device}, which computes "
            f"wrongly here now ({known.detail}): take it again, without --add"
        )
    return list(quarantined)


def _check(profile: DeviceProfile, devices: Mapping[DeviceKind, Device]) -> None:
    for kind, record in profile.devices.items():
        if record.numbers != "measured":
            raise ProfileError(
                f"the {kind} of profile {profile.name} is {record.numbers}, not measured: nothing "
                "can be added to it here"
            )
    here = {kind: device.info.fingerprint for kind, device in devices.items()}
    its = {kind: record.fingerprint for kind, record in profile.devices.items()}
    if here != its:
        kind = next(x for x in sorted({*here, *its}) if here.get(x) != its.get(x))
        raise ProfileError(
            f"profile {profile.name} is of other devices ({kind}: {its.get(kind, 'none')}; here "
            f"{here.get(kind, 'none')}): take one of this machine, without --add"
        )


def _medians(rounds: Sequence[Sequence[tuple[NonMatmulRow, Op]]]) -> list[tuple[NonMatmulRow, Op]]:
    """Return each case's time.

    For calls of few microseconds one round may have nothing but noise.
    """
    cases: dict[tuple[Any, ...], list[tuple[NonMatmulRow, Op]]] = {}
    for row, op in (x for timed in rounds for x in timed):
        cases.setdefault((row.device, op, row.m, row.context), []).append((row, op))
    medians = []
    for same in cases.values():
        (row, op), seconds = same[0], median(other.seconds for other, _ in same)
        medians.append((row.model_copy(update={"seconds": seconds}), op))
    return medians


def _factor(
    source: NonMatmulPredictor, timed: list[tuple[NonMatmulRow, Op]], *, few: bool
) -> float:
    """Return the factor from times of now, of few tokens or of many, to the profile's."""
    ratios = [
        other_s(source, op, row.m, row.context) / row.seconds
        for row, op in timed
        if (row.device, row.op) == (source.device, source.op) and (row.m <= DECODE_TOKENS) == few
    ]
    return median(ratios) if ratios else 1.0
