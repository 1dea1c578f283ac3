"""The built programs of one context, each built once for each set of defines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import pyopencl as cl

from hetero.backends.opencl.program_source import Define, ProgramSource, program_source
from hetero.backends.opencl.proving.compiler import Compiler, Variant


class ProgramCache:
    """Built programs by their source; `compiler` makes those that are missing."""

    def __init__(self, context: cl.Context, device: cl.Device, compiler: Compiler) -> None:
        self._context = context
        self._device = device
        self._compiler = compiler
        self._programs: dict[str, cl.Program] = {}
        self._sources: dict[int, ProgramSource] = {}  # by id of a program that is kept above

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
        return self.take(program_source(name, defines, before=before, options=options))

    def take(self, source: ProgramSource) -> cl.Program:
        """The program of a source; see `get`."""
        if source.digest not in self._programs:
            program = self._compiler.program(self._context, self._device, source)
            self._programs[source.digest] = program
            self._sources[id(program)] = source
        return self._programs[source.digest]

    def source_of(self, program: cl.Program) -> ProgramSource:
        """What one of these programs was built from."""
        return self._sources[id(program)]

    def first_launch(self, program: cl.Program, variant: Variant) -> AbstractContextManager[None]:
        """The first launch of a kernel of one of these programs at some sizes goes inside."""
        return self._compiler.variant(self._sources[id(program)], variant)

    def close(self) -> None:
        """Drop every program."""
        self._programs.clear()
        self._sources.clear()
        self._compiler.close()
