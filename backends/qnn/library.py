"""Qualcomm's libraries: located, loaded once, their versions, and the processor they drive.

On Linux on x86-64 the library compiles for a named chip and runs the compiled graph in functional
emulation. On a Snapdragon it drives the Hexagon through FastRPC.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import onnxruntime as ort
import onnxruntime_qnn
from onnxruntime_qnn import build_and_package_info as build

from hetero.backends.errors import DeviceUnavailableError
from hetero.backends.snapdragon import NODE_REMEDY, fastrpc_nodes, is_snapdragon, may_open

BACKEND = "qnn"
PROVIDER = "QNNExecutionProvider"
FASTRPC = {"linux": ("libcdsprpc.so", "libcdsprpc.so.1"), "win32": ("libcdsprpc.dll",)}
# Windows' name of the NPU's driver, whose folder has its FastRPC library.
DRIVER_SERVICE = r"SYSTEM\CurrentControlSet\Services\qcnspmcdm"
REINSTALL = "install it again: pip install --force-reinstall onnxruntime-qnn"
ERRORS = 3  # the severity of ONNX Runtime's log
_lock = threading.Lock()


@dataclass(frozen=True)
class Library:
    """The loaded libraries. `devices` are ONNX Runtime's handles for the provider."""

    path: Path
    devices: tuple[Any, ...]
    emulated: bool
    wheel: str
    sdk: str

    @property
    def version(self) -> str:
        """Return the version, for people and cache keys."""
        return f"onnxruntime-qnn {self.wheel} (QAIRT {self.sdk}), onnxruntime {ort.__version__}"


def fastrpc() -> ctypes.CDLL | None:
    """Return the library that calls into the Hexagon and shares memory with it.

    None where absent.
    """
    names = FASTRPC.get(sys.platform, ())
    folder = driver_folder()
    for name in (*names, *(str(folder / name) for name in names if folder)):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def driver_folder() -> PurePath | None:
    """Return where Windows keeps the NPU's driver; None elsewhere or without one."""
    if sys.platform == "win32":
        import winreg

        with contextlib.suppress(OSError):
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, DRIVER_SERVICE) as key:
                image = str(winreg.QueryValueEx(key, "ImagePath")[0])
            return image_folder(image, os.environ.get("SYSTEMROOT", r"C:\Windows"))
    return None


def image_folder(image: str, system_root: str) -> PureWindowsPath:
    """Return the folder of a driver's `ImagePath`.

    The system's folder has another name in it.
    """
    plain = image.removeprefix("\\??\\")
    prefix = "\\systemroot\\"
    if plain.lower().startswith(prefix):
        return PureWindowsPath(system_root, plain[len(prefix) :]).parent
    path = PureWindowsPath(plain)
    return (path if path.is_absolute() else PureWindowsPath(system_root, path)).parent


def hexagon_present() -> bool:
    """Return whether a real Hexagon can be driven here, without loading Qualcomm's compiler.

    On Linux this user may open its device node, and everywhere the FastRPC library loads.
    """
    reachable = not sys.platform.startswith("linux") or any(map(may_open, fastrpc_nodes()))
    return is_snapdragon() and reachable and fastrpc() is not None


def load(htp_path: str | Path | None = None) -> Library:
    """Load and register once for each process; `htp_path` replaces the wheel's own library.

    Raises `DeviceUnavailableError` for a library that is missing or cannot be loaded.
    """
    with _lock:
        return _load(Path(htp_path or onnxruntime_qnn.get_qnn_htp_path()))


@functools.cache
def _load(path: Path) -> Library:
    if is_snapdragon():
        show_skeletons(path.parent)
        # The provider warns by this logger that the variable is set, and sets it otherwise.
        ort.set_default_logger_severity(ERRORS)
    try:
        with quiet_stdout():
            ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceUnavailableError(
            BACKEND, "loading the HTP library", f"LIBRARY_NOT_LOADED: {error}", REINSTALL
        ) from error
    _register()
    devices = tuple(d for d in ort.get_ep_devices() if d.ep_name == PROVIDER)
    chosen = _npu(devices)
    return Library(path, chosen, not is_snapdragon(), build.__version__, build.qnn_version)


def show_skeletons(folder: Path) -> None:
    """Put the folder of the code that runs on the Hexagon on FastRPC's search path.

    FastRPC does not look next to the library that calls it; without this the wheel for Windows
    fails with 1002 or 3110 (onnxruntime-qnn pull request 593).
    """
    known = os.environ.get("ADSP_LIBRARY_PATH", "")
    if str(folder) not in re.split("[;:]" if os.name != "nt" else ";", known):
        os.environ["ADSP_LIBRARY_PATH"] = ";".join(filter(None, (str(folder), known)))


@functools.cache
def _register() -> None:
    """Register the provider, which ONNX Runtime keeps for the life of the process."""
    ort.disable_telemetry_events()
    try:
        ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    except Exception as error:
        code = f"PROVIDER_NOT_REGISTERED: {' '.join(str(error).split())[:200]}"
        raise DeviceUnavailableError(
            BACKEND, "registering the QNN provider", code, REINSTALL
        ) from error


def _npu(devices: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the NPU's handle; on x86-64 the emulator calls itself a CPU."""
    kinds = {str(device.device.type).rsplit(".", maxsplit=1)[-1]: device for device in devices}
    npu = kinds.get("NPU") or (None if is_snapdragon() else kinds.get("CPU"))
    if npu is None:
        code, remedy = _no_npu(sorted(kinds))
        raise DeviceUnavailableError(BACKEND, "finding the Hexagon", code, remedy)
    return (npu,)


def _no_npu(kinds: list[str]) -> tuple[str, str]:
    """Return why the provider lists no NPU, and what to do."""
    if sys.platform.startswith("linux") and not fastrpc_nodes():
        return "NO_NPU: there is no /dev/fastrpc-cdsp*, which the provider looks for", NODE_REMEDY
    return (
        f"NO_NPU: the provider lists {', '.join(kinds) or 'no device'}",
        "see the README's section on this platform; the NPU needs its driver and FastRPC",
    )


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Keep what a native library prints off standard output, where results go.

    That may be closed, as of a service.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    saved, null = _copy_of(1), os.open(os.devnull, os.O_WRONLY)  # 1 itself where that is closed
    try:  # around the call too: a signal handler may raise right after it
        os.dup2(null, 1)
        try:
            yield
        finally:
            _flush_native()  # else what it printed comes out when the process ends
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)
        for descriptor in {null} if saved is not None else {null, 1}:
            os.close(descriptor)


def _copy_of(descriptor: int) -> int | None:
    try:
        return os.dup(descriptor)
    except OSError:  # closed
        return None


def _flush_native() -> None:
    """Write what C libraries have in their buffers of standard output."""
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
