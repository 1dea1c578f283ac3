"""Probes of how host and device see each other's writes: tried, not assumed.

A device that keeps copies of host memory, or caches that only mapping flushes, reads what it read
before, and the host keeps its own lines. So each buffer is used several times: the host writes new
inputs and poisons the output (its lines are in its caches then), the device computes, and every
value must be the new one.

Where that fails, the same is tried in fine-grained shared virtual memory, which the device then
allocates for pool and caches. Else memory is mapped and unmapped at hand-overs, and where that
fails as well, copied.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from hetero.backends.errors import DeviceOptionError
from hetero.backends.memory import HostBuffer
from hetero.backends.opencl.resources import Resources
from hetero.backends.opencl.visibility import ProbeCall

MEMORY_VARIABLE: Final = "HETERO_OPENCL_MEMORY"


class MemoryModel(NamedTuple):
    """Arguments of `OpenCLDevice`: None is what the device says, or a probe."""

    unified_memory: bool | None = None
    coherent: bool | None = None
    svm: bool = False


MEMORY_MODELS: Final = {
    "": MemoryModel(),
    "svm": MemoryModel(svm=True),
    "mapped": MemoryModel(coherent=False),
    "copied": MemoryModel(unified_memory=False),
}


def chosen_memory() -> MemoryModel:
    """Return what HETERO_OPENCL_MEMORY asks for. Raises `DeviceOptionError` for another word."""
    name = os.environ.get(MEMORY_VARIABLE, "").strip()
    if name not in MEMORY_MODELS:
        raise DeviceOptionError(
            "opencl", f"reading {MEMORY_VARIABLE}={name}", "unknown memory model",
            "known are svm (fine-grained shared virtual memory), mapped (no coherence is assumed) "
            "and copied (nor that memory is shared), or unset it",
        )  # fmt: skip
    return MEMORY_MODELS[name]


@dataclass(frozen=True, kw_only=True)
class CoherencePolicy:
    """Policy of `is_coherent`.

    floats  values that a launch writes, and reads twice as many of, one size after the other
    rounds  launches on the same buffer of each size; all have to be seen
    """

    floats: tuple[int, ...] = (1 << 16,)
    rounds: int = 6


DEFAULT: Final = CoherencePolicy()


def is_coherent(device: Resources, policy: CoherencePolicy = DEFAULT) -> bool:
    """Return whether launches read the host's last writes, and the host theirs, without mapping.

    Takes 20 ms, most of it to load the kernel. `device` has unified memory.
    """
    device.explicit_handovers = True
    try:
        return hands_over(device, policy)
    finally:
        device.explicit_handovers = False


def hands_over(
    device: Resources, policy: CoherencePolicy = DEFAULT, buffer: HostBuffer | None = None
) -> bool:
    """Return whether launches and the host see each other's writes as calls are bound now.

    In a buffer if one is given, else in memory that the device allocates.
    """
    return all(_sees_writes(device, floats, policy.rounds, buffer) for floats in policy.floats)


def _sees_writes(device: Resources, floats: int, rounds: int, buffer: HostBuffer | None) -> bool:
    call, x, residual, y = ProbeCall.of(device, floats, buffer)
    for i in range(rounds):
        x.array[:], residual.array[:], y.array[:] = i, np.arange(floats), np.nan
        call.submit().wait()
        if not np.array_equal(y.array[0], np.arange(i, i + floats, dtype=np.float32)):
            return False
    return True
