"""Compiles programs and kernels: in this process, or in a child that may die of it.

A driver's compiler is the most complex native code there is here, and the least tested: it has
crashed, hung, and killed its process over a full disk. So the user's process never runs it.
`Remote` takes what the store has, else asks a child process, which compiles into the same folder
and the same store; this process then only loads what was compiled. `Local` is that child.

PoCL compiles a kernel a second time for each work-group size, when it is first launched: a
*variant*. Both kinds of result are entries of the store (`store.KernelStore`).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import pyopencl as cl

from hetero.backends.opencl.failures import decoded
from hetero.backends.opencl.kernel_files import OURS
from hetero.backends.opencl.program_source import ProgramSource, uncached
from hetero.backends.opencl.self_test.kernel_store import KernelStore

BINARY: Final = "program.bin"
NOTE: Final = "note"
SMALL_GRID: Final = 0xFFFF  # PoCL has a variant for grids below that in every dimension
UNCACHED_FILES: Final = ("last_accessed", "tempfile")


@dataclass(frozen=True)
class Variant:
    """A kernel at a work-group size, as launched.

    `kinds` has a letter for each argument: `b` buffer, `i` int32, `u` uint32, `f` float32.
    """

    kernel: str
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    kinds: str

    def entry(self, source: ProgramSource) -> str:
        """Name in the store: what PoCL distinguishes."""
        small = max(self.global_size) < SMALL_GRID
        sizes = "-".join(map(str, self.local_size))
        text = f"{source.digest}|{self.kernel}|{sizes}|{small}"
        return hashlib.sha256(text.encode()).hexdigest()


class ProgramCompiler(ABC):
    """Makes built programs of one device. `Remote` for any thread, `Local` for one at a time."""

    @abstractmethod
    def program(self, context: cl.Context, device: cl.Device, source: ProgramSource) -> cl.Program:
        """Return a built program. Raises `DeviceError` with the first lines of the build log."""

    @abstractmethod
    def variant(
        self, source: ProgramSource, variant: Variant
    ) -> contextlib.AbstractContextManager[None]:
        """Return the first launch of a kernel at these sizes goes inside."""

    def known(
        self, _context: cl.Context, _device: cl.Device, _source: ProgramSource
    ) -> cl.Program | None:
        """Return a program that is compiled already, None where it is not."""
        return None

    def recall(self, _entry: str) -> bytes | None:
        """Return what was noted under a name, None where nothing was or can be."""
        return None

    def note(self, entry: str, content: bytes) -> None:  # noqa: B027
        """Store something next to the programs, as `recall` finds it."""

    def close(self) -> None:  # noqa: B027
        """Stop whatever compiles."""


class Local(ProgramCompiler):
    """Compiles in this process, from and into the store.

    `folder` is where a driver that keeps compiled kernels itself does so; None for one that does
    not.
    """

    def __init__(self, store: KernelStore, folder: Path | None) -> None:
        self._store = store
        self._folder = folder
        self.builds = 0  # that were not in the store

    def program(self, context: cl.Context, device: cl.Device, source: ProgramSource) -> cl.Program:
        """See `ProgramCompiler.program`."""
        if self._folder is None:
            known = _from_binary(context, device, self._store, source)
            if known is not None:
                return known
        with self._caching(source.digest):
            program = _build(context, device, source)
        if self._folder is None:
            self.builds += 1
            self._store.put(source.digest, {BINARY: bytes(program.binaries[0])})
        return program

    @contextmanager
    def variant(self, source: ProgramSource, variant: Variant) -> Iterator[None]:
        """See `ProgramCompiler.variant`."""
        with self._caching(variant.entry(source)):
            yield

    @contextmanager
    def _caching(self, entry: str) -> Iterator[None]:
        """Restore an entry's files, else store the files that appear inside."""
        if self._folder is None or self._store.unpack(entry, self._folder):
            yield
            return
        self.builds += 1
        before = kernel_files(self._folder)
        yield
        new = kernel_files(self._folder) - before
        if new:
            self._store.put(entry, {name: (self._folder / name).read_bytes() for name in new})


class Builder(Protocol):
    """Compiles elsewhere, into the store and the folder; see `supervisor.Supervisor`."""

    def build(self, source: ProgramSource, variant: Variant | None) -> None:
        """Build a program. Raises `DeviceError` if it is wrong or the compiler dies or hangs."""

    def close(self) -> None:
        """Stop it."""


