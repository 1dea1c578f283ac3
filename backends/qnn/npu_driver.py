"""The NPU's driver and libraries as the platform names them: versions, and what is missing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import sys
from pathlib import Path
from typing import NamedTuple

from hetero.backends.snapdragon import NODE_REMEDY, fastrpc_nodes, may_open

ROOT = Path("/")
WINDOWS_REMEDY = "install the NPU's driver: Windows Update, or Qualcomm's software centre"
# Windows' class of compute accelerators; one subkey for each driver.
ACCELERATORS = r"SYSTEM\CurrentControlSet\Control\Class\{f01a9d53-3ff6-48d2-9f97-c8a7004be10c}"
# Every library of Qualcomm's SDK has its version in it.
QAIRT_VERSION = re.compile(rb"AISW_VERSION: (\d+\.\d+\.\d+)")


class CheckResult(NamedTuple):
    """One thing that the NPU needs: whether it is there, what was detected, what to do."""

    ok: bool
    detail: str
    remedy: str = ""


def state() -> CheckResult:
    """Return the driver of the Hexagon on this system."""
    return windows_state() if sys.platform == "win32" else linux_state()


def linux_state() -> CheckResult:
    """Return FastRPC of the kernel.

    Its device nodes, and the state and firmware of the compute DSP.
    """
    release = f"fastrpc of Linux {platform.release()}"
    nodes = fastrpc_nodes(ROOT)
    if not nodes:
        return CheckResult(False, f"{release} gives no /dev/fastrpc-cdsp", NODE_REMEDY)
    if not any(map(may_open, nodes)):
        return CheckResult(
            False,
            f"{release}: this user may not open /dev/{nodes[0].name}",
            "add a udev rule, or the user to the group that owns it",
        )
    dsp = _compute_dsp()
    if dsp is not None and dsp["state"] != "running":
        return CheckResult(False, f"{release}: the compute DSP is {dsp['state']}", NODE_REMEDY)
    firmware = "" if dsp is None else f", firmware {dsp['firmware']}"
    return CheckResult(True, f"{release}, /dev/{nodes[0].name}{firmware}")


def names_qualcomm() -> bool:
    """Return whether anything here is of a Snapdragon; on Windows every 64-bit Arm is one."""
    if sys.platform == "win32" or fastrpc_nodes(ROOT) or _compute_dsp() is not None:
        return True
    named = b""
    for path in ("proc/device-tree/compatible", "sys/devices/soc0/family"):
        with contextlib.suppress(OSError):
            named += (ROOT / path).read_bytes()
    return b"qcom," in named or b"snapdragon" in named.lower()


def _compute_dsp() -> dict[str, str] | None:
    """Name, state and firmware of the processor that holds the Hexagon NPU."""
    for folder in sorted((ROOT / "sys/class/remoteproc").glob("remoteproc*")):
        properties = {}
        for key in ("name", "state", "firmware"):
            try:
                properties[key] = (folder / key).read_text(encoding="utf-8").strip()
            except OSError:
                properties[key] = "unknown"
        if "cdsp" in properties["name"]:
            return properties
    return None


def windows_state() -> CheckResult:
    """Return qualcomm's driver among the compute accelerators of the registry."""
    for values in _accelerators():
        if "qualcomm" in f"{values.get('ProviderName')} {values.get('DriverDesc')}".lower():
            names = [str(values.get(key)) for key in ("DriverDesc", "DriverVersion", "DriverDate")]
            return CheckResult(True, f"{names[0]} {names[1]} of {names[2]}")
    return CheckResult(
        False, "no driver of Qualcomm among the compute accelerators", WINDOWS_REMEDY
    )


def _accelerators() -> list[dict[str, object]]:
    """Return the registry's values of each driver; none on other systems."""
    devices: list[dict[str, object]] = []
    if sys.platform == "win32":
        import winreg

        # Subkeys that only the system may read come last.
        with (
            contextlib.suppress(OSError),
            winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, ACCELERATORS) as drivers,
        ):
            for i in range(winreg.QueryInfoKey(drivers)[0]):
                with winreg.OpenKey(drivers, winreg.EnumKey(drivers, i)) as driver:
                    count = winreg.QueryInfoKey(driver)[1]
                    values = (winreg.EnumValue(driver, j) for j in range(count))
                    devices.append({name: value for name, value, _ in values})
    return devices


def loaded_file(library: ctypes.CDLL) -> str:
    """Return the file of a loaded library, links followed.

    On Linux its name ends in the version.
    """
    name = Path(library._name).name
    try:
        maps = (ROOT / "proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return library._name
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    stem = name.partition(".so")[0]
    mapped = sorted(path for path in paths if Path(path).name.startswith(f"{stem}.so"))
    return os.path.realpath(mapped[0]) if mapped else library._name


def qairt_version(path: Path) -> str:
    """Return the version of the SDK that a library of Qualcomm is of; "" if it does not say."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            match = QAIRT_VERSION.search(content)
            return match.group(1).decode() if match else ""
    except (OSError, ValueError):
        return ""
