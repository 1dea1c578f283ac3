"""The cache entries that the drivers installed here could still load."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hetero.backends.opencl.drivers.icd import candidates
from hetero.backends.opencl.self_test.results import result_key, result_path
from hetero.backends.opencl.self_test.runner import folder_prefix


class Reachable(NamedTuple):
    """Files of results, and prefixes of the names of folders with kernels, before the level."""

    results: frozenset[Path]
    kernels: frozenset[str]


def reachable(root: Path) -> Reachable:
    """Return what this machine, this hetero and this environment can use.

    Others have other names.
    """
    listed = candidates()
    return Reachable(
        frozenset(result_path(root, result_key(x)) for x in listed),
        frozenset(folder_prefix(x) for x in listed),
    )
