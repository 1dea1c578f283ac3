"""What people are told of OpenCL drivers; no OpenCL is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Progress of a trial.
PREPARING: Final = "preparing OpenCL kernels for this processor, once"
CHECKING: Final = "checking OpenCL kernels again: a run that used them did not end by itself"


@dataclass(frozen=True)
class DriverReport:
    """An installed driver's device and the verdict of its trial. `level` is the best that passed;
    `said` what each level did; `kept_in` the file that remembers it.
    """

    driver: str
    origin: str
    title: str
    level: str | None
    said: str
    kept_in: Path
