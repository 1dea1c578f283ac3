"""Backends by name. Names are spelled with `-`, folders with `_`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.host.processor import is_arm64

if TYPE_CHECKING:
    from hetero.backends.protocol import Device, DeviceKind

EVERY_CORE: Final = "opencl-cores"


@dataclass(frozen=True)
class Backend:
    """One entry of the table, from which lists of backends are derived.

    kind          which device of a plan it plays
    also          and which others
    requires      vendor packages, and
    install_hint  how to install them
    submodule     what has `open(**options) -> Device`; the package itself if empty
    real          computes on hardware: `hetero devices` and `hetero doctor` list it
    automatic     what `auto` opens for its kind
    drivers       `NAME:DRIVER` opens one of its drivers
    note          what the help of `--gpu` or `--npu` says of it
    """

    name: str
    kind: DeviceKind
    also: tuple[DeviceKind, ...] = field(default=(), kw_only=True)
    requires: tuple[str, ...] = ()
    install_hint: str = ""
    submodule: str = ""
    real: bool = False
    automatic: bool = False
    drivers: bool = False
    note: str = ""

    @property
    def module(self) -> str:
        """Return the import path of the module that opens it."""
        package = f"hetero.backends.{self.name.replace('-', '_')}"
        return f"{package}.{self.submodule}" if self.submodule else package

    def plays(self, kind: DeviceKind) -> bool:
        """Return whether it may be opened as this device of a plan."""
        return kind in (self.kind, *self.also)

    def missing_packages(self) -> tuple[str, ...]:
        """Return the vendor packages that are not installed, without importing them."""
        return tuple(p for p in self.requires if importlib.util.find_spec(p) is None)


# The wheels of PoCL are for x86-64; on Arm it is a package of the system's (README).
PYOPENCL: Final = "pip install pyopencl" if is_arm64() else "pip install 'pyopencl[pocl]'"
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("opencl", "gpu", ("pyopencl",), PYOPENCL,
                real=True, automatic=True, drivers=True),
        Backend(EVERY_CORE, "gpu", ("pyopencl",), PYOPENCL, drivers=True,
                note="every core; with --device gpu"),
        Backend("ort-cpu", "npu", ("onnxruntime", "onnx"), "pip install onnxruntime onnx",
                also=("cpu",), real=True, automatic=True),
        Backend("qnn", "npu", ("onnxruntime_qnn", "onnx"), "pip install 'hetero[qnn]'", "opening",
                real=True, note="Hexagon, or its emulator"),
        Backend("reference", "npu", also=("gpu", "cpu")),
        Backend("null", "npu", also=("gpu", "cpu")),
        Backend("simulated", "npu"),
    )
}  # fmt: skip


def real_backends() -> tuple[str, ...]:
    """Return the names of the backends that compute on hardware."""
    return tuple(backend.name for backend in BACKENDS.values() if backend.real)


def automatic_backend(kind: DeviceKind) -> str:
    """Return the name of the backend that `auto` opens for a kind of device."""
    return next(b.name for b in BACKENDS.values() if b.plays(kind) and b.automatic)


def choices_text(kind: DeviceKind) -> str:
    """Return the values of `--gpu` or `--npu` for its help."""
    names = ["auto"]
    for backend in BACKENDS.values():
        if backend.kind == kind:
            names.append(f"{backend.name} ({backend.note})" if backend.note else backend.name)
            if backend.drivers and not backend.note:
                names.append(f"{backend.name}:DRIVER")
    last = " or " if "(" not in names[-1] else ", or "
    return ", ".join(names[:-1]) + last + names[-1]


def find(name: str) -> Backend:
    """Return the backend of that name. Raises `ValueError` with the nearest known name."""
    if name in BACKENDS:
        return BACKENDS[name]
    near = difflib.get_close_matches(name, BACKENDS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown backend {name!r}: {hint}known are {', '.join(BACKENDS)}")


def split_driver(name: str) -> tuple[str, str | None]:
    """Return `opencl:intel` as backend and driver; a name without a driver has None."""
    backend, colon, driver = name.partition(":")
    return backend, driver if colon else None


def open_device(name: str, **options: Any) -> Device:
    """Open a device by backend name, or `opencl:DRIVER`.

    Raises `DeviceUnavailableError` with the remedy, `DeviceOptionError` for a driver that is not
    there.
    """
    name, driver = split_driver(name)
    if driver is not None:
        options["platform"] = driver
    backend = find(name)
    missing = backend.missing_packages()
    if missing:
        raise DeviceUnavailableError(
            name, "opening", f"package {', '.join(missing)} is not installed", backend.install_hint
        )
    try:
        module = importlib.import_module(backend.module)
    except (ImportError, OSError) as error:
        if not backend.requires or (getattr(error, "name", None) or "").startswith("hetero"):
            raise
        raise DeviceUnavailableError(
            name, f"importing {backend.requires[0]}", str(error), backend.install_hint
        ) from error
    device: Device = module.open(**options)
    return device
