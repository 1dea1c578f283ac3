"""Snapdragon chips by name: the numbers that the QNN compiler wants for each.

`soc_model` and `htp_arch` are Qualcomm's identifiers (QnnHtpDevice.h; the same table is in
executorch's `qc_compiler_spec`). Mismatched pairs are accepted by the compiler without a word,
which is why they are never given apart.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from hetero.backends.host.processor import is_arm64, registered_processor

MIB = 2**20
# A process domain on the NPU has 32-bit addresses. Of these, what its code, stacks and I/O need.
PROCESS_LIMIT_BYTES = 4 << 30
RESERVED_BYTES = 512 << 20
# QNN puts a context that is loaded from a file into the next of several domains when one is full
# (onnxruntime-qnn, pull requests 517 and 752); users report four for one program
# (powerserve-project/PowerServe, issue 6). Older chips are taken to have one.
DOMAINS, DOMAINS_SINCE = 4, 73
DOMAIN_BYTES = PROCESS_LIMIT_BYTES - RESERVED_BYTES  # for graphs
# What a full domain may be left with, because the next context is larger.
DOMAIN_LOSS_BYTES = 128 << 20
# MatMulNBits is refused before this architecture.
BLOCK_QUANTIZED_SINCE = 69


@dataclass(frozen=True)
class Chip:
    """One chip. `vtcm_mib` is the tightly coupled memory of its tensor processor."""

    name: str
    title: str
    soc_model: int
    htp_arch: int
    vtcm_mib: int = 8

    @property
    def label(self) -> str:
        """Return the name for people: `Snapdragon 8 Gen 3 (sm8650, Hexagon v75)`."""
        return f"{self.title} ({self.name}, Hexagon v{self.htp_arch})"

    @property
    def profile_name(self) -> str:
        """Return the name that a shipped profile of the chip has."""
        return self.title.lower().replace(" ", "-")

    @property
    def domains(self) -> int:
        """Return how many process domains the contexts of one program may be in."""
        return DOMAINS if self.htp_arch >= DOMAINS_SINCE else 1

    @property
    def npu_limit_bytes(self) -> int:
        """Return what all contexts of one program may hold together."""
        return self.domains * DOMAIN_BYTES - (self.domains - 1) * DOMAIN_LOSS_BYTES


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm8450", "Snapdragon 8 Gen 1", 36, 69),
        Chip("sm8475", "Snapdragon 8+ Gen 1", 42, 69),
        Chip("sm8550", "Snapdragon 8 Gen 2", 43, 73),
        Chip("sm8650", "Snapdragon 8 Gen 3", 57, 75),
        Chip("sm8750", "Snapdragon 8 Elite", 69, 79),
        Chip("sm8850", "Snapdragon 8 Elite Gen 5", 87, 81),
        Chip("sc8380xp", "Snapdragon X Elite", 60, 73),
        Chip("sc8480xp", "Snapdragon X2 Elite", 88, 81),
        Chip("qcs9075", "IQ-9075", 77, 73),
    )
}
DEFAULT_CHIP = "sm8650"


# The kernel's name of a chip where it is not ours: a part's number, or the platform's code name.
MACHINES = {
    "x1e80100": "sc8380xp", "x1e78100": "sc8380xp", "hamoa": "sc8380xp", "x2e80100": "sc8480xp",
    "glymur": "sc8480xp", "canoe": "sm8850", "sun": "sm8750", "pineapple": "sm8650",
    "kalama": "sm8550", "waipio": "sm8450", "lemans": "qcs9075",
}  # fmt: skip
# Smaller parts of a laptop's chip, by what the system calls them.
RELATIVES = {r"\bx2p|x2 plus": "sc8480xp", r"\bx1p|x plus|\bx1-2": "sc8380xp"}
MACHINE_FILE = Path("/sys/devices/soc0/machine")  # written by Linux's qcom-socinfo
DEVICE_TREE = Path("/proc/device-tree/compatible")
ROOT = Path("/")
NODES = "fastrpc-cdsp*"  # of Linux's FastRPC driver; the QNN provider looks for them, too
NODE_REMEDY = (
    "use a kernel with the fastrpc driver (CONFIG_QCOM_FASTRPC) and this machine's DSP firmware"
)


def is_snapdragon() -> bool:
    """Return whether the processor is of a family with a Hexagon: 64-bit Arm, but not Apple's."""
    return is_arm64() and platform.system() != "Darwin"


def fastrpc_nodes(root: Path | None = None) -> list[Path]:
    """Return the device nodes of the compute DSP; none on systems other than Linux."""
    return sorted(((root or ROOT) / "dev").glob(NODES))


def may_open(node: Path) -> bool:
    """Return whether this user may open a device node."""
    return os.access(node, os.R_OK | os.W_OK)


def chip_here() -> Chip | None:
    """Return the chip of this machine, where Linux names it and it is one of `CHIPS`."""
    try:
        name = MACHINE_FILE.read_text(encoding="utf-8").strip().lower()
    except (OSError, UnicodeDecodeError):
        return None
    return CHIPS.get(MACHINES.get(name, name))


def chip_named(text: str) -> Chip | None:
    """Return the chip that a sentence names: `Snapdragon(R) X Elite - X1E80100 - Qualcomm …`.

    By its number, the kernel's name, or its title; None where it names none of `CHIPS`.
    """
    words = f" {_words(text)} "
    titles = {_words(x.title.removeprefix("Snapdragon ")): x for x in CHIPS.values()}
    numbers = dict(CHIPS) | {name: CHIPS[of] for name, of in MACHINES.items()}
    for names in (numbers, titles):
        for name in sorted(names, key=len, reverse=True):
            if f" {name} " in words:
                return names[name]
    return None


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9+]+", " ", text.lower()).split())


def relative_of(text: str) -> Chip | None:
    """Return the chip of which a sentence names a smaller part, such as X Plus of X Elite."""
    plain = text.lower()
    return next((CHIPS[x] for form, x in RELATIVES.items() if re.search(form, plain)), None)


def reported() -> str:
    """Return all names of this machine's chip: the kernel's, the device tree's, and Windows'."""
    names = [_text(MACHINE_FILE), _text(DEVICE_TREE).replace("\0", " "), registered_processor()]
    return " ".join(filter(None, names))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def find_chip(name: str) -> Chip:
    """Return the chip of that name. Raises `ValueError` with the nearest known name."""
    key = name.lower()
    if key in CHIPS:
        return CHIPS[key]
    near = difflib.get_close_matches(key, CHIPS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown chip {name!r}: {hint}known are {', '.join(CHIPS)}")
