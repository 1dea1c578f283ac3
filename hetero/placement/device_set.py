"""Opening the devices of a model: names to devices, automatic choices, honest fallbacks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from hetero.backends.errors import DeviceError, DeviceUnavailableError
from hetero.backends.host.affinity import assign_cores, polling_core, spare_cores
from hetero.backends.optional import SupportsPrewarm
from hetero.backends.protocol import KINDS, Device, DeviceKind, other_kind
from hetero.backends.qnn import hexagon
from hetero.backends.registry import (
    BACKENDS,
    EVERY_CORE,
    automatic_backend,
    find,
    open_device,
    split_driver,
)
from hetero.errors import FallbackWarning, ModelError

DeviceMode: TypeAlias = Literal["gpu", "npu", "hetero", "auto"]
DRIVEN = tuple(backend.name for backend in BACKENDS.values() if backend.drivers)


@dataclass
class DeviceSet:
    """The opened devices of one model.

    `mode` is what runs after fallbacks; `requested` what was asked for; `fallback` says why they
    differ (empty if they do not); `notes` says what the devices lack in this process, because of
    others that were opened before them.
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

    @contextmanager
    def prewarm(self, what: str) -> Iterator[bool]:
        """Prewarm every device (`SupportsPrewarm`); yield whether all could."""
        with ExitStack() as stack:
            known = [
                isinstance(device, SupportsPrewarm) and stack.enter_context(device.prewarm(what))
                for device in self.devices.values()
            ]
            yield all(known)

    def without_gpu(self, why: str, npu: str = "auto") -> None:
        """Continue without the GPU, which cannot compute this model, on the NPU.

        The NPU is opened if it is not. Warns once. Raises `DeviceUnavailableError` if it cannot be
        opened either.
        """
        self.devices.pop("gpu").close()
        if "cpu" in self.devices:  # it only takes rows besides both
            self.devices.pop("cpu").close()
        if "npu" not in self.devices:
            self.devices["npu"] = open_device(backend_name("npu", npu))
        self.mode, self.control_core = "npu", control_core(self.devices)
        self.fallback = f"running on npu ({self.name('npu')}) alone because {why}"
        warnings.warn(self.fallback, FallbackWarning, stacklevel=4)

    @property
    def numbers(self) -> Literal["measured", "emulated"]:
        """Return the kind of these devices' times.

        Emulated ones say nothing of the chip's speed.
        """
        emulated = any("emulated" in d.info.details for d in self.devices.values())
        return "emulated" if emulated else "measured"

    def name(self, kind: DeviceKind) -> str | None:
        """Return the backend of a kind, None if it is not open."""
        return self.devices[kind].info.backend if kind in self.devices else None


def open_devices(
    mode: DeviceMode,
    *,
    gpu: str = "auto",
    npu: str = "auto",
    cpu: str | None = None,
    compiled: Mapping[str, Any] | None = None,
    graph_sizes: tuple[int, ...] = (),
    apart: bool = False,
) -> DeviceSet:
    """Open what `mode` needs. A missing device leaves the other to do its work, with one warning.

    `compiled` are the options of `qnn` for a compiled model, which is then the automatic NPU. Else
    the NPU is opened with graphs of `graph_sizes`, where some are given. Devices that work `apart`,
    never both at once, may share cores. `cpu` is a third device besides both (None: none), which
    may be missing, with a warning.
    Raises `ModelError` for an unknown name and `DeviceUnavailableError` if nothing can be opened.
    """
    if mode not in get_args(DeviceMode):
        raise ModelError(f"unknown device {mode!r}: choose gpu, npu, hetero or auto")
    if compiled and npu == "auto":
        npu = "qnn"
    names = {"gpu": backend_name("gpu", gpu), "npu": backend_name("npu", npu)}
    third = None if cpu is None else backend_name("cpu", cpu)
    if split_driver(names["gpu"])[0] == EVERY_CORE and mode != "gpu" and not apart:
        raise ModelError(f"{EVERY_CORE} leaves the NPU no core: use --device gpu")
    cores = assign_cores()
    sized = {"graph_sizes": graph_sizes} if graph_sizes else {}
    wanted: list[DeviceKind] = [mode] if mode in ("gpu", "npu") else list(KINDS)
    opened: dict[DeviceKind, Device] = {}
    failures: dict[DeviceKind, DeviceError] = {}

    def options(kind: DeviceKind) -> dict[str, Any]:
        return _options(kind, names[kind], cores.gpu, compiled or {}, sized)

    for kind in wanted:
        _try_open(kind, names[kind], options(kind), opened, failures)
    if not opened and len(wanted) == 1:
        other = other_kind(wanted[0])
        _try_open(other, names[other], options(other), opened, failures)
    host = automatic_backend("npu")
    if not opened and npu == "auto" and names["npu"] != host:
        _try_open("npu", host, {}, opened, failures)  # for a dead Hexagon
    if not opened:
        raise DeviceUnavailableError(
            "hetero",
            "opening any device",
            "; ".join(str(error) for error in failures.values()),
            "run `hetero doctor`",
        )
    result = DeviceSet(mode, mode, opened, control_core(opened))
    result.notes = [device.note for device in opened.values() if device.note]
    if failures:
        _note_fallback(result, failures)
    elif third is not None and len(opened) == len(KINDS):
        _open_cpu(result, third)
    return result


