"""The self-test's child with faults in its kernels or in the device's record.

PLANTED is JSON: `faults` by level (`crash`, `hang`, `wrong`), `cpu_name` for the device's record
before it is repaired, `unrepaired` to leave it so, `first` to try so many families of kernels only.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

from hetero.backends.opencl import program_source
from hetero.backends.opencl.drivers import pocl_repair
from hetero.backends.opencl.drivers.pocl import Pocl
from hetero.backends.opencl.self_test import cases, worker

# Instead of the sum in the kernel `add`, which is called with work and without.
SUM = "y[j] = from_a[j] + from_b[j]"
FAULTS = {
    "crash": "y[j] = *(volatile __global float *)(size_t)(16 + j)",
    "hang": "for (volatile int never = 1; never;) y[j] = 0",
    "wrong": "y[j] = from_a[j] - from_b[j]",
}
PLANTED: dict[str, Any] = json.loads(os.environ["PLANTED"])
cases.DEADLINE_S = 1.0


def plant_fault(fault: str) -> None:
    """Change the kernel `add`."""
    original = program_source.source

    def source(name: str) -> str:
        text = original(name)
        assert name != "elementwise.cl" or SUM in text
        return text.replace(SUM, FAULTS[fault])

    program_source.source = source  # type: ignore[assignment]


def keep_first(count: int) -> None:
    """Leave the other families out of a self-test."""
    every = cases.cases
    cases.cases = lambda: itertools.islice(every(), count)


class PlantedPocl(Pocl):
    """PoCL on a processor that LLVM calls otherwise."""

    def prepare(self, device: Any, level: Any) -> None:
        """Write the other name first."""
        if "cpu_name" in PLANTED:
            triple = pocl_repair.target_triple(device.version)
            assert pocl_repair.repair(device.int_ptr, triple, PLANTED["cpu_name"]) is not None
        if not PLANTED.get("unrepaired"):
            super().prepare(device, level)


class Session(worker.WorkerSession):
    """Plants what the level is to have."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        if self.level.name in PLANTED.get("faults", {}):
            plant_fault(PLANTED["faults"][self.level.name])


if __name__ == "__main__":
    if "first" in PLANTED:
        keep_first(PLANTED["first"])
    worker.WorkerSession = Session  # type: ignore[misc]
    worker.driver_of_platform = lambda _: PlantedPocl()  # type: ignore[assignment]
    worker.main()
