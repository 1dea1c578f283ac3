"""A selected device, with everything that follows from its driver and level."""

from __future__ import annotations

from dataclasses import dataclass

import pyopencl as cl

from hetero.backends.opencl.drivers.driver import Driver
from hetero.backends.opencl.drivers.levels import Level
from hetero.backends.opencl.self_test.program_compiler import ProgramCompiler


@dataclass(frozen=True)
class Selected:
    """Arguments of `OpenCLDevice`.

    `cores` are what its driver's threads are pinned to (empty: it has cores of its own), `threads`
    how many compute. `note` says what a process has that uses OpenCL for the first time, and this
    one lacks.
    """

    device: cl.Device
    driver: Driver
    level: Level
    compiler: ProgramCompiler
    cores: tuple[int, ...] = ()
    threads: int = 1
    note: str = ""

    @property
    def family(self) -> str:
        """Return the tuning record of its kernels."""
        names = f"{self.device.platform.name} {self.device.name}"
        return self.driver.family(self.level, names)