def _open_cpu(result: DeviceSet, name: str) -> None:
    """Open the third device on the cores that the others leave it; warn where it is missing."""
    devices, gpu = result.devices, assign_cores().gpu if result.devices["gpu"].on_host else None
    cores = spare_cores({core for core in (gpu, result.control_core) if core is not None})
    options = {"kind": "cpu"} | ({"cores": cores} if name == automatic_backend("cpu") else {})
    failures: dict[DeviceKind, DeviceError] = {}
    _try_open("cpu", name, options, devices, failures)
    for error in failures.values():
        result.fallback = f"running on gpu and npu without the cpu because {error}"
        warnings.warn(result.fallback, FallbackWarning, stacklevel=4)


def control_core(devices: Mapping[DeviceKind, Device]) -> int | None:
    """Return the core of the thread that drives these devices; None leaves it to the system.

    It computes where one of them does so on this processor, and polls otherwise.
    """
    if any(device.capabilities.every_core for device in devices.values()):
        return None
    computes = any(device.on_host for device in devices.values())
    return assign_cores().control if computes else polling_core()


def _options(
    kind: DeviceKind,
    name: str,
    gpu_core: int | None,
    compiled: Mapping[str, Any],
    sized: Mapping[str, Any],
) -> dict[str, Any]:
    match split_driver(name)[0]:
        case "opencl":
            return {"cpu": gpu_core}
        case "null" | "reference":
            return {"kind": kind}
        case "qnn":
            return dict(compiled or sized)
        case "ort-cpu":
            return dict(sized)
    return {}


def _try_open(
    kind: DeviceKind,
    name: str,
    options: Mapping[str, Any],
    opened: dict[DeviceKind, Device],
    failures: dict[DeviceKind, DeviceError],
) -> None:
    try:
        opened[kind] = open_device(name, **options)
    except DeviceUnavailableError as error:
        failures[kind] = error


def _note_fallback(result: DeviceSet, failures: dict[DeviceKind, DeviceError]) -> None:
    """Record and warn once that the remaining device does everything."""
    (remaining,) = (kind for kind in KINDS if kind in result.devices)
    result.mode = remaining
    reasons = "; ".join(str(error) for error in failures.values())
    result.fallback = f"running on {remaining} ({result.name(remaining)}) alone because {reasons}"
    warnings.warn(result.fallback, FallbackWarning, stacklevel=4)


def backend_name(kind: DeviceKind, name: str) -> str:
    """Resolve `auto`; `opencl` may name a driver behind a colon.

    Raises `ModelError` for a backend that does not exist or cannot play `kind`.

    `auto` for the NPU is a real Hexagon if there is one, else the host's; the emulated Hexagon is
    used only by name.
    """
    if name == "auto":
        return "qnn" if kind == "npu" and hexagon.present() else automatic_backend(kind)
    base, driver = split_driver(name)
    if driver is not None and base not in DRIVEN:
        raise ModelError(f"{name}: only {' and '.join(DRIVEN)} take a driver, as opencl:pocl")
    if driver == "":
        raise ModelError(f"{name} names no driver: write it like opencl:pocl")
    try:
        backend = find(base)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if not backend.plays(kind):
        own = kind != "cpu"
        fitting = [b.name for b in BACKENDS.values() if (b.kind == kind if own else b.plays(kind))]
        raise ModelError(f"{name} is not a {kind} backend: choose {', '.join(fitting)}")
    return name
