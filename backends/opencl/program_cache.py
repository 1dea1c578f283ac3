"""The built programs of one context, each built once for each set of defines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Final

import pyopencl as cl

from hetero.backends.host import forks
from hetero.backends.host.background import Background, in_background
from hetero.backends.host.versions import installed_version
from hetero.backends.opencl.program_source import (
    Define,
    ProgramSource,
    program_source,
    source_of,
)
from hetero.backends.opencl.self_test.program_compiler import ProgramCompiler, Variant

MAX_NOTED: Final = 64


class ProgramCache:
    """Built programs by their source.

    `compiler` makes missing ones. Control thread only, but for the thread of `prewarm`,
    which hands over what it built.
    """

    def __init__(self, context: cl.Context, device: cl.Device, compiler: ProgramCompiler) -> None:
        self._context = context
        self._device = device
        self._compiler = compiler
        self._programs: dict[str, cl.Program] = {}
        self._sources: dict[int, ProgramSource] = {}  # by id of a program that is kept above
        self._coming: dict[str, Background[cl.Program | None]] = {}
        self._entry = ""
        self._noted: list[ProgramSource] | None = None  # of `prewarm`: under which name, and what

    def get(
        self,
        name: str,
        defines: Mapping[str, Define],
        *,
        before: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> cl.Program:
        """Return the program of `kernels/<name>`, with `defines` as macros.

        It is compiled after `common.cl` and `before`.

        Raises `DeviceError` with the first lines of the build log.
        """
        return self.take(program_source(name, defines, before=before, options=options))

    def take(self, source: ProgramSource) -> cl.Program:
        """Return the program of a source; see `get`."""
        if source.digest not in self._programs:
            coming = self._coming.get(source.digest)
            program = None if coming is None else coming.result()
            self._coming.pop(source.digest, None)
            if program is None:
                program = self._compiler.program(self._context, self._device, source)
            self._add(source, program)
        return self._programs[source.digest]

    def _add(self, source: ProgramSource, program: cl.Program) -> None:
        self._programs[source.digest] = program
        self._sources[id(program)] = source

    def known(self, source: ProgramSource) -> cl.Program | None:
        """Return the program of a source if it is compiled already, in this process or another."""
        if source.digest not in self._programs:
            coming = self._coming.pop(source.digest, None)
            program = self._known(source) if coming is None else coming.result()
            if program is None:
                return None
            self._add(source, program)
        return self._programs[source.digest]

    def source_of(self, program: cl.Program) -> ProgramSource:
        """Return the source that one of these programs was built from."""
        return self._sources[id(program)]

    @contextmanager
    def prewarm(self, what: str) -> Iterator[bool]:
        """Record the programs used inside, or until `close`, under `what`.

        Those recorded by this version are built on a thread from now on. Yield whether there was a
        record.
        """
        name = f"programs of {what} by hetero {installed_version('hetero')}"
        self._entry = hashlib.sha256(name.encode()).hexdigest()
        self._noted = _sources(self._compiler.recall(self._entry))
        sources = [x for x in self._noted or () if x.digest not in self._programs]
        builds = in_background("hetero-programs", [partial(self._known, x) for x in sources])
        self._coming |= {x.digest: build for x, build in zip(sources, builds, strict=True)}
        try:
            yield self._noted is not None
        except BaseException:
            self.discard_prewarm()
            self._forget_coming()
            raise
        self._note()

    def _known(self, source: ProgramSource) -> cl.Program | None:
        with forks.forbidden():
            return self._compiler.known(self._context, self._device, source)

    def discard_prewarm(self) -> None:
        """Record no prewarm list this time."""
        self._entry = ""

    def _note(self) -> None:
        """Record the programs that are used, where that has a purpose.

        Programs recorded earlier stay on the list.
        """
        known = self._noted or []
        used = [*self._sources.values()]
        if self._entry and (self._noted is None or not set(used) <= set(known)):
            self._noted = list(dict.fromkeys([*used, *known]))[:MAX_NOTED]
            noted = [(x.name, x.options, x.files or x.text) for x in self._noted]
            self._compiler.note(self._entry, json.dumps(noted).encode())

    def _forget_coming(self) -> None:
        for build in self._coming.values():
            build.cancel()
        for build in self._coming.values():
            build.wait()
        self._coming.clear()

    def first_launch(self, program: cl.Program, variant: Variant) -> AbstractContextManager[None]:
        """Return a context for the first launch of a kernel at some sizes.

        The kernel is of one of these programs.
        """
        return self._compiler.variant(self._sources[id(program)], variant)

    def close(self) -> None:
        """Drop every program."""
        self._forget_coming()
        self._note()
        self._entry = ""
        self._programs.clear()
        self._sources.clear()
        self._compiler.close()


def _sources(noted: bytes | None) -> list[ProgramSource] | None:
    """Return the recorded programs whose files exist; None where the record cannot be read."""
    sources = []
    try:
        for name, options, files in json.loads(noted or b""):
            with suppress(OSError):
                if isinstance(files, str):
                    sources.append(ProgramSource(str(name), files, tuple(options)))
                else:
                    sources.append(source_of(files, options))
                sources[-1].digest  # noqa: B018, which options that are no text do not have
    except (ValueError, TypeError, IndexError, RecursionError):  # of another version
        return None
    return sources
