"""The estimated cost of a compilation, and whether a chip can hold the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.backends.snapdragon import DOMAIN_BYTES, Chip
from hetero.compiling.jobs import FILE_BYTES, Job, mib
from hetero.errors import UserError

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


@dataclass(frozen=True)
class Domain:
    """A process domain of the NPU: its contexts, the first and the last by name, and their bytes.

    Bytes are those of the weights; `snapdragon.RESERVED_BYTES` has room for everything else.
    """

    contexts: int
    first: str
    last: str
    weight_bytes: int

    def describe(self) -> str:
        """Return a phrase for people."""
        return f"{self.first} to {self.last} ({self.contexts} contexts, {mib(self.weight_bytes)})"


def domains_of(jobs: Iterable[Job], *, shared: bool) -> tuple[Domain, ...]:
    """Return where QNN puts the contexts, in the order that they are opened: first fit.

    A context is a graph, or with `shared` all graphs of a weight.
    """
    domains: list[Domain] = []
    for job in jobs:
        for _ in range(1 if shared and job.shareable else job.graphs):
            nbytes = job.layout_bytes
            fits = (i for i, x in enumerate(domains) if x.weight_bytes + nbytes <= DOMAIN_BYTES)
            i = next(fits, None)
            if i is None:
                domains.append(Domain(1, job.name, job.name, nbytes))
            else:
                x = domains[i]
                domains[i] = Domain(x.contexts + 1, x.first, job.name, x.weight_bytes + nbytes)
    return tuple(domains)


def needs_sharing(jobs: Sequence[Job]) -> bool:
    """Return whether graphs with weights of their own take more than one process domain."""
    return len(domains_of(jobs, shared=False)) > 1


def check_limits(jobs: Sequence[Job], sizes: Sequence[int], chip: Chip, *, shared: bool) -> None:
    """Raise `UserError` with the smallest change that fits the chip's NPU."""
    for job in jobs:
        if job.weight_bytes > LARGEST_GRAPH_BYTES:
            raise UserError(
                f"{job.name}: a graph of {mib(job.weight_bytes)} is more than the compiler takes "
                f"({mib(LARGEST_GRAPH_BYTES)}): give its rows to the GPU, or cut them in the plan"
            )
    needed = domains_of(jobs, shared=shared)
    if len(needed) > chip.domains:
        raise UserError(
            f"the graphs need {mib(sum(x.weight_bytes for x in needed))}, but the NPU of "
            f"{chip.name} can hold {chip.domains} × {mib(DOMAIN_BYTES)} besides its code: "
            f"{_advice(jobs, sizes, chip, shared=shared)}"
        )


def _advice(jobs: Sequence[Job], sizes: Sequence[int], chip: Chip, *, shared: bool) -> str:
    fewer = _fewer_sizes(jobs, sizes, chip, shared=shared)
    advice = [f"--graph-sizes {','.join(map(str, fewer))}"] if fewer else []
    if not shared and len(domains_of(jobs, shared=True)) <= chip.domains:
        advice.insert(0, "--share-weights")
    if advice:
        return f"{' or '.join(advice)} fits"
    return (
        "even one graph size does not fit: give some matmuls to the GPU in the plan, or --profile "
        "for one that is solved within that"
    )


def _fewer_sizes(
    jobs: Sequence[Job], sizes: Sequence[int], chip: Chip, *, shared: bool
) -> tuple[int, ...]:
    """Return the most graph sizes that fit; none if no set does."""
    fitting = list(sizes)
    while len(fitting) > 1:
        fitting.pop(0 if len(fitting) > 2 and fitting[0] > 1 else -1)
        fewer = [job.for_sizes(fitting) for job in jobs]
        if len(domains_of(fewer, shared=shared)) <= chip.domains:
            return tuple(fitting)
    return ()


def graphs_bytes(jobs: Sequence[Job], *, shared: bool) -> int:
    """Return the estimated size of all compiled graphs; `shared` ones of a weight hold it once."""
    return sum(
        job.file_bytes + FILE_BYTES * (job.graphs - 1)
        if shared and job.shareable
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
