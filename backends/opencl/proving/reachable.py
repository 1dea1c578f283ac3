"""What of the cache the drivers that are installed here would still find."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hetero.backends.opencl.drivers.icd import candidates
from hetero.backends.opencl.proving.trial import folder_prefix
from hetero.backends.opencl.proving.verdicts import verdict_key, verdict_path


class Reachable(NamedTuple):
    """Files of verdicts, and how the names of folders with kernels begin, before the level."""

    verdicts: frozenset[Path]
    kernels: frozenset[str]


def reachable(root: Path) -> Reachable:
    """Of this machine, this hetero and this environment; another's are under other names."""
    found = candidates()
    return Reachable(
        frozenset(verdict_path(root, verdict_key(x)) for x in found),
        frozenset(folder_prefix(x) for x in found),
    )
