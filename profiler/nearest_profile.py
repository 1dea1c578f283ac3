"""The shipped profile that a machine without one of its own starts from: the nearest of its kind.

A Snapdragon has its chip's, or that of the chip with the nearest Hexagon; a PC that of a PC with
its instructions. Another 64-bit Arm machine has a PC's until one of its kind is shipped: its
devices are the same (OpenCL, ONNX Runtime's integers), and times are scaled by kernels that are
timed on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from hetero.backends import snapdragon
from hetero.backends.host.processor import cpu_flags
from hetero.backends.opencl.drivers.levels import chosen_level, processor_levels
from hetero.backends.protocol import DeviceKind
from hetero.backends.qnn import npu_driver
from hetero.backends.snapdragon import CHIPS, DEFAULT_CHIP, Chip
from hetero.profiler import profile_files

if TYPE_CHECKING:
    from hetero.profiler.records import DeviceProfile

# Backends that a chip's devices are opened with, where its profile was made without them.
OPENED_WITH: Final[dict[DeviceKind, str]] = {"gpu": "opencl", "npu": "qnn"}
PC_LEVELS: Final = {
    "host": "a PC with AVX-512 VNNI", "host-amx": "a PC with AMX", "host-avx2": "a PC with AVX2",
}  # fmt: skip


class Nearest(NamedTuple):
    """A shipped profile's name, and why it is the nearest, to go on after `is used`."""

    name: str
    why: str

    def load(self) -> DeviceProfile:
        """Return the profile, a chip's with the backends that open its devices (no CPU)."""
        from hetero.profiler.records import DeviceProfile  # not at starts that know their decision

        profile = DeviceProfile.load(profile_files.shipped_path(self.name))
        devices = {
            kind: record.model_copy(update={"backend": OPENED_WITH[kind]})
            if record.backend == "simulated"
            else record
            for kind, record in profile.devices.items()
            if kind in OPENED_WITH
        }
        return profile.model_copy(update={"devices": devices})


def nearest_shipped(npu: str | None = None) -> Nearest | None:
    """Return the nearest shipped profile; None if there is none of this machine's kind.

    `npu` is the backend that is to be opened as NPU: a Snapdragon whose Hexagon is not to be used
    computes as any 64-bit Arm processor does.
    """
    if snapdragon.is_snapdragon():
        if npu in (None, "qnn") and npu_driver.names_qualcomm():
            return _of_snapdragon(snapdragon.reported())
        name = profile_files.shipped_host()
        why = "no 64-bit Arm one is shipped, and a PC's devices are the same"
        return None if name is None else Nearest(name, why)
    name = profile_files.shipped_host()
    return None if name is None else Nearest(name, _of_pc(name))


def _of_pc(name: str) -> str:
    """Return what a PC's profile has in common with this machine."""
    level = (chosen_level() or processor_levels()[0]).name
    own = "host-avx2" if level.startswith("avx") else ""
    if level == "avx512-vnni":
        own = "host-amx" if name == "host-amx" and "amx_int8" in cpu_flags() else "host"
    kind = PC_LEVELS.get(name, "a PC")
    return f"{kind}, as this machine" if own == name else f"{kind}: the nearest to this one"


def _of_snapdragon(reported: str) -> Nearest | None:
    """Return the profile of a chip that the system reports by these words."""
    chip = snapdragon.chip_named(reported)
    shipped = {
        x: x.profile_name for x in CHIPS.values() if x.profile_name in profile_files.shipped_names()
    }
    if chip in shipped:
        return Nearest(shipped[chip], f"it is of this chip, {chip.label}")
    like = chip or snapdragon.relative_of(reported) or CHIPS[DEFAULT_CHIP]
    if not shipped:
        return None
    nearest = min(shipped, key=lambda x: _distance(x, like))
    shown = chip.title if chip else " ".join(reported.split()) or "a Snapdragon without a name"
    return Nearest(shipped[nearest], f"the nearest to this chip, {shown}, is {nearest.title}")


def _distance(chip: Chip, other: Chip) -> tuple[bool, int, int]:
    """Return how far a chip is from another: its family first, then its Hexagon's age."""
    family = chip.name[:2] != other.name[:2]
    return family, abs(chip.htp_arch - other.htp_arch), -chip.htp_arch
