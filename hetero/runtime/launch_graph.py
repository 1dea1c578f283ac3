"""The launches of a step and what must come before what, as data.

An edge says that a launch has to wait for another one's end: it reads what the other wrote (RAW),
writes what the other reads (WAR) or writes what the other wrote (WAW). Only the nearest hazards are
edges; what follows from several of them is no edge of its own. A slot is one thing here, however
its panels lie: launches of the same stage (the parts of one matmul) write other places of it and
do not conflict, and everything else about a slot is ordered.

Pure: nothing here knows devices, kernels or time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeAlias

from hetero.backends.protocol import DeviceKind
from hetero.runtime.slot_refs import SlotRef

Span: TypeAlias = tuple[int, int]


class Hazard(StrEnum):
    """The reason why a launch waits for another one."""

    RAW = "read after write"
    WAR = "write after read"
    WAW = "write after write"


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One launch, and what it touches.

    `name` is for people; `node` the node of the model that it is for (copies are for the node that
    reads them). `kind` is None for the control thread's own work. `asynchronous` launches are
    queued and end in the order of their queue; all others keep the control thread until their end.
    `tokens` × `rows` is a matmul's part of the output, `heads` are the key/value heads of a shared
    attention (None: all). Launches of one `stage` use slots that
    differ, or different places in them.
    """

    name: str
    node: str
    kind: DeviceKind | None
    asynchronous: bool
    reads: frozenset[SlotRef]
    writes: frozenset[SlotRef]
    tokens: Span
    rows: Span | None
    stage: int
    chunk: int = 0
    heads: Span | None = None


class Edge(NamedTuple):
    """Launch `after` may not begin before launch `before` has ended (places in the graph)."""

    before: int
    after: int
    hazard: Hazard
    slot: SlotRef


@dataclass(frozen=True)
class LaunchGraph:
    """Launches in an order that is right, one after another, and the edges between them."""

    launches: tuple[LaunchSpec, ...]
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, launches: Iterable[LaunchSpec]) -> LaunchGraph:
        """Return the graph of launches given in a valid order, stage by stage."""
        ordered = tuple(launches)
        return cls(ordered, tuple(_edges(ordered)))

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """Return for every launch those that it waits for, in rising order."""
        return self._neighbours(lambda edge: (edge.after, edge.before))

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """Return for every launch those that wait for it, in rising order."""
        return self._neighbours(lambda edge: (edge.before, edge.after))

    def _neighbours(self, ends: Callable[[Edge], tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        waits: list[set[int]] = [set() for _ in self.launches]
        for own, other in map(ends, self.edges):
            waits[own].add(other)
        return tuple(tuple(sorted(others)) for others in waits)


@dataclass
class _Use:
    """The last launch that wrote a slot, and those that have read it since."""

    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


def _edges(launches: Sequence[LaunchSpec]) -> Iterable[Edge]:
    uses: dict[SlotRef, _Use] = {}
    for _, group in groupby(range(len(launches)), key=lambda i: launches[i].stage):
        members = list(group)
        for i in members:
            yield from _edges_of(i, launches[i], uses)
        _note(members, launches, uses)


def _edges_of(i: int, launch: LaunchSpec, uses: dict[SlotRef, _Use]) -> Iterable[Edge]:
    for slot in sorted(launch.reads | launch.writes, key=str):
        use = uses.get(slot, _Use())
        if slot in launch.reads:
            yield from (Edge(j, i, Hazard.RAW, slot) for j in use.writers)
        if slot in launch.writes:
            yield from (Edge(j, i, Hazard.WAW, slot) for j in use.writers)
            yield from (Edge(j, i, Hazard.WAR, slot) for j in use.readers)


def _note(
    members: Sequence[int], launches: Sequence[LaunchSpec], uses: dict[SlotRef, _Use]
) -> None:
    """Record the reads and writes of a stage's launches."""
    for slot in {slot for i in members for slot in launches[i].writes}:
        uses[slot] = _Use(writers=[i for i in members if slot in launches[i].writes])
    for i in members:
        for slot in launches[i].reads - launches[i].writes:
            uses.setdefault(slot, _Use()).readers.append(i)
