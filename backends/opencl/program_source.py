"""Program texts from the package's `kernels/*.cl`, and what identifies a built program."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, TypeAlias

import pyopencl as cl

from hetero.backends.opencl.kernel_files import source

Define: TypeAlias = int | float | str
COMMON: Final = "common.cl"
STANDARD: Final = "-cl-std="
OPTIONS: Final = (f"{STANDARD}CL1.2", "-cl-mad-enable")


@dataclass(frozen=True)
class ProgramSource:
    """One program to build: its name for messages, its text, the compiler's options.

    `files` of `kernels/` that the text is, where it is some.
    """

    name: str
    text: str
    options: tuple[str, ...]
    files: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Return the identity of what is compiled."""
        return hashlib.sha256("\0".join([self.text, *self.options]).encode()).hexdigest()


def program_source(
    name: str,
    defines: Mapping[str, Define],
    *,
    before: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> ProgramSource:
    """Return `kernels/<name>` after `common.cl` and `before`, with `defines` as macros.

    It is OpenCL C 1.2 unless `options` name another standard.
    """
    macros = (f"-D{key}={_literal(value)}" for key, value in defines.items())
    named = any(option.startswith(STANDARD) for option in options)
    usual = [x for x in OPTIONS if not (named and x.startswith(STANDARD))]
    return source_of((COMMON, *before, name), (*usual, *options, *macros))


def source_of(files: Sequence[str], options: Sequence[str]) -> ProgramSource:
    """Return the program of files of `kernels/`, whose name is the last one's."""
    return _source_of(tuple(files), tuple(options))


@lru_cache(maxsize=512)  # with its digest: every call of a step asks for its program
def _source_of(files: tuple[str, ...], options: tuple[str, ...]) -> ProgramSource:
    text = "".join(source(part) for part in files)
    return ProgramSource(files[-1], text, options, files)


def uncached(context: cl.Context, text: str) -> cl.Program:
    """Return a program that pyopencl does not keep in its own cache."""
    return cl.Program(cl._cl._Program(context, text))


def _literal(value: Define) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
