"""Whether this machine has a Hexagon, and whether what it needs besides the backend is in place."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

from hetero.backends.registry import find
from hetero.backends.snapdragon import DEFAULT_CHIP, Chip, chip_here


class State(NamedTuple):
    """One thing that the NPU needs: there or not, what was found, what to do."""

    ok: bool
    detail: str
    remedy: str = ""


def is_snapdragon() -> bool:
    """Whether the processor is of the family that has a Hexagon: 64-bit Arm."""
    return platform.machine().lower() in ("aarch64", "arm64") and platform.system() != "Darwin"


def present() -> bool:
    """Whether a real Hexagon can be driven here; on other machines nothing is imported."""
    if not is_snapdragon() or find("qnn").missing_packages():
        return False
    from hetero.backends.qnn import hexagon_present

    return hexagon_present()


def expected() -> bool:
    """Whether a check of the NPU makes sense: a Snapdragon, or the emulator is installed."""
    return is_snapdragon() or not find("qnn").missing_packages()


def surroundings() -> list[tuple[str, State]]:
    """Libraries that are checked apart from the backend; nothing off the device."""
    if not is_snapdragon() or find("qnn").missing_packages():
        return []
    chip = chip_here()
    arch = None if chip is None else chip.htp_arch
    return [
        ("chip", chip_state(chip)),
        ("FastRPC", fastrpc_state()),
        ("Hexagon skeleton", skeleton_state(_search_path(), arch)),
    ]


def chip_state(chip: Chip | None) -> State:
    """Which chip this is: without its name, the skeleton's version cannot be compared."""
    if chip is not None:
        return State(True, chip.label)
    return State(True, f"not named by the system; graphs are made for {DEFAULT_CHIP} unless told")


def fastrpc_state() -> State:
    """Whether the library that calls into the Hexagon loads."""
    from hetero.backends.qnn.library import FASTRPC, fastrpc

    if fastrpc() is not None:
        return State(True, "loads")
    names = " or ".join(name for group in FASTRPC.values() for name in group)
    return State(
        False,
        f"{names} cannot be loaded",
        "install the FastRPC user library of your system (Debian: libfastrpc1) and let this user "
        "open /dev/fastrpc-cdsp; on Windows update the NPU's driver",
    )


def skeleton_state(folders: list[Path], arch: int | None = None) -> State:
    """Whether the code that runs on the Hexagon is there, for its architecture if it is known."""
    wanted = f"libQnnHtpV{arch}Skel.so" if arch is not None else "libQnnHtpV*Skel.so"
    found = sorted({path.name for folder in folders for path in folder.glob(wanted)})
    if found:
        return State(True, ", ".join(found))
    return State(
        False,
        f"no {wanted} in {', '.join(map(str, folders)) or 'ADSP_LIBRARY_PATH'}",
        "install onnxruntime-qnn for this processor, or name its folder in ADSP_LIBRARY_PATH",
    )


def _search_path() -> list[Path]:
    from hetero.backends.qnn.library import load

    # Qualcomm's documentation separates by semicolons on every system; distributions use colons.
    named = re.split(";" if os.name == "nt" else "[;:]", os.environ.get("ADSP_LIBRARY_PATH", ""))
    return [load().path.parent, *(Path(name) for name in named if name)]
