"""Programs from the package's `kernels/*.cl`, built once per set of defines.

Binaries are kept on disk for every platform but PoCL. A PoCL binary is an archive of PoCL's own
cache folder, in which PoCL keeps programs, and kernels specialised for their sizes, by itself
(`POCL_CACHE_DIR`, see `platform.prepare_environment`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

import pyopencl as cl

from hetero.backends.opencl.failures import decoded

Define = int | float | str
COMMON = "common.cl"
OPTIONS = ("-cl-std=CL1.2", "-cl-mad-enable")
_MAGIC = b"hetero-cl-1\n"


@cache
def source(name: str) -> str:
    """Text of one file of `kernels/`."""
    return resources.files("hetero.backends.opencl").joinpath("kernels", name).read_text("utf-8")


class ProgramCache:
    """Built programs of one context, in memory and, except on PoCL, on disk.

    `key` is everything beyond source and options that binaries depend on: device, driver, CPU.
    `directory` is None where binaries are not kept.
    """

    def __init__(
        self, context: cl.Context, device: cl.Device, *, key: str, directory: Path | None
    ) -> None:
        self._context = context
        self._device = device
        self._key = key
        self._directory = directory
        self._programs: dict[str, cl.Program] = {}
        self.builds = 0

    def get(
        self,
        name: str,
        defines: Mapping[str, Define],
        *,
        before: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> cl.Program:
        """The program of `kernels/<name>` after `common.cl` and `before`, `defines` as macros.

        Raises `DeviceError` with the first lines of the build log.
        """
        text = "".join(source(part) for part in (COMMON, *before, name))
        flags = [*OPTIONS, *options, *(f"-D{key}={_literal(defines[key])}" for key in defines)]
        digest = hashlib.sha256("\0".join([text, *flags, self._key]).encode()).hexdigest()
        if digest not in self._programs:
            self._programs[digest] = self._load(digest) or self._build(name, text, flags, digest)
        return self._programs[digest]

    def close(self) -> None:
        """Drop every program."""
        self._programs.clear()

    def _build(self, name: str, text: str, flags: list[str], digest: str) -> cl.Program:
        self.builds += 1
        program = uncached(self._context, text)
        with decoded(f"building {name} for {self._device.name}"):
            program.build(options=flags)
        if self._directory is not None:
            binary = bytes(program.binaries[0])
            _write(self._directory / f"{digest}.bin", binary)
        return program

    def _load(self, digest: str) -> cl.Program | None:
        """A program from disk, None when there is none or it is broken or refused."""
        if self._directory is None:
            return None
        binary = _read(self._directory / f"{digest}.bin")
        if binary is None:
            return None
        try:
            program = cl.Program(self._context, [self._device], [binary])
            program.build()
        except cl.Error:  # another driver than the key says: rebuilt from source
            return None
        return program


def uncached(context: cl.Context, text: str) -> cl.Program:
    """A program that pyopencl does not keep in its own cache (its warning says just that)."""
    program = cl.Program(context, text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _ = program.reference_count
    return program


def _literal(value: Define) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)


def _write(path: Path, binary: bytes) -> None:
    """Write atomically, with a checksum; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(binary).digest() + binary)
        Path(temporary).replace(path)


def _read(path: Path) -> bytes | None:
    """The binary, None when it is missing or its checksum is wrong."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    head, binary = content[: len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    return binary if head == _MAGIC + hashlib.sha256(binary).digest() else None
