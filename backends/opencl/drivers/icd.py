"""The OpenCL drivers that are installed: their libraries, listed without loading any.

pyopencl's loader (ocl-icd) loads the drivers of one vendor folder, and the PoCL that pip put next
to pyopencl. pip's packages cannot write to the system's folder, and what Intel's package brings has
a placeholder for a path; so hetero lists all of them itself, tries each in a child process, and
gives the loader a folder of its own with the drivers that passed (`loader`). Where the loader is
another one (Windows, macOS) all drivers are one candidate: whatever the system's loader brings.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from hetero.backends.opencl.drivers import VENDOR, driver_of_library
from hetero.backends.opencl.drivers.driver import Driver

VENDOR_VARIABLES: Final = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH")
SYSTEM_VENDORS: Final = Path("/etc/OpenCL/vendors")
LIBRARY_FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
    "/usr/local/lib", "/lib64", "/lib", "/vendor/lib64", "/system/vendor/lib64",
)  # fmt: skip
DEVICE_NODES: Final = ("dri/*", "nvidia*", "kgsl*", "mali*", "kfd")
INTEL_PACKAGE: Final = "intel-opencl-rt"
HASHED_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class DriverCandidate:
    """A driver's library.

    `library` is empty where the system's loader decides what is loaded; `origin` says where it was
    found.
    """

    library: str
    driver: Driver
    origin: str

    @property
    def path(self) -> Path | None:
        """Return the library's file, None if it is not known."""
        if not self.library:
            return None
        name = Path(self.library)
        if name.is_absolute():
            return name if os.path.exists(name) else None
        folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *LIBRARY_FOLDERS]
        return next((p for p in (Path(f) / name for f in folders if f) if os.path.exists(p)), None)

    def fingerprint(self) -> str:
        """Return a string that changes with the library, or with a GPU driver's devices."""
        path = self.path
        facts = [self.library, str(path), self.driver.revision()]
        if path is not None:
            with contextlib.suppress(OSError):  # one that this user may not read does not load
                state = path.stat()
                facts += [str(path.resolve()), str(state.st_size), str(state.st_mtime_ns)]
                facts.append(_sampled(path, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
        if not self.driver.computes_on_cpu:
            facts += sorted(str(p) for glob in DEVICE_NODES for p in Path("/dev").glob(glob))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def candidates() -> list[DriverCandidate]:
    """Return every installed driver.

    The vendors' first (GPUs), then PoCL, then other CPU drivers.
    """
    if not sys.platform.startswith("linux"):
        return [DriverCandidate("", VENDOR, "the system's OpenCL loader")]
    by_file: dict[str, DriverCandidate] = {}
    for library, origin in _libraries():
        candidate = DriverCandidate(library, driver_of_library(library), origin)
        real = str(candidate.path.resolve()) if candidate.path is not None else library
        by_file.setdefault(real, candidate)
    order = ("vendor", "pocl", "intel")
    return sorted(by_file.values(), key=lambda c: order.index(c.driver.name))


def missing_folder() -> str:
    """Return `VARIABLE=FOLDER` of a vendor folder that the user names and that cannot be read."""
    named = _named_vendors()
    return "" if named is None or os.access(named[1], os.R_OK) else "=".join(named)


def _named_vendors() -> tuple[str, str] | None:
    return next(((v, os.environ[v]) for v in VENDOR_VARIABLES if os.environ.get(v)), None)


def _libraries() -> Iterator[tuple[str, str]]:
    """Yield (library, origin): the wheels' first, so that a system's link to one is skipped."""
    named = _named_vendors()
    vendors = SYSTEM_VENDORS if named is None else Path(named[1])
    if missing_folder():
        return  # as the loader has it: a folder that is not there means no driver
    if os.path.isdir(vendors) or named is None:
        yield from _bundled()
    icds = [vendors] if os.path.isfile(vendors) else sorted(vendors.glob("*.icd"))
    for icd in icds:
        library = str(icd) if icd.suffix != ".icd" else _first_line(icd)
        if library:
            yield library, str(icd)


def _bundled() -> Iterator[tuple[str, str]]:
    spec = importlib.util.find_spec("pyopencl")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / ".libs"
        for icd in sorted(folder.glob("*.icd")):
            name = _first_line(icd)
            if name and (folder / name).exists():
                yield str(folder / name), "pip: pyopencl[pocl]"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(INTEL_PACKAGE) or ():
            if file.name == "libintelocl.so":
                yield str(Path(str(file.locate())).resolve()), f"pip: {INTEL_PACKAGE}"


def _first_line(icd: Path) -> str:
    """Return the library that an .icd file names; empty for one that cannot be read."""
    try:
        with icd.open(encoding="utf-8", errors="replace") as file:
            return file.readline(4096).strip()
    except OSError:
        return ""


@cache
def _sampled(path: Path, size: int, *_times: int) -> str:
    """Return the hash of a library's first and last megabyte and of one in the middle.

    Hashing all of a driver's hundred megabytes would take longer than loading it. Once for each
    state of a file.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in sorted({0, max(0, size // 2), max(0, size - HASHED_BYTES)}):
            file.seek(start)
            digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()
