"""The texts of `kernels/*.cl`; nothing here needs OpenCL."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

OURS: Final = "HETERO_KERNELS"  # macro that every program of these files is built with


@cache
def source(name: str) -> str:
    """Return the text of one file of `kernels/`."""
    return resources.files("hetero.backends.opencl").joinpath("kernels", name).read_text("utf-8")


@cache
def all_sources() -> Mapping[str, str]:
    """Return all kernel files by name."""
    folder = resources.files("hetero.backends.opencl").joinpath("kernels")
    texts = ((f.name, f.read_text("utf-8")) for f in folder.iterdir() if f.name[-3:] == ".cl")
    return dict(sorted(texts))


@cache
def sources_digest() -> str:
    """Return the identity of all kernel files."""
    return hashlib.sha256(repr([*all_sources().items()]).encode()).hexdigest()
