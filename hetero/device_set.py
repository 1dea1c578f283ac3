"""Opening the devices of a model: names to devices, automatic choices, honest fallbacks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from hetero.backends.affinity import assign_cores
from hetero.backends.errors import DeviceError, DeviceUnavailableError
from hetero.backends.protocol import Device, DeviceKind
from hetero.backends.registry import BACKENDS, find, open_device
from hetero.errors import ModelError

DeviceMode: TypeAlias = Literal["gpu", "npu", "hetero", "auto"]
AUTO_BACKEND: dict[DeviceKind, str] = {"gpu": "opencl", "npu": "ort-cpu"}


class FallbackWarning(UserWarning):
    """A device is missing or failed; another does its work."""


@dataclass
class DeviceSet:
    """The opened devices of one model.

    `mode` is what runs after fallbacks; `requested` what was asked for; `fallback` says why they
    differ (empty if they do not); `notes` holds the reasons of automatic choices.
    """

    requested: DeviceMode
    mode: DeviceMode
    devices: dict[DeviceKind, Device]
    control_core: int | None
    fallback: str = ""
    notes: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Close every device."""
        for device in self.devices.values():
            device.close()

    def name(self, kind: DeviceKind) -> str | None:
        """Backend name of a kind, None if it is not open."""
        return self.devices[kind].info.backend if kind in self.devices else None


def open_devices(mode: DeviceMode, *, gpu: str = "auto", npu: str = "auto") -> DeviceSet:
    """Open what `mode` needs. A missing device leaves the other to do its work, with one warning.

    Raises `ModelError` for an unknown name and `DeviceUnavailableError` if nothing can be opened.
    """
    if mode not in get_args(DeviceMode):
        raise ModelError(f"unknown device {mode!r}: choose gpu, npu, hetero or auto")
    names = {"gpu": _backend_name("gpu", gpu), "npu": _backend_name("npu", npu)}
    cores = assign_cores()
    wanted: list[DeviceKind] = [mode] if mode in ("gpu", "npu") else ["gpu", "npu"]
    opened: dict[DeviceKind, Device] = {}
    failures: dict[DeviceKind, DeviceError] = {}
    for kind in wanted:
        _try_open(kind, names[kind], cores.gpu, opened, failures)
    if not opened:
        other: DeviceKind = "npu" if wanted == ["gpu"] else "gpu"
        if len(wanted) == 1:
            _try_open(other, names[other], cores.gpu, opened, failures)
    if not opened:
        raise DeviceUnavailableError(
            "hetero",
            "opening any device",
            "; ".join(str(error) for error in failures.values()),
            "run `hetero doctor`",
        )
    result = DeviceSet(mode, mode, opened, cores.control)
    if failures:
        _note_fallback(result, failures)
    return result


def _try_open(
    kind: DeviceKind,
    name: str,
    gpu_core: int | None,
    opened: dict[DeviceKind, Device],
    failures: dict[DeviceKind, DeviceError],
) -> None:
    options: dict[str, Any] = {}
    if name == "opencl":
        options["cpu"] = gpu_core
    elif name in ("null", "reference"):
        options["kind"] = kind
    try:
        opened[kind] = open_device(name, **options)
    except DeviceUnavailableError as error:
        failures[kind] = error


def _note_fallback(result: DeviceSet, failures: dict[DeviceKind, DeviceError]) -> None:
    """Record and warn once that the remaining device does everything."""
    (remaining,) = result.devices
    result.mode = remaining
    reasons = "; ".join(str(error) for error in failures.values())
    result.fallback = f"running on {remaining} ({result.name(remaining)}) alone because {reasons}"
    warnings.warn(result.fallback, FallbackWarning, stacklevel=4)


def _backend_name(kind: DeviceKind, name: str) -> str:
    """Resolve `auto`. Raises `ModelError` for a backend that does not exist or cannot play `kind`.

    `auto` for the NPU is a real Hexagon if there is one; none can be driven yet, so the host's.
    """
    if name == "auto":
        return AUTO_BACKEND[kind]
    try:
        backend = find(name)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if backend.kind != kind and name not in ("reference", "null"):
        fitting = [b.name for b in BACKENDS.values() if b.kind == kind]
        raise ModelError(f"{name} is not a {kind} backend: choose {', '.join(fitting)}")
    return name
