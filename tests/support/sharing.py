"""What all devices share in a process that runs tests: a context, the programs that are built in
it, and the child that compiles.

A driver reads a source again to find what was compiled of it, which is most of what opening a model
takes, and a child takes half a second to start. Processes that tests start have these for each
device, as has a run with `--exhaustive`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import pytest

from hetero.backends.opencl import megakernel, platform, program_source, resources
from hetero.backends.opencl.program_source import OPTIONS, ProgramSource
from hetero.backends.opencl.self_test import program_compiler, supervisor
from hetero.backends.opencl.self_test.program_compiler import Variant
from hetero.backends.opencl.self_test.supervisor import Supervisor, WorkerJob

PROGRAMS = 256  # kept at most


@contextmanager
def shared() -> Iterator[None]:
    """Until the end all devices of this process share these."""
    children: dict[tuple[Any, ...], _Child] = {}

    def child(job: WorkerJob, device: int) -> _Child:
        key = (job, device, supervisor.worker_command)  # some tests have a command of their own
        return children.setdefault(key, _Child(job, device))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "new_context", cache(resources.new_context))
        patch.setattr(program_compiler, "_build", lru_cache(PROGRAMS)(program_compiler._build))
        patch.setattr(platform, "Supervisor", child)
        yield
    for one in children.values():
        one.end()


class _Child:
    """A `Supervisor` of several devices, which outlives them; one thread at a time is answered."""

    def __init__(self, job: WorkerJob, device: int) -> None:
        self._supervisor = Supervisor(job, device)
        self._turn = threading.Lock()

    def build(self, source: ProgramSource, variant: Variant | None) -> None:
        """See `Supervisor.build`."""
        with self._turn:
            self._supervisor.build(source, variant)

    def close(self) -> None:
        """Another device may ask."""

    def end(self) -> None:
        """End the child."""
        self._supervisor.close()


@contextmanager
def unoptimised() -> Iterator[None]:
    """Until the end programs are compiled without optimisation, in less than half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (program_source, megakernel):
            patch.setattr(module, "OPTIONS", (*OPTIONS, "-cl-opt-disable"))
        yield