class Remote(ProgramCompiler):
    """Loads what the store has or a child has compiled; never compiles here."""

    def __init__(self, store: KernelStore, folder: Path | None, builder: Builder) -> None:
        self._store = store
        self._folder = folder
        self._builder = builder
        self._here: set[str] = set()  # entries whose files are in the folder
        self._lock = threading.Lock()  # of all above

    def program(self, context: cl.Context, device: cl.Device, source: ProgramSource) -> cl.Program:
        """See `ProgramCompiler.program`."""
        if self._folder is not None:
            self._restore(source.digest, source, None)
            return _build(context, device, source)
        with self._lock:
            known = _from_binary(context, device, self._store, source)
            if known is None:
                self._builder.build(source, None)
                known = _from_binary(context, device, self._store, source)
        # A driver that gives no binaries compiles again, what it has compiled before.
        return known or _build(context, device, source)

    def known(
        self, context: cl.Context, device: cl.Device, source: ProgramSource
    ) -> cl.Program | None:
        """See `ProgramCompiler.known`.

        Starts no child, which would end with the thread that starts it.
        """
        with self._lock:
            if self._folder is None:
                return _from_binary(context, device, self._store, source)
            if not self._unpacked(source.digest, self._folder):
                return None
        return _build(context, device, source)

    @contextmanager
    def variant(self, source: ProgramSource, variant: Variant) -> Iterator[None]:
        """See `ProgramCompiler.variant`."""
        if self._folder is not None:
            self._restore(variant.entry(source), source, variant)
        yield

    def recall(self, entry: str) -> bytes | None:
        """See `ProgramCompiler.recall`."""
        return (self._store.get(entry) or {}).get(NOTE)

    def note(self, entry: str, content: bytes) -> None:
        """See `ProgramCompiler.note`."""
        self._store.put(entry, {NOTE: content})

    def close(self) -> None:
        """See `ProgramCompiler.close`."""
        self._builder.close()

    def _restore(self, entry: str, source: ProgramSource, variant: Variant | None) -> None:
        assert self._folder is not None
        with self._lock:
            if not self._unpacked(entry, self._folder):
                self._builder.build(source, variant)
                self._here.add(entry)

    def _unpacked(self, entry: str, folder: Path) -> bool:
        """Return whether an entry's files are in the folder, from the store if need be."""
        if entry not in self._here:
            with contextlib.suppress(OSError):
                if self._store.unpack(entry, folder):
                    self._here.add(entry)
        return entry in self._here


def kernel_files(folder: Path) -> set[str]:
    """Return the relative paths of what a driver keeps in its folder."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(UNCACHED_FILES)
    }


def _build(context: cl.Context, device: cl.Device, source: ProgramSource) -> cl.Program:
    program = uncached(context, source.text)
    with decoded(f"building {source.name} for {device.name}"), _quiet():
        program.build(options=[*source.options, f"-D{OURS}"])
    return program


class _Here(threading.local):
    """State of a thread: whether it builds. Filters of warnings are those of all threads."""

    builds = False


_HERE = _Here()
_COMPILER_OUTPUT = cl.compiler_output


def _filtered_output(text: str) -> None:
    if not _HERE.builds:
        _COMPILER_OUTPUT(text)


cl.compiler_output = _filtered_output


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress pyopencl's warning that a compiler printed something."""
    _HERE.builds = True
    try:
        yield
    finally:
        _HERE.builds = False


def _from_binary(
    context: cl.Context, device: cl.Device, store: KernelStore, source: ProgramSource
) -> cl.Program | None:
    """Return a program from its binary, None where there is none or the driver refuses it."""
    files: dict[str, bytes] | None = store.get(source.digest)
    if not files or not files.get(BINARY):
        return None
    try:
        with _quiet():
            program = cl.Program(context, [device], [files[BINARY]])
            program.build()
    except cl.Error:
        return None
    return program


def argument_kinds(values: Sequence[object]) -> str:
    """Return the letters of a kernel's arguments; see `Variant`."""
    names = {"int32": "i", "uint32": "u", "float32": "f"}
    return "".join("b" if isinstance(v, cl.Buffer) else names[type(v).__name__] for v in values)
