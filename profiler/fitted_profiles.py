"""Profiles of chips that are known by rates of whole models only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from hetero.backends.formats import WeightFormat
from hetero.backends.opencl import gpu_capabilities
from hetero.backends.protocol import KINDS, Capabilities, DeviceKind
from hetero.backends.qnn import npu_capabilities
from hetero.backends.snapdragon import Chip
from hetero.profiler.environment import hetero_version
from hetero.profiler.fitted_units import by_kind, knots, other_predictors, rates_of
from hetero.profiler.records import CapabilityRecord, DeviceProfile, FittedUnit

BASE: Final = "snapdragon-8-gen-3"  # whose costs between the devices are taken
EXPERTS_NOTE: Final = (
    "routed experts: by the fitted rates of their matmuls, on the NPU with a graph for each expert,"
    " which hetero does not compile yet"
)


class About(NamedTuple):
    """A profile's name, the chip's name for people, and where its rates are from."""

    name: str
    title: str
    source: str
    created: str


def fitted_profile(
    about: About, chip: Chip, units: Sequence[FittedUnit], plain: Iterable[str]
) -> DeviceProfile:
    """Return the profile of a chip by its units, the first of each kind.

    `plain` are `fitted_units.plain_ops` of the models that it is for. There is a GPU or an NPU; a
    CPU besides both may take rows of their matmuls.
    """
    first = by_kind(units)
    kinds = [kind for kind in KINDS if kind in first]
    planned: list[DeviceKind] = [*kinds]
    if len(kinds) == len(KINDS) and "cpu" in first:
        planned.append("cpu")
    plain = tuple(plain)
    base = DeviceProfile.load(BASE).model_dump(mode="json")
    base |= {
        "name": about.name,
        "hetero_version": hetero_version(),
        "created": about.created,
        "environment": {"system": "fitted", "processor": f"{about.title} ({about.source})"},
        "power": None,
        "notes": [f"{about.source}; costs between devices: {BASE}'s", EXPERTS_NOTE],
        "units": [unit.model_dump(mode="json") for unit in units],
        "devices": {
            kind: base["devices"][KINDS[0]] | _device(about, chip, kind) for kind in planned
        },
        "sync": {kind: base["sync"][kind] for kind in kinds},
        "other_predictors": [
            x for kind in kinds for x in other_predictors(kind, rates_of(first[kind])[0], plain)
        ],
        "predictors": [
            x | {"device": kind} | _predictor(first[kind])
            for kind in planned
            for x in base["predictors"]
            if (x["device"], x["weight_format"]) == (kind if kind in KINDS else "gpu", "w4a16")
        ],
        "preparation_predictors": [
            x for x in base["preparation_predictors"] if x["device"] in kinds
        ],
    }
    base |= _bandwidths(units, kinds)
    if "npu" in kinds:
        base["sync"]["npu"]["call_s"] = first["npu"].call_s
    return DeviceProfile.model_validate(base)


def _device(about: About, chip: Chip, kind: DeviceKind) -> dict[str, Any]:
    """Return the record of a device; bundles for the NPU share weights."""
    match kind:
        case "gpu":
            able = gpu_capabilities.capabilities_of()
        case "npu":
            sizes = npu_capabilities.STANDARD_GRAPH_SIZES
            able = npu_capabilities.capabilities_of(chip, sizes, shared_weights=True)
        case "cpu":  # on cores of its own, so that launches are submitted
            formats = (WeightFormat.W4A16,)
            able = Capabilities(kind="cpu", asynchronous=True, weight_formats=formats)
    return {
        "numbers": "fitted",
        "name": f"{kind.upper()} of {about.title} (fitted)",
        "fingerprint": f"fitted|{about.name}|{kind}",
        "capabilities": CapabilityRecord.of(able).model_dump(mode="json"),
    }


def _predictor(unit: FittedUnit) -> dict[str, Any]:
    rates, _ = rates_of(unit)
    return {
        "model": None,
        "knots": knots(rates, WeightFormat.W4A16.storage.bytes_per_weight),
        "regimes": {
            "bytes_per_s": unit.bandwidth_bytes_per_s,
            "flops_per_s": unit.flops_per_s,
        },
        "validation": [x.model_dump(mode="json") for x in unit.validation],
    }


def _bandwidths(units: Sequence[FittedUnit], kinds: Sequence[DeviceKind]) -> dict[str, Any]:
    """Return bandwidths and contention: both together read as fast as the fastest unit alone."""
    first = by_kind(units)
    speeds = {kind: first[kind].bandwidth_bytes_per_s for kind in kinds}
    alone = {f"{kind}_alone_bytes_per_s": x for kind, x in speeds.items()}
    if len(kinds) < len(KINDS):
        return {"bandwidth": alone, "contention": []}
    slower = max(1.0, sum(speeds.values()) / max(x.bandwidth_bytes_per_s for x in first.values()))
    together = {f"{kind}_together_bytes_per_s": x / slower for kind, x in speeds.items()}
    return {
        "bandwidth": alone | together,
        "contention": [{"phase": "decode", "gpu": slower, "npu": slower}],
    }
