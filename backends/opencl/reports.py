"""What `hetero devices` and `hetero doctor` tell of an OpenCL driver."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
