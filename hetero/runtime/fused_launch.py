"""Fused launches: consecutive submissions as one, for steps that are not timed call by call.

A device that can chain calls (`SupportsFusedLaunch`) hands over between them without its driver. A
chain counts as the last of its launches, so it ends where a launch is waited for. It is short
enough that a thread which has left it (another process has the core) is back in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, TypeAlias

from hetero.backends.host.gc_pause import gc_paused
from hetero.backends.optional import SupportsFusedLaunch
from hetero.backends.protocol import EVERY_KIND, BoundCall, Device, DeviceKind
from hetero.runtime.program import SIGNAL, SUBMIT, WAIT, Action, Launch

LONGEST: Final = 64  # launches
SHORTEST: Final = 8  # fewer gain less than it costs to compile a program for them
Run: TypeAlias = Sequence[Action]


@gc_paused()
def fuse_program(
    program: tuple[Action, ...],
    launches: tuple[Launch, ...],
    devices: Mapping[DeviceKind, Device],
    *,
    compiles: bool,
) -> tuple[Action, ...]:
    """Return the program with fused launches in place of runs of submissions, if there are any.

    `compiles` is as in `SupportsFusedLaunch.fuse`.
    """
    runs = list(_runs(program, launches))
    instead: dict[int, Action] = {}  # by place in `runs`
    for kind in {run[0].kind for run in runs}:
        own = [at for at, run in enumerate(runs) if run[0].kind == kind and len(run) >= SHORTEST]
        stages = [_stages(runs[at], launches) for at in own]
        device = devices[EVERY_KIND[kind]]
        calls = None
        if stages and isinstance(device, SupportsFusedLaunch):
            calls = device.fuse(stages, compiles=compiles)
        for at, call in zip(own, calls or (), strict=bool(calls)):
            instead[at] = runs[at][-1]._replace(target=call.submit)
    if not instead:
        return program
    return tuple(
        action
        for at, run in enumerate(runs)
        for action in ([instead[at]] if at in instead else run)
    )


def _runs(program: Sequence[Action], launches: Sequence[Launch]) -> Iterator[Run]:
    """Yield the runs of actions that can be fused, and all others one by one."""
    awaited = {action.launch for action in program if action.code in (WAIT, SIGNAL)}
    run: list[Action] = []
    for action in program:
        fits = action.code == SUBMIT and launches[action.launch].call.fusible
        if run and not (fits and action.kind == run[0].kind):
            yield from _parts(run)
            run = []
        if not fits:
            yield [action]
            continue
        run.append(action)
        if action.launch in awaited:
            yield from _parts(run)
            run = []
    yield from _parts(run)


def _parts(run: Run) -> Iterator[Run]:
    """Split a run into as few parts of at most `LONGEST`, of about equal length."""
    count = -(-len(run) // LONGEST)
    for part in range(count):
        yield run[part * len(run) // count : (part + 1) * len(run) // count]


def _stages(run: Run, launches: Sequence[Launch]) -> list[list[BoundCall]]:
    """Return the calls of each node, which are independent of each other."""
    of_nodes = groupby((launches[action.launch] for action in run), lambda launch: launch.node)
    return [[launch.call for launch in of_node] for _, of_node in of_nodes]
