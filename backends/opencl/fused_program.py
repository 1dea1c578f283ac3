"""Programs of many kernels, which fused launches call by number (`megakernel`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pyopencl as cl

from hetero.backends.opencl.program_source import ProgramSource


class Called(NamedTuple):
    """A kernel that a fused launch calls, and the letters of its arguments (`Variant`)."""

    source: ProgramSource
    kernel: str
    kinds: str


class FusedProgram(NamedTuple):
    """A program of kernels, the number that each has in it, and the words of an entry."""

    program: cl.Program
    numbers: Mapping[Called, int]
    width: int
