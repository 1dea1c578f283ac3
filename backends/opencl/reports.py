"""Reports on OpenCL drivers for people; no OpenCL is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero.backends.host.time_limits import VARIABLE

NO_DEVICE: Final = "CL_DEVICE_NOT_FOUND"
HUNG: Final = "hung"
# Progress of a self-test.
PREPARING: Final = "preparing OpenCL kernels for this processor, once"
CHECKING: Final = "checking OpenCL kernels again: a run that used them did not end by itself"


@dataclass(frozen=True)
class DriverReport:
    """An installed driver's device and the result of its self-test.

    `level` is the best that passed; `said` what each level did; `result_path` the file with
    it.
    """

    driver: str
    origin: str
    title: str
    level: str | None
    said: str
    result_path: Path

    @property
    def remedy(self) -> str:
        """Return what to do where no level passed."""
        if self.level is not None:
            return ""
        if NO_DEVICE in self.said:
            return (
                "see that its device nodes are in /dev and this user may open them; Mesa's rusticl "
                "lists a GPU with RUSTICL_ENABLE set to its driver (freedreno, iris, radeonsi)"
            )
        slow = f"if this machine is only slow, set {VARIABLE}=4; " if HUNG in self.said else ""
        return f"{slow}to try it again, delete {self.result_path}"
