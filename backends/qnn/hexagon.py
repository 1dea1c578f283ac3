"""Detects a Hexagon on this machine, and whether everything it needs is installed."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

from hetero.backends import snapdragon
from hetero.backends.errors import DeviceError
from hetero.backends.qnn import npu_driver
from hetero.backends.qnn.npu_driver import CheckResult
from hetero.backends.registry import find
from hetero.backends.snapdragon import DEFAULT_CHIP, Chip, chip_here

FASTRPC_REMEDY = (
    "install the FastRPC user library of your system (package libfastrpc1: Ubuntu; Debian's "
    "contrib from forky or trixie-backports)"
)


def present() -> bool:
    """Return whether a real Hexagon can be driven here; on other machines nothing is imported."""
    if not snapdragon.is_snapdragon() or find("qnn").missing_packages():
        return False
    try:
        from hetero.backends.qnn.library import hexagon_present
    except (ImportError, OSError):  # a package for another system: `qnn` by name says so
        return False
    return hexagon_present()


def expected() -> bool:
    """Return whether a check of the NPU makes sense: a Snapdragon, or the emulator is installed."""
    return snapdragon.is_snapdragon() or not find("qnn").missing_packages()


def needed() -> bool:
    """Return whether a machine needs a working NPU: not a Raspberry Pi or an Arm server."""
    return not snapdragon.is_snapdragon() or npu_driver.names_qualcomm()


def other_checks() -> list[tuple[str, Callable[[], CheckResult]]]:
    """Return the checks besides the backend's by name.

    Off the device, one that there is nothing to check.
    """
    missing = bool(find("qnn").missing_packages())
    if not snapdragon.is_snapdragon():
        return [("Hexagon", lambda: elsewhere_state(missing))]
    if missing:
        return []
    return [
        ("chip", lambda: chip_state(chip_here())),
        ("NPU driver", npu_driver.state),
        ("FastRPC", fastrpc_state),
        ("Hexagon skeleton", installed_skeleton_state),
        ("shared memory", shared_memory_state),
    ]


def elsewhere_state(missing: bool) -> CheckResult:
    """Return why nothing of a Hexagon is checked on another machine."""
    memory = (
        "the package onnxruntime-qnn, which compiles for one and emulates it, is not installed "
        "(pip install 'hetero[qnn]')"
        if missing
        else "`qnn` compiles for one and emulates it"
    )
    return CheckResult(
        True,
        f"none on this machine ({platform.machine()}), so no driver, FastRPC library, skeleton or "
        f"shared memory to check; {memory}",
    )


def chip_state(chip: Chip | None) -> CheckResult:
    """Return which chip this is: without its name, the skeleton's version cannot be compared."""
    if chip is not None:
        return CheckResult(True, chip.label)
    return CheckResult(
        True, f"not named by the system; graphs are made for {DEFAULT_CHIP} by default"
    )


def fastrpc_state() -> CheckResult:
    """Return whether the library that calls into the Hexagon loads."""
    from hetero.backends.qnn.library import FASTRPC, fastrpc

    library = fastrpc()
    if library is not None:
        return CheckResult(True, f"loads, {npu_driver.loaded_file(library)}")
    names = " or ".join(FASTRPC.get(sys.platform, ())) or "the FastRPC library"
    remedy = npu_driver.WINDOWS_REMEDY if sys.platform == "win32" else FASTRPC_REMEDY
    return CheckResult(False, f"{names} cannot be loaded", remedy)


def installed_skeleton_state() -> CheckResult:
    """Return the state of the skeletons on FastRPC's search path; no library is loaded for it."""
    import onnxruntime_qnn

    chip = chip_here()
    return skeleton_state(
        [Path(onnxruntime_qnn.get_qnn_htp_path()).parent, *_named_folders()],
        None if chip is None else chip.htp_arch,
        str(onnxruntime_qnn.build_and_package_info.qnn_version),
    )


def skeleton_state(folders: list[Path], arch: int | None = None, sdk: str = "") -> CheckResult:
    """Return whether the code that runs on the Hexagon is there.

    It must be for the Hexagon's architecture if that is known.

    FastRPC takes the first that it finds, which must be of the library's version `sdk`.
    """
    wanted = f"libQnnHtpV{arch}Skel.so" if arch is not None else "libQnnHtpV*Skel.so"
    files = [path for folder in folders for path in sorted(folder.glob(wanted))]
    if not files:
        return CheckResult(
            False,
            f"no {wanted} in {', '.join(map(str, folders)) or 'ADSP_LIBRARY_PATH'}",
            "install onnxruntime-qnn for this processor, or name its folder in ADSP_LIBRARY_PATH",
        )
    names = ", ".join(sorted({path.name for path in files}))
    version = npu_driver.qairt_version(files[0])
    if sdk and version and version != sdk:
        return CheckResult(
            False,
            f"{files[0]} is of QAIRT {version}, the library of {sdk}",
            "take its folder out of ADSP_LIBRARY_PATH: both must be of one version",
        )
    return CheckResult(True, f"{names} (QAIRT {version})" if version else names)


def shared_memory_state() -> CheckResult:
    """Return whether OpenCL and the Hexagon can work on the same bytes.

    Without, tensors are copied.
    """
    from hetero.backends.qnn.device import QnnDevice
    from hetero.backends.qnn.opening import open as open_qnn

    try:
        with open_qnn(cache=None) as device:
            assert isinstance(device, QnnDevice)
            memory = device.shared_memory
    except DeviceError as error:
        return CheckResult(True, f"not tried: {error.code}")
    if isinstance(memory, str):
        return CheckResult(True, f"none, tensors are copied to the Hexagon: {memory}")
    return CheckResult(True, "tensors of the pool are the Hexagon's own")


def _named_folders() -> list[Path]:
    # Qualcomm's documentation separates by semicolons on every system; distributions use colons.
    named = re.split(";" if os.name == "nt" else "[;:]", os.environ.get("ADSP_LIBRARY_PATH", ""))
    return [Path(name) for name in named if name]
