"""Program texts from the package's `kernels/*.cl`, and what identifies a built program."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Final, TypeAlias

import pyopencl as cl

Define: TypeAlias = int | float | str
COMMON: Final = "common.cl"
OPTIONS: Final = ("-cl-std=CL1.2", "-cl-mad-enable")


@dataclass(frozen=True)
class ProgramSource:
    """One program to build: its name for messages, its text, the compiler's options."""

    name: str
    text: str
    options: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """Identity of what is compiled."""
        return hashlib.sha256("\0".join([self.text, *self.options]).encode()).hexdigest()


@cache
def source(name: str) -> str:
    """Text of one file of `kernels/`."""
    return resources.files("hetero.backends.opencl").joinpath("kernels", name).read_text("utf-8")


@cache
def sources_digest() -> str:
    """Identity of all kernel files."""
    folder = resources.files("hetero.backends.opencl").joinpath("kernels")
    texts = sorted((f.name, f.read_text("utf-8")) for f in folder.iterdir() if f.name[-3:] == ".cl")
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def program_source(
    name: str,
    defines: Mapping[str, Define],
    *,
    before: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> ProgramSource:
    """`kernels/<name>` after `common.cl` and `before`, with `defines` as macros."""
    text = "".join(source(part) for part in (COMMON, *before, name))
    macros = (f"-D{key}={_literal(value)}" for key, value in defines.items())
    return ProgramSource(name, text, (*OPTIONS, *options, *macros))


def uncached(context: cl.Context, text: str) -> cl.Program:
    """A program that pyopencl does not keep in its own cache (its warning says just that)."""
    program = cl.Program(context, text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _ = program.reference_count
    return program


def _literal(value: Define) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
