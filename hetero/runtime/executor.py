"""Walks a lowered step: a flat list of pre-bound calls, no lookup, no allocation of tensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetero.backends.protocol import DEFAULT_DEADLINE_S, BoundCall, Completion, DeviceKind


@dataclass
class Usage:
    """What one device did: `ops` calls, `busy_s` seconds.

    A blocking device is busy while a call runs. An asynchronous one counts from the first
    submission of a run of calls until the host has seen the last complete.
    """

    ops: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True)
class Segment:
    """Consecutive calls on one device. `submits` if it is asynchronous, else `runs`."""

    kind: DeviceKind
    names: tuple[str, ...]
    submits: tuple[Callable[[], Completion], ...] = ()
    runs: tuple[Callable[[], None], ...] = ()


@dataclass(frozen=True)
class Step:
    """A phase at one token count, lowered. `calls` keeps everything alive that the segments use."""

    tokens: int
    segments: tuple[Segment, ...]
    calls: tuple[BoundCall, ...]


@dataclass
class Executor:
    """Runs steps on the control thread and counts what each device did.

    Calls of one device complete in submission order; at a change of device the executor waits for
    the last submission, so the next device finds everything written. `deadline_s` bounds each wait.
    """

    deadline_s: float = DEFAULT_DEADLINE_S
    usage: dict[DeviceKind, Usage] = field(default_factory=dict)

    def run(self, step: Step) -> None:
        """Execute; when it returns, all outputs are visible to the host."""
        collecting = gc.isenabled()
        gc.disable()  # a collection in the middle of a step costs milliseconds
        try:
            for segment in step.segments:
                self._run_segment(segment)
        finally:
            if collecting:
                gc.enable()

    def _run_segment(self, segment: Segment) -> None:
        start = time.perf_counter()
        if segment.submits:
            for submit in segment.submits:
                completion = submit()
            completion.wait(self.deadline_s)
        else:
            for run in segment.runs:
                run()
        usage = self.usage.setdefault(segment.kind, Usage())
        usage.busy_s += time.perf_counter() - start
        usage.ops += len(segment.names)


def make_segments(calls: Sequence[tuple[DeviceKind, bool, BoundCall]]) -> tuple[Segment, ...]:
    """Group (kind, asynchronous, call) triples in order into segments of one device each."""
    groups: list[tuple[DeviceKind, bool, list[BoundCall]]] = []
    for kind, asynchronous, call in calls:
        if groups and groups[-1][0] == kind:
            groups[-1][2].append(call)
        else:
            groups.append((kind, asynchronous, [call]))
    return tuple(_segment(kind, asynchronous, members) for kind, asynchronous, members in groups)


def _segment(kind: DeviceKind, asynchronous: bool, calls: list[BoundCall]) -> Segment:
    names = tuple(call.name for call in calls)
    if asynchronous:
        return Segment(kind, names, submits=tuple(call.submit for call in calls))
    return Segment(kind, names, runs=tuple(call.run for call in calls))
