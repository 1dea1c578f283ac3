"""The estimated cost of a compilation, and whether a chip can hold the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.backends.snapdragon import PROCESS_LIMIT_BYTES, RESERVED_BYTES
from hetero.compiling.jobs import FILE_BYTES, Job, mib
from hetero.errors import UserError

NPU_ROOM_BYTES = PROCESS_LIMIT_BYTES - RESERVED_BYTES  # for the graphs of one process

# Largest constant of one graph; an ONNX file holds 2 GiB.
LARGEST_GRAPH_BYTES = 1536 << 20

# Measured on this project's two-core x86-64 machine (qnn.md): seconds for each graph and byte,
# and memory of the compiling child.
COMPILE_S, COMPILE_S_PER_BYTE = 0.2, 1.05e-7
CHILD_BYTES, CHILD_BYTES_PER_BYTE = 180 << 20, 12.0


@dataclass(frozen=True)
class Estimate:
    """Estimate of a compilation, from figures measured on another machine."""

    graphs: int
    graphs_bytes: int
    weights_bytes: int
    seconds: float
    peak_bytes: int

    def describe(self) -> str:
        """Return one paragraph for people."""
        return (
            f"{self.graphs} graphs, about {mib(self.graphs_bytes)} of compiled graphs and "
            f"{mib(self.weights_bytes)} of weights, {self.seconds / 60:.1f} minutes and "
            f"{mib(self.peak_bytes)} of memory (estimates)"
        )


def check_limits(jobs: Sequence[Job], sizes: Sequence[int], *, shared: bool) -> None:
    """Raise `UserError` with the smallest change that fits the NPU's address space."""
    for job in jobs:
        if job.weight_bytes > LARGEST_GRAPH_BYTES:
            raise UserError(
                f"{job.name}: a graph of {mib(job.weight_bytes)} is more than the compiler takes "
                f"({mib(LARGEST_GRAPH_BYTES)}): give its rows to the GPU, or cut them in the plan"
            )
    room = NPU_ROOM_BYTES
    needed = graphs_bytes(jobs, shared=shared)
    if needed > room:
        raise UserError(
            f"the graphs need {mib(needed)}, but a process on the NPU can hold {mib(room)} besides "
            f"its code: {_advice(jobs, sizes, room, shared=shared)}"
        )


def _advice(jobs: Sequence[Job], sizes: Sequence[int], room: int, *, shared: bool) -> str:
    fewer = _fewer_sizes(jobs, sizes, room, shared=shared)
    advice = [f"--graph-sizes {','.join(map(str, fewer))}"] if fewer else []
    if not shared and graphs_bytes(jobs, shared=True) <= room:
        advice.insert(0, "--share-weights")
    if advice:
        return f"{' or '.join(advice)} fits"
    return "even one graph size does not fit: give some matmuls to the GPU in the plan"


def _fewer_sizes(
    jobs: Sequence[Job], sizes: Sequence[int], room: int, *, shared: bool
) -> tuple[int, ...]:
    """Return the most graph sizes that fit; none if no set does."""
    fitting = list(sizes)
    while len(fitting) > 1:
        fitting.pop(0 if len(fitting) > 2 and fitting[0] > 1 else -1)
        fewer = [job.for_sizes(fitting) for job in jobs]
        if graphs_bytes(fewer, shared=shared) <= room:
            return tuple(fitting)
    return ()


def graphs_bytes(jobs: Sequence[Job], *, shared: bool) -> int:
    """Return the estimated size of all compiled graphs; `shared` ones of a weight hold it once."""
    return sum(
        job.file_bytes + FILE_BYTES * (job.graphs - 1)
        if shared and job.graphs and job.group is None
        else job.file_bytes * job.graphs
        for job in jobs
    )


def estimate(jobs: Sequence[Job], weights_bytes: int, *, shared: bool) -> Estimate:
    """Estimate size, time and memory of compiling these graphs."""
    graphs = sum(job.graphs for job in jobs)
    largest = max(job.weight_bytes for job in jobs)
    seconds = sum(j.graphs * (COMPILE_S + COMPILE_S_PER_BYTE * j.weight_bytes) for j in jobs)
    peak = CHILD_BYTES + CHILD_BYTES_PER_BYTE * largest
    return Estimate(graphs, graphs_bytes(jobs, shared=shared), weights_bytes, seconds, int(peak))
